"""Topologies chosen before or after training: SNIP, GraSP, pruning, lottery tickets."""

import copy
import itertools

import pytest
import torch
from torch import nn

import sparsight as sp
from tests.dst.test_loops import data, loss_of, mlp


def small():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch():
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, x[:, :2].sin()


def mean_square(model):
    x, y = batch()
    return (model(x) - y).square().mean()


def weights_without(model, name, index):
    """The model with one weight scaled by (1 − t), as a function of t."""
    other = copy.deepcopy(model)

    def scaled(t):
        with torch.no_grad():
            for (n, p), (_, original) in zip(other.named_parameters(), model.named_parameters(), strict=True):
                p.copy_(original)
                if n == name:
                    p.view(-1)[index] *= 1 - t
        return other

    return scaled


def kept(model, sparse):
    return {n: set(t.positions().tolist()) for n, t in sparse.topologies.items()}


def best_by(scores, count):
    """Names and positions of the `count` largest, each layer's best included."""
    flat = sorted(((s, n, i) for n, layer in scores.items() for i, s in enumerate(layer)), reverse=True)
    chosen: dict[str, set[int]] = {n: set() for n in scores}
    for _, n, i in flat[:count]:
        chosen[n].add(i)
    return chosen


def test_snip_is_the_loss_change_of_a_connection():
    """|d loss / dt| when a weight is scaled by (1 − t), by finite differences in float64."""
    model = small()
    scores = {}
    for name in ("0", "2"):
        size = model.get_parameter(f"{name}.weight").numel()
        scores[name] = []
        for i in range(size):
            scaled = weights_without(model, f"{name}.weight", i)
            slope = (mean_square(scaled(1e-6)) - mean_square(scaled(-1e-6))).item() / 2e-6
            scores[name].append(abs(slope))
    sparse = sp.sparsify(model, density=0.5, method=sp.snip(lambda: mean_square(model)))
    assert kept(model, sparse) == best_by(scores, 10)


def test_grasp_keeps_what_carries_the_gradient_norm():
    """−½ d‖g‖² / dt over the weights' own gradients, by finite differences in float64."""
    model = small()

    def flow(m):
        weights = [m[0].weight, m[2].weight]
        return sum(g.square().sum() for g in torch.autograd.grad(mean_square(m), weights)).item()

    scores = {}
    for name in ("0", "2"):
        size = model.get_parameter(f"{name}.weight").numel()
        scores[name] = []
        for i in range(size):
            scaled = weights_without(model, f"{name}.weight", i)
            scores[name].append(-(flow(scaled(1e-5)) - flow(scaled(-1e-5))) / 4e-5)
    sparse = sp.sparsify(model, density=0.5, method=sp.grasp(lambda: mean_square(model)))
    assert kept(model, sparse) == best_by(scores, 10)


def test_initial_scores_can_follow_the_distribution_and_leave_no_gradient_behind():
    model = mlp()
    method = sp.snip(lambda: loss_of(model, 0), scope="layer")
    sparse = sp.sparsify(model, density=0.2, method=method, distribution=sp.uniform(False))
    assert {n: t.nnz for n, t in sparse.topologies.items()} == {"0": 58, "2": 77, "4": 9}
    assert all(p.grad is None for p in model.parameters())


def train(model, sparse=None, steps=60, start=0):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    if sparse is not None:
        sparse.attach(optimizer)
    for step in range(start, steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_one_shot_pruning_keeps_the_largest_weights_of_the_whole_model():
    model = mlp()
    train(model)
    dense = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("weight")}
    sparse = sp.prune(model, 0.2)
    everything = torch.cat([w.abs().flatten() for w in dense.values()])
    threshold = everything.sort(descending=True).values[round(0.2 * len(everything)) - 1]
    for name, w in dense.items():
        mask = sparse.topologies[name.removesuffix(".weight")].mask()
        assert torch.equal(mask, w.abs() >= threshold)
        assert torch.equal(model.get_parameter(name).detach(), w * mask)


def test_gradual_pruning_fine_tunes_after_each_round_and_never_grows():
    model = mlp()
    train(model)
    seen = []

    def fine_tune(sparse):
        train(model, sparse, steps=20)
        seen.append({n: t.mask() for n, t in sparse.topologies.items()})

    sparse = sp.prune(model, 0.1, fine_tune, rounds=3)
    counts = [sum(int(m.sum()) for m in masks.values()) for masks in seen]
    total = sum(t.size for t in sparse.topologies.values())
    assert counts == [round(total * 0.1 ** (k / 3)) for k in (1, 2, 3)]
    for earlier, later in itertools.pairwise(seen):
        assert all(not (later[n] & ~earlier[n]).any() for n in later)
    assert sparse.optimizer is None
    assert not model[0].weight[~sparse.topologies["0"].mask()].any()


@pytest.mark.parametrize("rewind", [0, 7])
def test_lottery_tickets_rewind_to_the_step_they_were_told(rewind):
    model = mlp()
    calls, starts = [], []

    def one_run(sparse, start, stop):
        calls.append((None if sparse is None else round(sparse.density, 3), start, stop))
        starts.append({k: v.clone() for k, v in model.state_dict().items()})
        train(model, sparse, steps=30 if stop is None else stop, start=start)

    sparse = sp.lottery_ticket(model, one_run, 0.5, rate=0.2, rewind=rewind)
    densities = [0.8, 0.64, 0.512, 0.5]
    dense = [(None, 0, rewind), (None, rewind, None)] if rewind else [(None, 0, None)]
    assert [(d and pytest.approx(d, abs=2e-3), a, b) for d, a, b in calls] == dense + [
        (d, rewind, None) for d in densities
    ]
    # Every ticket starts from the weights at step `rewind`, cut to its mask.
    origin = starts[len(dense) - 1]
    mask = sparse.topologies["2"].mask()
    assert torch.equal(starts[-1]["2.weight"], origin["2.weight"] * mask)
    assert torch.equal(starts[-1]["0.bias"], origin["0.bias"])
    assert int((model[2].weight != 0).sum()) == sparse.topologies["2"].nnz


def test_pruning_a_trained_model_costs_less_than_a_random_mask():
    model = mlp()
    train(model, steps=150)
    pruned, shuffled = copy.deepcopy(model), copy.deepcopy(model)
    sp.prune(pruned, 0.5)
    sp.sparsify(shuffled, density=0.5, method=sp.static())
    x, y = data(999, rows=500)
    losses = [nn.functional.cross_entropy(m(x), y).item() for m in (pruned, shuffled)]
    assert losses[0] < losses[1] - 0.1
