"""SparseLinear against the dense layer it stands for."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparsight import SparseLinear, Topology


def pair(out=6, width=9, density=0.4, *, bias=True, dtype=torch.float64, seed=0):
    """A dense layer with zeros and the sparse layer made of it."""
    torch.manual_seed(seed)
    dense = nn.Linear(width, out, bias=bias, dtype=dtype)
    mask = torch.rand(out, width) < density
    with torch.no_grad():
        dense.weight *= mask
    sparse = SparseLinear.from_dense(copy.deepcopy(dense), Topology.from_mask(mask))
    return dense, sparse, mask


@given(
    st.integers(1, 20), st.integers(1, 70), st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.integers(0, 40),
    st.booleans(), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_outputs_and_gradients_are_the_dense_layers(out, width, density, rows, bias, dtype):
    dense, sparse, mask = pair(out, width, density, bias=bias, dtype=dtype)
    x = torch.randn(rows, width, dtype=dtype)
    weights = torch.randn(rows, out, dtype=dtype)
    results = []
    for layer in (dense, sparse):
        own = x.clone().requires_grad_()
        y = layer(own)
        (y * weights).sum().backward()
        results.append((y.detach(), own.grad, layer.bias.grad if bias else None))
    for want, got in zip(*results, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want)
    got = sparse.layout.by_position(sparse.values.grad)
    torch.testing.assert_close(got, dense.weight.grad[mask])


@pytest.mark.parametrize("shape", [(9,), (4, 9), (2, 3, 9), (2, 1, 3, 9), (0, 9), (3, 0, 9)])
def test_inputs_of_any_leading_shape(shape):
    dense, sparse, _ = pair()
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), dense(x))


def test_inputs_that_are_not_contiguous():
    dense, sparse, _ = pair()
    x = torch.randn(9, 5, dtype=torch.float64).T.requires_grad_()
    (sparse(x)[:, ::2] ** 2).sum().backward()
    got, x.grad = x.grad, None
    (dense(x)[:, ::2] ** 2).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_gradcheck():
    _, sparse, _ = pair()
    x = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)

    def call(x, values, bias):
        return torch.func.functional_call(sparse, {"values": values, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(call, (x, sparse.values, sparse.bias))


def test_there_and_back():
    dense, sparse, mask = pair()
    back = sparse.to_dense()
    assert torch.equal(back.weight, dense.weight)
    assert torch.equal(back.bias, dense.bias)
    assert torch.equal(sparse.weight, dense.weight)
    assert sparse.topology.nnz == int(mask.sum()) == sparse.values.numel()
    assert repr(sparse).startswith("SparseLinear(in_features=9, out_features=6, bias=True, density=")


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_are_their_own(way):
    _, sparse, _ = pair()
    x = torch.randn(4, 9, dtype=torch.float64)
    want = sparse(x)
    if way == "deepcopy":
        other = copy.deepcopy(sparse)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(sparse))
    else:
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), want)
    with torch.no_grad():
        other.values.zero_()
    del other
    assert torch.equal(sparse(x), want)


def test_a_state_dict_carries_the_topology_and_may_have_another_size():
    _, one, _ = pair(density=0.3, seed=1)
    _, two, _ = pair(density=0.6, seed=2)
    param = two.values
    two.load_state_dict(one.state_dict())
    x = torch.randn(4, 9, dtype=torch.float64)
    assert torch.equal(one(x), two(x))
    assert two.values is param
    assert two.topology.same_as(one.topology)
    two(x).sum().backward()
    assert two.values.grad.shape == one.values.shape


def test_a_state_dict_that_contradicts_itself_is_refused():
    _, sparse, _ = pair()
    state = sparse.state_dict()
    broken = dict(state, values=state["values"][:-1])
    with pytest.raises(ValueError, match=r"'values' has shape .* its topology \d+ weights"):
        sparse.load_state_dict(broken)
    broken = dict(state, col=state["col"].flip(0))
    with pytest.raises(ValueError, match="sorted and distinct"):
        sparse.load_state_dict(broken)


def test_bad_input_says_what_came_and_what_was_expected():
    _, sparse, _ = pair()
    with pytest.raises(ValueError, match=r"expected inputs of width 9, got shape \(4, 7\)"):
        sparse(torch.randn(4, 7))
    with pytest.raises(ValueError, match=r"computes on the CPU, got inputs on meta .* storage='masked'"):
        sparse(torch.empty(4, 9, device="meta"))
    with pytest.raises(ValueError, match=r"topology has 54 weights, got values of shape \(3,\)"):
        SparseLinear(Topology.full((6, 9)), torch.zeros(3))
    with pytest.raises(ValueError, match="two dimensions"):
        SparseLinear(Topology.full((6, 3, 3)), torch.zeros(54))


def test_autocast_computes_in_float32():
    dense, sparse, _ = pair(dtype=torch.float32)
    x = torch.randn(4, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = sparse(x.bfloat16())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, dense(x.bfloat16().float()))


def test_data_parallel_style_replicas_share_the_plan():
    _, sparse, _ = pair()
    x = torch.randn(4, 9, dtype=torch.float64)
    replica = sparse._replicate_for_data_parallel()
    replica.values, replica.bias = sparse.values.detach(), sparse.bias.detach()
    assert torch.equal(replica(x), sparse(x))


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    model = nn.Sequential(pair(dtype=torch.float32)[1], nn.ReLU(), nn.Linear(6, 2))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 9)
    for net in (compiled, twin):
        net(x).square().sum().backward()
    torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(model[0].values.grad, twin[0].values.grad)
    torch.testing.assert_close(model[0].bias.grad, twin[0].bias.grad)
