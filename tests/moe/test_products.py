"""The kernels in C++ agree with their torch twins: odd sizes, idle groups, every instruction set, threads."""

import pytest
import torch

from sparsight.kernels import grouped, native
from sparsight.moe import products
from sparsight.moe.activations import SILU

pytestmark = pytest.mark.skipif(not native.available(), reason="no native kernels")
SETS = [name for name in native.INSTRUCTION_SETS if native.isa_available(name)]
COUNTS = [5, 1, 40, 100, 17]
SIZES = [(3, 5), (16, 48), (37, 70), (64, 33)]


@pytest.fixture(params=SETS)
def isa(request):
    before = native.isa()
    native.isa_force(request.param)
    yield request.param
    native.isa_force(before)


def close(a, b):
    exact = a.dtype == torch.float64
    torch.testing.assert_close(a, b, rtol=1e-12 if exact else 1e-5, atol=1e-12 if exact else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_and_gradients(isa, inputs, outputs, dtype):
    torch.manual_seed(0)
    n = sum(COUNTS)
    weights = [torch.randn(outputs, inputs, dtype=dtype) for _ in COUNTS]
    x, dy = torch.randn(n, inputs, dtype=dtype), torch.randn(n, outputs, dtype=dtype)
    out = [kind.product(weights, COUNTS, x, torch.empty_like(dy)) for kind in (grouped, products)]
    close(*out)
    grads = []
    for kind in (grouped, products):
        made = [torch.full_like(w, torch.nan) if i != 1 else None for i, w in enumerate(weights)]
        kind.gradient(made, COUNTS, dy, x)
        grads.append(torch.stack([g for g in made if g is not None]))
    close(*grads)


def test_a_gradient_over_more_rows_than_one_go_takes(isa):
    torch.manual_seed(0)
    x, dy = torch.randn(1100, 20, dtype=torch.float64), torch.randn(1100, 13, dtype=torch.float64)
    made = torch.empty(13, 20, dtype=torch.float64)
    grouped.gradient([made], [1100], dy, x)
    close(made, dy.t() @ x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_and_rows(isa, dtype):
    torch.manual_seed(0)
    before = torch.randn(9, 2 * 21, dtype=dtype) * 20
    before[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    d_out = torch.randn(9, 21, dtype=dtype)
    made = [torch.empty_like(d_out) for _ in range(2)]
    close(grouped.glu(before, made[0]), products.glu(SILU, before, made[1]))
    back = [torch.empty_like(before) for _ in range(2)]
    grouped.glu_backward(before, d_out, back[0])
    products.glu_backward(SILU, before, d_out.clone(), back[1])
    close(*back)
    rows, grad = torch.randn(12, 21, dtype=dtype), torch.randn(6, 21, dtype=dtype)
    token, scale = torch.randint(6, (12,)), torch.rand(12, dtype=dtype)
    found = []
    for kind in (grouped, products):
        to, dots = torch.empty_like(rows), torch.empty_like(scale)
        kind.spread(grad, token, scale, rows, to, dots)
        found.append(torch.cat([to.flatten(), dots]))
    close(*found)
    places = torch.randperm(12).view(2, 6)
    for weight in (None, scale):
        sums = [kind.gather_sum(rows, places, weight, torch.empty_like(grad)) for kind in (grouped, products)]
        close(*sums)


def test_threads_change_nothing():
    torch.manual_seed(0)
    weights = [torch.randn(70, 37) for _ in COUNTS]
    x = torch.randn(sum(COUNTS), 37)
    before = torch.get_num_threads()
    outs = []
    for count in (1, 3):
        torch.set_num_threads(count)
        grads = [torch.empty_like(w) for w in weights]
        y = grouped.product(weights, COUNTS, x, torch.empty(sum(COUNTS), 70))
        grouped.gradient(grads, COUNTS, y, x)
        outs.append(torch.cat([y.flatten(), *(g.flatten() for g in grads)]))
    torch.set_num_threads(before)
    assert torch.equal(*outs)


def test_what_does_not_fit_is_refused():
    x, w = torch.zeros(4, 3), torch.zeros(5, 3)
    with pytest.raises(ValueError, match=r"matrix must be contiguous torch.float32 of shape \(6, 3\)"):
        grouped.product([w], [4], x, torch.zeros(4, 6))
    with pytest.raises(ValueError, match="a matrix for each of 2 counts, got 1"):
        grouped.product([w], [2, 2], x, torch.zeros(4, 5))
    with pytest.raises(ValueError, match="x must be contiguous"):
        grouped.product([w], [3], x, torch.zeros(3, 5))
