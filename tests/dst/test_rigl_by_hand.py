"""RigL, SET and SNFS against plain NumPy written from their descriptions, and cases worked by hand."""

import numpy as np
import pytest
import torch
from torch import nn

import sparsight as sp


def numpy_rigl(weights, grads, mask, count):
    """Keep the largest |w| that exist, grow the largest |g| elsewhere, straight from the paper."""
    existing = [tuple(i) for i in np.argwhere(mask)]
    by_size = sorted(existing, key=lambda i: -abs(weights[i]))
    kept = set(by_size[: len(existing) - count])
    others = [tuple(i) for i in np.ndindex(mask.shape) if tuple(i) not in kept]
    grown = set(sorted(others, key=lambda i: -abs(grads[i]))[:count])
    new = np.zeros_like(mask)
    values = np.zeros_like(weights)
    for i in kept | grown:
        new[i] = True
        if mask[i]:
            values[i] = weights[i]  # kept, or dropped and grown back: it keeps its value
    return new, values


def test_rigl_follows_the_paper_step_by_step():
    """A two-layer float64 network trained by the library and, beside it, by NumPy alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7, bias=False), nn.Tanh(), nn.Linear(7, 5, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    sparse = sp.sparsify(
        model, optimizer, density=0.4, method=sp.rigl(steps=40, every=4, fraction=0.5, end=1.0)
    )
    w = [model[0].weight.detach().numpy().copy(), model[2].weight.detach().numpy().copy()]
    masks = [sparse.topologies["0"].mask().numpy(), sparse.topologies["2"].mask().numpy()]
    momentum = [np.zeros_like(w[0]), np.zeros_like(w[1])]
    swapped = regrown = 0
    for step in range(40):
        x = torch.randn(11, 9, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        y = x[:, :5].sin()
        optimizer.zero_grad()
        (model(x) - y).square().sum(1).mean().backward()
        optimizer.step()
        # The same in NumPy: forward, backward, then SGD with momentum or the update.
        xs, ys = x.numpy(), y.numpy()
        hidden = np.tanh(xs @ w[0].T)
        error = 2 * (hidden @ w[1].T - ys) / len(xs)
        grads = [((error @ w[1]) * (1 - hidden**2)).T @ xs, error.T @ hidden]
        due = step > 0 and step % 4 == 0 and step <= 40
        fraction = 0.25 * (1 + np.cos(np.pi * step / 40))
        for i in range(2):
            count = int(fraction * masks[i].sum())
            if due and count:
                new, w[i] = numpy_rigl(w[i], grads[i], masks[i], count)
                momentum[i] = momentum[i] * (masks[i] & new)
                swapped += int((new & ~masks[i]).sum())
                regrown += count - int((new & ~masks[i]).sum())
                masks[i] = new
            else:
                momentum[i] = 0.9 * momentum[i] + grads[i] * masks[i]
                w[i] = w[i] - 0.2 * momentum[i] * masks[i]
        for i, layer in enumerate(sparse.layers.values()):
            assert np.array_equal(layer.topology.mask().numpy(), masks[i]), f"step {step}"
            np.testing.assert_allclose(layer.weight.param.detach().numpy(), w[i], atol=1e-12)
            buffer = optimizer.state[layer.weight.param]["momentum_buffer"].numpy()
            np.testing.assert_allclose(buffer, momentum[i], atol=1e-12)
    assert swapped > 10
    assert regrown > 0, "no weight was dropped and grown back: the case is not exercised"


def one_layer(weight, mask, method, lr=0.0):
    """A linear layer with a given weight and mask, whose weight gradient is whatever we like."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    optimizer = torch.optim.SGD([layer.weight], lr=lr)
    density = float(mask.double().mean())
    sparse = sp.sparsify(layer, density=density, method=method, distribution=sp.uniform(False))
    state = sparse.state_dict()
    topology = sp.Topology.from_mask(mask)
    state["weight.crow"], state["weight.col"] = topology.crow, topology.col
    with torch.no_grad():
        layer.weight.copy_(weight * mask)
    sparse.load_state_dict(state)
    return layer, optimizer, sparse.attach(optimizer)


def run_with_gradient(layer, optimizer, gradient):
    optimizer.zero_grad()
    (layer.weight * gradient).sum().backward()
    optimizer.step()


def always(grow, **kwargs):
    return sp.Method("test", grow=grow, fraction=sp.constant(0.5), due=lambda step: True, **kwargs)


def test_an_existing_zero_beats_a_position_that_does_not_exist():
    weight = torch.tensor([[0.0, 5.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, False]])
    method = always(sp.criteria.gradient, replaces_step=True, gradient="due")
    layer, optimizer, sparse = one_layer(weight, mask, method)
    run_with_gradient(layer, optimizer, torch.tensor([[9.0, 0.0, 1.0, 2.0]]))
    # One of two goes: the zero. Its gradient is the largest of all, so it is grown right back.
    assert sparse.topologies["weight"].mask().tolist() == [[True, True, False, False]]
    run_with_gradient(layer, optimizer, torch.tensor([[1.0, 0.0, 1.5, 2.0]]))
    assert sparse.topologies["weight"].mask().tolist() == [[False, True, False, True]]


def test_the_sign_of_the_gradient_does_not_matter_and_its_size_does():
    weight = torch.tensor([[1.0, 3.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, False]])
    method = always(sp.criteria.gradient, replaces_step=True, gradient="due")
    layer, optimizer, sparse = one_layer(weight, mask, method)
    run_with_gradient(layer, optimizer, torch.tensor([[0.5, 7.0, -2.0, 1.0]]))
    assert sparse.topologies["weight"].mask().tolist() == [[False, True, True, False]]
    assert layer.weight.tolist() == [[0.0, 3.0, 0.0, 0.0]]


def test_set_drops_the_smallest_of_each_sign_in_proportion():
    weight = torch.tensor([[0.1, 0.2, 5.0, 6.0, -3.0, -4.0, -9.0, -8.0, 0.0, 0.0, 0.0, 0.0]])
    mask = weight != 0
    method = always(sp.criteria.random, drop=sp.criteria.signed_magnitude)
    layer, optimizer, _ = one_layer(weight, mask, method)
    run_with_gradient(layer, optimizer, torch.zeros_like(weight))
    survivors = set(layer.weight[layer.weight != 0].tolist())
    # By magnitude alone 0.1, 0.2, -3 and -4 would go as well; the proportion shows with more of one sign.
    assert survivors >= {5.0, 6.0, -8.0, -9.0}
    weight = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, -7.0, -8.0, 0.0, 0.0, 0.0, 0.0]])
    layer, optimizer, _ = one_layer(weight, weight != 0, method)
    run_with_gradient(layer, optimizer, torch.zeros_like(weight))
    survivors = layer.weight[layer.weight != 0]
    assert -8.0 in survivors
    assert {round(v, 3) for v in survivors.tolist()} >= {0.4, 0.5, 0.6, -8.0}


def test_set_can_draw_new_weights_from_a_normal():
    torch.manual_seed(0)
    model = nn.Linear(200, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparse = sp.sparsify(
        model, optimizer, density=0.2, method=sp.set_(every=1, std=0.1), distribution=sp.uniform(False)
    )
    before = sparse.topologies["weight"].mask()
    model(torch.zeros(1, 200)).sum().backward()
    optimizer.step()
    grown = model.weight.detach()[sparse.topologies["weight"].mask() & ~before]
    assert len(grown) > 900
    assert float(grown.std()) == pytest.approx(0.1, rel=0.1)
    assert float(grown.mean()) == pytest.approx(0.0, abs=0.02)


def test_snfs_moves_weights_to_the_layer_with_the_larger_momentum():
    torch.manual_seed(0)
    loud, quiet = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
    model = nn.ModuleList([loud, quiet])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sparse = sp.sparsify(model, optimizer, density=0.2, method=sp.snfs(steps=20, every=5))
    for step in range(11):
        noise = torch.randn(20, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        ((loud.weight * noise).sum() * 10 + (quiet.weight * noise).sum()).backward()
        optimizer.step()
    counts = {name: t.nnz for name, t in sparse.topologies.items()}
    assert sum(counts.values()) == 160
    assert counts["0"] > counts["1"] + 20


def test_mest_weighs_the_gradient_in():
    weight = torch.tensor([[1.0, 3.0, 0.0, 0.0]])
    drop = sp.criteria.magnitude_and_gradient(1.0)
    method = always(sp.criteria.random, drop=drop)
    layer, optimizer, sparse = one_layer(weight, weight != 0, method)
    run_with_gradient(layer, optimizer, torch.tensor([[5.0, 0.0, 0.0, 0.0]]))
    assert sparse.topologies["weight"].mask()[0, 0], "|1| + |5| beats |3| + |0|"
    assert layer.weight[0, 0] == 1.0


def test_top_kast_moves_the_backward_set_and_nothing_else():
    """Plain SGD without decay: only weights of the backward set change, by lr times their gradient."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    start = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    method = sp.top_kast(backward=0.5, decay=0.0)
    sparse = sp.sparsify(layer, optimizer, density=0.25, method=method, distribution=sp.uniform(False))
    size = start.abs().flatten()
    forward, reach = size.topk(8).indices, size.topk(16).indices
    assert sparse.topologies["weight"].positions().tolist() == sorted(forward.tolist())
    gradient = torch.randn(4, 8)
    run_with_gradient(layer, optimizer, gradient)
    latent = (layer.weight + sparse.layers["weight"].weight.reserve).detach()
    moved = torch.zeros(32)
    moved[reach] = 1
    torch.testing.assert_close(latent, start - 0.01 * gradient * moved.view(4, 8))
    assert int((layer.weight != 0).sum()) == 8


def test_top_kast_decays_the_rest_of_the_backward_set_more():
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    start = layer.weight.detach().clone().flatten()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    method = sp.top_kast(backward=0.5, decay=0.01)
    sparse = sp.sparsify(layer, optimizer, density=0.25, method=method, distribution=sp.uniform(False))
    order = start.abs().argsort(descending=True)
    run_with_gradient(layer, optimizer, torch.zeros(4, 8))
    latent = (layer.weight + sparse.layers["weight"].weight.reserve).detach().flatten()
    torch.testing.assert_close(latent[order[:8]], start[order[:8]] * 0.99)
    torch.testing.assert_close(latent[order[8:16]], start[order[8:16]] * (1 - 0.01 / 0.25))
    assert torch.equal(latent[order[16:]], start[order[16:]])


def test_sr_ste_is_its_formula():
    """w ← w − lr·(g + λ·(1 − mask)·w), the mask from the two largest of four."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 3, bias=False)
    w = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sparse = sp.sparsify(layer, optimizer, method=sp.nm(2, 4, decay=0.05))
    for step in range(5):
        mask = torch.zeros_like(w)
        for row in range(3):
            for group in range(0, 8, 4):
                mask[row, group + w[row, group : group + 4].abs().topk(2).indices] = 1
        assert torch.equal(layer.weight.detach(), w * mask)
        gradient = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        run_with_gradient(layer, optimizer, gradient)
        w = w - 0.1 * (gradient + 0.05 * (1 - mask) * w)
        latent = layer.weight + sparse.layers["weight"].weight.reserve
        torch.testing.assert_close(latent.detach(), w)
        w = latent.detach().clone()


def test_two_of_four_holds_along_input_channels_of_a_convolution():
    conv = nn.Conv2d(8, 6, 3)
    sparse = sp.sparsify(conv, method=sp.nm(2, 4))
    mask = sparse.topologies["weight"].mask()
    groups = mask.view(6, 2, 4, 3, 3).sum(2)
    assert torch.all(groups == 2)


def test_srigl_has_one_fan_in_for_all_living_neurons_and_ablates_for_good():
    torch.manual_seed(0)
    layer = nn.Linear(40, 20, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = sp.srigl(steps=60, every=5, fraction=0.5, end=1.0, saliency=0.9)
    sparse = sp.sparsify(layer, optimizer, density=0.2, method=method, distribution=sp.uniform(False))
    dead: set[int] = set()
    for step in range(60):
        # Half of the neurons see tiny gradients and small weights: they are not salient.
        scale = torch.linspace(0.01, 1, 20)[:, None]
        noise = torch.randn(20, 40, generator=torch.Generator().manual_seed(step)) * scale
        run_with_gradient(layer, optimizer, noise + 0.5 * layer.weight.detach())
        fan_in = sparse.topologies["weight"].crow.diff()
        living = fan_in[fan_in > 0]
        assert len(set(living.tolist())) == 1
        assert int(living[0]) == 160 // len(living)
        now_dead = set((fan_in == 0).nonzero().flatten().tolist())
        assert dead <= now_dead, "an ablated neuron came back"
        dead = now_dead
    assert dead, "nothing was ablated: the case is not exercised"


def test_blocks_are_whole():
    torch.manual_seed(0)
    layer = nn.Linear(16, 12, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    sparse = sp.sparsify(
        layer,
        optimizer,
        density=0.25,
        method=sp.block(4, 2, steps=20, every=2),
        distribution=sp.uniform(False),
    )
    first = sparse.topologies["weight"]
    for step in range(20):
        gradient = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))
        run_with_gradient(layer, optimizer, gradient)
        per_block = sparse.topologies["weight"].mask().view(3, 4, 8, 2).sum((1, 3))
        assert set(per_block.flatten().tolist()) == {0, 8}
        assert int(per_block.sum()) == 48
    assert not sparse.topologies["weight"].same_as(first)


def test_block_scores_are_sums_over_the_block():
    weight = torch.zeros(4, 4)
    weight[:2, :2] = 3.0  # block 0 strong, block 3 weak; both exist
    weight[2:, 2:] = 1.0
    method = always(
        sp.criteria.gradient, replaces_step=True, gradient="due", structure=sp.structures.Block(2, 2)
    )
    layer, optimizer, sparse = one_layer(weight, weight != 0, method)
    gradient = torch.zeros(4, 4)
    gradient[0, 2] = 5.0  # block 1: one large entry
    gradient[2:, :2] = 2.0  # block 2: four middling ones, together more
    run_with_gradient(layer, optimizer, gradient)
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[:2, :2] = True
    expected[2:, :2] = True
    assert torch.equal(sparse.topologies["weight"].mask(), expected)
