"""The native convolution, both of its ways, against its torch twin, for every instruction set there is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsight.kernels import native, reference
from sparsight.kernels.native import isa_force
from tests.kernels.conftest import CLOSE, each_isa


class Case:
    """A layer, its twin, and what goes through them."""

    def __init__(self, size, out, kernel, how, *, density=0.3, dtype=torch.float64, panel=0, kind="direct"):
        g = torch.Generator().manual_seed(sum(size) + out)
        taps = kernel[0] * kernel[1]
        mask = torch.rand(out, size[1] * taps, generator=g) < density
        crow = torch.zeros(out + 1, dtype=torch.int32)
        crow[1:] = mask.sum(1).cumsum(0)
        col = mask.nonzero()[:, 1].int().contiguous()
        shape = tuple(mask.shape)
        self.plan = native.Plan(crow, col, shape, kind=kind, taps=taps, panel=panel)
        self.twin = reference.Plan(crow, col, shape, taps=taps)
        self.how = (kernel, *how)
        self.x = torch.randn(size, dtype=dtype, generator=g)
        self.values, self.bias = (torch.randn(n, dtype=dtype, generator=g) for n in (self.plan.weights, out))
        y = reference.conv2d(self.twin, self.x, self.values, self.bias, *self.how)
        self.dy = torch.randn(y.shape, dtype=dtype, generator=g)

    def run(self, threads=1, *, bias=True, need_x=True):
        torch.set_num_threads(threads)
        y = native.conv2d(self.plan, self.x, self.values, self.bias if bias else None, *self.how)
        return y, *native.conv2d_backward(self.plan, self.dy, self.x, self.values, *self.how, need_x=need_x)

    def expected(self, *, bias=True):
        y = reference.conv2d(self.twin, self.x, self.values, self.bias if bias else None, *self.how)
        return y, *reference.conv2d_backward(self.twin, self.dy, self.x, self.values, *self.how)


def pair(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def cases(draw, kinds=("direct", "unfolded")):
    kind = draw(st.sampled_from(kinds))
    kernel = draw(pair(1, 4) | st.sampled_from([(1, 1), (3, 3), (1, 5), (7, 1), (2, 2)]))
    padding, dilation = draw(pair(0, 5)), draw(pair(1, 3))
    stride = (1, 1) if kind == "direct" else draw(pair(1, 2))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    # From images smaller than a vector to some of several tiles, seldom as wide as whole vectors.
    extra = draw(pair(0, 6) | st.sampled_from([(13, 30), (31, 15), (40, 2), (2, 70)]))
    size = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), least[0] + extra[0], least[1] + extra[1])
    return Case(
        size,
        draw(st.sampled_from([1, 3, 8, 40])),
        kernel,
        (stride, padding, dilation),
        density=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        panel=draw(st.sampled_from([0, 0, 1, 7, 20])),
        kind=kind,
    )


@each_isa
@settings(max_examples=100)
@given(case=cases(), bias=st.booleans())
def test_results_are_the_references(name, case, bias):
    isa_force(name)
    results = case.run(bias=bias)
    for got, want in zip(results, case.expected(bias=bias), strict=True):
        torch.testing.assert_close(got, want, **CLOSE[case.x.dtype])
    fewer = case.run(need_x=False)
    assert fewer[1] is None
    assert torch.equal(fewer[2], results[2])


@each_isa
@settings(max_examples=25)
@given(case=cases(kinds=("direct",)))
def test_results_do_not_depend_on_the_number_of_threads(name, case):
    isa_force(name)
    alone = case.run()
    for threads in (2, 3, 4, 5):
        for one, other in zip(alone, case.run(threads), strict=True):
            assert torch.equal(one, other)


@each_isa
@pytest.mark.parametrize("side", [(150, 64), (90, 101)], ids=["whole tiles", "ragged tiles"])
def test_a_large_image_is_cut_into_strips(name, side):
    isa_force(name)
    case = Case((2, 20, *side), 40, (3, 3), ((1, 1), (1, 2), (2, 1)), density=0.1)
    alone = case.run()
    for got, want in zip(alone, case.expected(), strict=True):
        torch.testing.assert_close(got, want, **CLOSE[torch.float64])
    for one, other in zip(alone, case.run(3), strict=True):
        assert torch.equal(one, other)


@each_isa
def test_what_lies_beyond_the_tensors_is_not_seen(name):
    """Not-a-numbers on both sides of every tensor: none may be read into a result."""
    isa_force(name)
    for width in (1, 5, 16, 19):
        case = Case((2, 3, 7, width), 4, (3, 3), ((1, 1), (1, 1), (1, 1)), dtype=torch.float32)
        for field in ("x", "dy", "values", "bias"):
            tensor = getattr(case, field)
            around = torch.full((tensor.numel() + 128,), torch.nan)
            around[64:-64] = tensor.flatten()
            setattr(case, field, around[64:-64].view(tensor.shape))
        case.run()  # leaves scratch memory filled
        for got, want in zip(case.run(), case.expected(), strict=True):
            torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@pytest.mark.parametrize("kind", ["direct", "unfolded"])
def test_an_empty_batch(kind):
    case = Case((1, 3, 6, 6), 4, (3, 3), ((1, 1), (1, 1), (1, 1)), kind=kind)
    case.x, case.dy = case.x[:0], case.dy[:0]
    y, dx, dvalues, dbias = case.run(2)
    assert y.shape == (0, 4, 6, 6)
    assert dx.shape == (0, 3, 6, 6)
    assert not dvalues.any()
    assert not dbias.any()


def test_a_plan_is_for_one_kind_of_layer():
    case = Case((1, 3, 6, 6), 4, (3, 3), ((1, 1), (1, 1), (1, 1)))
    with pytest.raises(ValueError, match=r"stride of 1, got \(2, 1\)"):
        native.conv2d(case.plan, case.x, case.values, None, (3, 3), (2, 1), (1, 1), (1, 1))
    with pytest.raises(ValueError, match="for a convolution"):
        native.linear_backward(
            case.plan, torch.zeros(2, 4).double(), torch.zeros(2, 27).double(), case.values
        )
    index = torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(ValueError, match="no row blocks, got blocks of 4"):
        native.Plan(*index, (4, 9), 4, kind="direct", taps=9)
