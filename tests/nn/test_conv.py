"""SparseConv2d against the dense convolution it stands for."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsight as sp
from sparsight import SparseConv2d, Topology

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def pair(channels=4, out=6, kernel=(3, 3), density=0.3, **kwargs):
    torch.manual_seed(0)
    dense = nn.Conv2d(channels, out, kernel, dtype=torch.float64, **kwargs)
    mask = torch.rand_like(dense.weight) < density
    with torch.no_grad():
        dense.weight *= mask
    return dense, SparseConv2d.from_dense(copy.deepcopy(dense), Topology.from_mask(mask)), mask


@given(pairs, pairs, st.tuples(st.integers(0, 2), st.integers(0, 2)), pairs, st.booleans(), st.integers(1, 3))
def test_outputs_and_gradients_are_the_dense_layers(kernel, stride, padding, dilation, bias, rows):
    dense, sparse, mask = pair(kernel=kernel, stride=stride, padding=padding, dilation=dilation, bias=bias)
    x = torch.randn(rows, 4, 9, 8, dtype=torch.float64)
    results = []
    for layer in (dense, sparse):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.sin().sum().backward()
        results.append((y.detach(), own.grad, layer.bias.grad if bias else torch.zeros(1)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    got = sparse.layout.by_position(sparse.values.grad)
    torch.testing.assert_close(got, dense.weight.grad[mask])


def test_gradcheck():
    _, sparse, _ = pair(channels=2, out=3, stride=2, padding=1)
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def call(x, values, bias):
        return torch.func.functional_call(sparse, {"values": values, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(call, (x, sparse.values, sparse.bias))


def test_there_and_back_and_one_image_alone():
    dense, sparse, _ = pair(stride=2, padding=(1, 2), dilation=(2, 1))
    back = sparse.to_dense()
    assert torch.equal(back.weight, dense.weight)
    assert (back.stride, back.padding, back.dilation) == (dense.stride, dense.padding, dense.dilation)
    x = torch.randn(4, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), dense(x))
    twin = copy.deepcopy(sparse)
    assert torch.equal(twin(x), sparse(x))


def test_same_padding():
    dense, sparse, _ = pair(padding="same", dilation=2)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(sparse(x), dense(x))


def test_bad_input_says_what_came_and_what_was_expected():
    _, sparse, _ = pair()
    with pytest.raises(
        ValueError, match=r"expected inputs \[..., 4, height, width\], got shape \(2, 3, 9, 9\)"
    ):
        sparse(torch.randn(2, 3, 9, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"kernel of \(3, 3\).* is larger than the padded input \(2, 9\)"):
        sparse(torch.randn(2, 4, 2, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match="four dimensions"):
        SparseConv2d(Topology.full((6, 9)), torch.zeros(54))
    with pytest.raises(ValueError, match=r"groups=1 .* got groups=2"):
        SparseConv2d.from_dense(nn.Conv2d(4, 4, 3, groups=2), Topology.full((4, 2, 3, 3)))


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    _, sparse, _ = pair(stride=2, padding=1)
    twin = copy.deepcopy(sparse)
    compiled = torch.compile(nn.Sequential(sparse, nn.ReLU()), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    compiled(x).square().sum().backward()
    twin(x).relu().square().sum().backward()
    torch.testing.assert_close(sparse.values.grad, twin.values.grad)


def test_what_has_no_kernel_stays_masked_and_says_why():
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv1d(8, 8, 3),
    )
    sparse = sp.sparsify(model, density=0.2, method=sp.static(), storage="compressed")
    stored = {name: (layer.weight.storage, layer.why) for name, layer in sparse.layers.items()}
    assert stored["0"][0] == "compressed"
    assert stored["1"] == ("masked", "no kernel for a convolution with groups=2, padding=(0, 0)")
    assert stored["2"][0] == stored["3"][0] == "masked"
    assert stored["3"][1] == "no kernel for Conv1d.weight"


@pytest.mark.parametrize(
    "method",
    [sp.rigl(steps=120, every=10), sp.set_(every=10), sp.snfs(steps=120, every=10)],
    ids=lambda method: method.name,
)
def test_both_storages_train_the_same(method):
    outcomes = []
    for storage in ("masked", "compressed"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(),
            nn.Linear(8 * 9, 4),
        ).double()  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        sparse = sp.sparsify(model, optimizer, density=0.25, method=method, storage=storage)
        for step in range(120):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            (model(x) - x.mean((2, 3)).sin() @ torch.ones(3, 4).double()).square().mean().backward()
            optimizer.step()
        outcomes.append((sparse, model(x).detach()))
    assert [layer.weight.storage for layer in outcomes[1][0].layers.values()] == ["compressed"] * 3
    assert outcomes[0][0].updates == outcomes[1][0].updates >= 5
    for name, topology in outcomes[0][0].topologies.items():
        assert topology.same_as(outcomes[1][0].topologies[name]), name
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-8, atol=1e-8)
