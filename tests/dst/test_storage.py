"""Compressed and masked storage: the same training, the same topologies, and what each layer gets."""

import copy

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.common import assert_same

STEPS = 500
METHODS = {
    "static": sp.static(),
    "rigl": sp.rigl(steps=STEPS, every=20),
    "set": sp.set_(every=20),
    "snfs": sp.snfs(steps=STEPS, every=20),
    "mest": sp.mest(steps=STEPS, every=20),
    "granet": sp.granet(steps=STEPS, every=20),
    "acdc": sp.acdc(steps=STEPS, phase=40),
    "srigl": sp.srigl(steps=STEPS, every=20),
    "block": sp.block(4, 1, steps=STEPS, every=20),
}


def network(dtype=torch.float64):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)).to(
        dtype
    )


def batch(step, dtype=torch.float64):
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step), dtype=dtype)
    return x, x[:, :4].sin() + x[:, 4:8] * x[:, 8:12]


def run(method, storage, *, steps=STEPS, dtype=torch.float64, clip=False, micro=1):
    model = network(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sparse = sp.sparsify(model, optimizer, density=0.25, method=method, storage=storage)
    losses = []
    for step in range(steps):
        x, y = batch(step, dtype)
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(micro), y.chunk(micro), strict=True):
            loss = (model(xs) - ys).square().mean() / micro
            loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, sparse, losses


def assert_alike(masked, compressed, tolerance):
    assert masked[2].updates == compressed[2].updates
    for name, topology in masked[2].topologies.items():
        assert topology.same_as(compressed[2].topologies[name]), name
        layer = compressed[2].layers[name]
        assert layer.weight.storage == "compressed"
        assert layer.weight.param.shape == (topology.nnz,)
        dense = masked[2].layers[name].weight.param
        by_position = layer.weight.modules[0].layout.by_position
        torch.testing.assert_close(
            layer.weight.values(), dense.detach()[topology.mask()], rtol=tolerance, atol=tolerance
        )
        for one, two in zip(
            masked[1].state[dense].values(), compressed[1].state[layer.weight.param].values(), strict=True
        ):
            if one.shape == dense.shape:
                torch.testing.assert_close(
                    by_position(two), one[topology.mask()], rtol=tolerance, atol=tolerance
                )
    torch.testing.assert_close(masked[3], compressed[3], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_both_storages_train_the_same(name):
    results = [run(METHODS[name], storage) for storage in ("masked", "compressed")]
    assert_alike(*results, tolerance=1e-7)


@pytest.mark.parametrize("name", ["rigl", "set", "snfs"])
def test_both_storages_train_the_same_in_float32(name):
    results = [run(METHODS[name], storage, dtype=torch.float32) for storage in ("masked", "compressed")]
    assert_alike(*results, tolerance=2e-3)


@pytest.mark.parametrize("name", ["rigl", "snfs"])
def test_with_accumulation_and_clipping(name):
    results = [
        run(METHODS[name], storage, steps=90, clip=True, micro=4) for storage in ("masked", "compressed")
    ]
    assert_alike(*results, tolerance=1e-8)


@pytest.mark.parametrize("name", ["rigl", "set", "snfs", "granet"])
def test_resume_on_compressed_storage_is_bit_identical(name):
    model, optimizer, sparse, _ = run(METHODS[name], "compressed", steps=50)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sparse.state_dict()))
    fresh = network()
    other = torch.optim.Adam(fresh.parameters(), lr=3e-3)
    again = sp.sparsify(fresh, other, density=0.25, method=METHODS[name], storage="compressed", seed=77)
    fresh.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    for step in range(50, 150):
        for net, opt in ((model, optimizer), (fresh, other)):
            x, y = batch(step)
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            opt.step()
    assert_same(model.state_dict(), fresh.state_dict())
    assert_same(sparse.state_dict(), again.state_dict())


def test_the_optimizer_follows_into_compressed_storage_and_back():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = batch(0)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    buffer = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    sparse = sp.sparsify(model, optimizer, density=0.25, method=sp.static(), storage="compressed")
    mask = sparse.topologies["0"].mask()
    assert isinstance(model[0], sp.SparseLinear)
    assert torch.equal(optimizer.state[model[0].values]["momentum_buffer"], buffer[mask])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    weight = model[0].weight.detach()
    sparse.densify()
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], buffer * mask)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_tied_layers_share_their_values():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    finals = []
    for storage in ("masked", "compressed"):
        torch.manual_seed(0)
        model = Tied().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sparse = sp.sparsify(
            model, optimizer, density=0.3, method=sp.rigl(steps=60, every=5), storage=storage
        )
        for step in range(60):
            x, _ = batch(step)
            optimizer.zero_grad()
            (model(x[:, :16]) - x[:, :16].flip(1)).square().mean().backward()
            optimizer.step()
        finals.append((sparse.topologies["a"], model(x[:, :16]).detach(), model))
    assert finals[1][2].a.values is finals[1][2].b.values
    assert finals[0][0].same_as(finals[1][0])
    torch.testing.assert_close(finals[0][1], finals[1][1])


def test_what_cannot_be_compressed_stays_masked_and_says_why(capsys):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.up = nn.Linear(16, 32)
            self.half = nn.Linear(16, 16, dtype=torch.bfloat16)
            self.watched = nn.Linear(16, 16)
            self.watched.register_forward_hook(lambda *_: None)

    sparse = sp.sparsify(Net(), density=0.2, method=sp.static(), storage="compressed")
    got = {name: (layer.weight.storage, layer.why) for name, layer in sparse.layers.items()}
    assert got["up"][0] == "compressed"
    assert got["attention.in_proj_weight"] == ("masked", "no kernel for MultiheadAttention.in_proj_weight")
    assert got["attention.out_proj"][0] == "masked"
    assert got["half"] == ("masked", "no kernel for bfloat16")
    assert got["watched"] == ("masked", "hooks are attached to the module")
    sparse.summary()
    assert "no kernel for bfloat16" in capsys.readouterr().out
    alone = sp.sparsify(nn.Linear(8, 8), density=0.5, method=sp.static(), storage="compressed")
    assert "the model is this one layer" in alone.layers["weight"].why
    latent = sp.sparsify(network(), method=sp.nm(2, 4), storage="compressed")
    assert latent.layers["0"].why == "nm keeps its missing weights"


@pytest.mark.parametrize("stop", [45, 60])  # in between, and right before an update
def test_a_copy_goes_on_alone_and_the_same(stop):
    model, optimizer, sparse, _ = run(METHODS["rigl"], "compressed", steps=stop)
    twins = copy.deepcopy((model, optimizer, sparse))
    for net, opt, _ in (twins, (model, optimizer, sparse)):
        for step in range(stop, stop + 50):
            x, y = batch(step)
            opt.zero_grad()
            (net(x) - y).square().mean().backward()
            opt.step()
    assert sparse.updates == twins[2].updates > 3
    assert_same(model.state_dict(), twins[0].state_dict())
    assert_same(sparse.state_dict(), twins[2].state_dict())


def test_flops_do_not_depend_on_the_storage():
    flops = [
        sp.sparsify(network(), density=0.25, method=sp.rigl(steps=1000), storage=storage).flops(batch(0)[0])
        for storage in ("masked", "compressed")
    ]
    assert flops[0] == flops[1]


def test_compressed_under_torch_compile():
    """Compiled and eager: the same topologies through updates, where plan and tap change under the graph."""
    torch._dynamo.reset()
    outcomes = []
    for compiled in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sparse = sp.sparsify(
            model, optimizer, density=0.25, method=sp.rigl(steps=60, every=10), storage="compressed"
        )
        net = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        for step in range(60):
            x, y = batch(step)
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        outcomes.append((sparse, model))
    assert outcomes[0][0].updates == outcomes[1][0].updates >= 3
    for name, topology in outcomes[0][0].topologies.items():
        assert topology.same_as(outcomes[1][0].topologies[name])
    torch.testing.assert_close(outcomes[0][1].state_dict(), outcomes[1][1].state_dict())
