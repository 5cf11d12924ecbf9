"""Native kernels against their torch twins, for every instruction set this machine has."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsight.kernels import native, reference
from sparsight.kernels.native import INSTRUCTION_SETS, isa_available, isa_force
from sparsight.kernels.system import openmp_runtimes, report
from tests.kernels.conftest import CLOSE, ISAS, each_isa


def test_the_native_kernels_are_there():
    """Everything else in this file would be empty without them."""
    assert native.available(), native.why_unavailable()
    assert "portable" in ISAS


def random_index(rows, columns, density, seed=0):
    mask = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    crow = torch.zeros(rows + 1, dtype=torch.int32)
    crow[1:] = mask.sum(1).cumsum(0)
    return crow, mask.nonzero()[:, 1].int().contiguous()


@st.composite
def layers(draw):
    block = draw(st.sampled_from([1, 1, 4, 8]))
    rows = draw(st.integers(1, 80 // block) | st.sampled_from([160 // block, 700 // block]))
    columns = draw(st.integers(1, 80) | st.sampled_from([300, 777]))
    batch = draw(st.integers(0, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 100, 128, 150]))
    density = draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    panel = draw(st.sampled_from([0, 0, 1, 7, 64]))
    seed = draw(st.integers(0, 99))
    crow, col = random_index(rows, columns, density, seed)
    shape = (rows * block, columns)
    plan = native.Plan(crow, col, shape, block, panel=panel)
    twin = reference.Plan(crow, col, shape, block)
    g = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(batch, n, dtype=dtype, generator=g) for n in (columns, rows * block))
    values, bias = (torch.randn(n, dtype=dtype, generator=g) for n in (plan.weights, rows * block))
    return plan, twin, x, dy, values, bias


@each_isa
@settings(max_examples=100)
@given(layer=layers())
def test_linear_equals_its_reference(name, layer):
    isa_force(name)
    plan, twin, x, dy, values, bias = layer
    close = CLOSE[x.dtype]
    for b in (bias, None):
        want = reference.linear(twin, x, values, b)
        torch.testing.assert_close(native.linear(plan, x, values, b), want, **close)
    grads = native.linear_backward(plan, dy, x, values)
    for got, want in zip(grads, reference.linear_backward(twin, dy, x, values), strict=True):
        torch.testing.assert_close(got, want, **close)
    # What is not asked for changes nothing in what is.
    fewer = native.linear_backward(plan, dy, x, values, need_x=False, need_bias=False)
    assert fewer[0] is None
    assert fewer[2] is None
    assert torch.equal(fewer[1], grads[1])


@each_isa
@settings(max_examples=40)
@given(layer=layers())
def test_results_do_not_depend_on_the_number_of_threads(name, layer):
    isa_force(name)
    plan, _, x, dy, values, bias = layer
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        grads = native.linear_backward(plan, dy, x, values)
        results.append((native.linear(plan, x, values, bias), *grads))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@each_isa
@settings(max_examples=50)
@given(
    size=st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 13), st.integers(1, 13)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    rows=st.sampled_from([1, 3, 8]),
    block=st.sampled_from([1, 1, 4, 8]),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    threads=st.sampled_from([1, 2]),
)
def test_convolution_equals_its_reference(
    name, size, kernel, stride, padding, dilation, rows, block, density, threads
):
    isa_force(name)
    torch.set_num_threads(threads)
    how = (kernel, stride, padding, dilation)
    if any(n + 2 * p < d * (k - 1) + 1 for n, k, _, p, d in zip(size[2:], *how, strict=True)):
        return
    taps = kernel[0] * kernel[1]
    crow, col = random_index(rows, size[1] * taps, density)
    shape = (rows * block, size[1] * taps)
    plan = native.Plan(crow, col, shape, block, kind="unfolded", taps=taps)
    twin = reference.Plan(crow, col, shape, block, taps=taps)
    x = torch.randn(size, dtype=torch.float64)
    values = torch.randn(plan.weights, dtype=torch.float64)
    bias = torch.randn(plan.outputs, dtype=torch.float64)
    y = native.conv2d(plan, x, values, bias, *how)
    if size[0] == 0:  # torch has no gradient of an empty convolution to compare with
        assert not native.conv2d_backward(plan, y, x, values, *how)[1].any()
        return
    torch.testing.assert_close(y, reference.conv2d(twin, x, values, bias, *how), **CLOSE[x.dtype])
    dy = torch.randn_like(y)
    grads = native.conv2d_backward(plan, dy, x, values, *how)
    for got, want in zip(grads, reference.conv2d_backward(twin, dy, x, values, *how), strict=True):
        torch.testing.assert_close(got, want, **CLOSE[x.dtype])


@each_isa
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1500, 1300), (300, 2500), (2500, 300)]
)  # the last two in slabs
def test_a_large_layer_with_many_panels(name, rows, columns, block):
    isa_force(name)
    crow, col = random_index(rows // block, columns, 0.1)
    plan = native.Plan(crow, col, (rows, columns), block, panel=200 // block)
    twin = reference.Plan(crow, col, (rows, columns), block)
    assert max(plan.native.panels) > 1
    x, dy = torch.randn(200, columns, dtype=torch.float64), torch.randn(200, rows, dtype=torch.float64)
    values = torch.randn(plan.weights, dtype=torch.float64)
    torch.testing.assert_close(native.linear(plan, x, values), reference.linear(twin, x, values))
    grads = native.linear_backward(plan, dy, x, values)
    for got, want in zip(grads, reference.linear_backward(twin, dy, x, values), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("crow", "col", "says"),
    [
        ([0, 2, 2], [1, 0], "increase"),
        ([0, 2, 2], [1, 1], "increase"),
        ([0, 1, 2], [0, 3], "outside"),
        ([0, 1, 2], [-1, 0], "outside"),
        ([0, 2, 1], [0, 1], "end|decrease"),
        ([1, 1, 2], [0, 1], "begin"),
        ([0, 3, 2], [0, 1], "decrease"),
        ([0, 2], [0, 1], "entries"),
    ],
)
def test_a_wrong_index_is_refused_when_a_plan_is_made(crow, col, says):
    with pytest.raises(ValueError, match=says):
        native.Plan(torch.tensor(crow, dtype=torch.int32), torch.tensor(col, dtype=torch.int32), (2, 3))


def test_wrong_tensors_are_refused():
    crow, col = random_index(6, 5, 0.5)
    plan = native.Plan(crow, col, (6, 5))
    values = torch.zeros(plan.weights)
    with pytest.raises(ValueError, match=r"\(3, 5\).*\(3, 4\)"):
        native.linear(plan, torch.zeros(3, 4), values)
    with pytest.raises(ValueError, match="contiguous"):
        native.linear(plan, torch.zeros(5, 3).T, values)
    with pytest.raises(ValueError, match="float16"):
        native.linear(plan, torch.zeros(3, 5), values.half())
    with pytest.raises(ValueError, match="this plan is for a linear layer"):
        native.conv2d(plan, torch.zeros(1, 5, 2, 2), values, None, (1, 1), (1, 1), (0, 0), (1, 1))
    with pytest.raises(ValueError, match="block must be 1, 4 or 8 and divide 6 outputs, got 4"):
        native.Plan(crow, col, (6, 5), block=4)


def test_there_is_one_openmp_runtime():
    """Two would mean two pools of threads that fight; where /proc is not there, nothing can be said."""
    assert len(openmp_runtimes()) <= 1


def test_the_index_stays_small():
    crow, col = random_index(1024, 1024, 0.1)
    plan = native.Plan(crow, col, (1024, 1024))
    everything = plan.bytes + 4 * (crow.numel() + col.numel())
    assert everything / plan.weights <= 14


def test_the_report_says_what_runs():
    text = report()
    assert f"running {native.isa()}" in text
    assert torch.__version__ in text


def test_unknown_isa_is_an_error_that_names_the_choices() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import sparsight.kernels.native"],
        env={**os.environ, "SPARSIGHT_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "SPARSIGHT_ISA=sse9" in run.stderr
    assert all(name in run.stderr for name in INSTRUCTION_SETS if isa_available(name))
