"""Actions on sparse weights: counts stay exact, optimizer state goes along, the search goes on."""

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.health.actions import RefusedError, Run
from sparsight.topology import Topology

A = sp.actions
STORAGES = ["masked", "compressed"]


def sparse_model(storage="masked", method=None, density=0.1, kind=torch.optim.Adam):
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 16))
    optimizer = kind(model.parameters(), lr=1e-2)
    method = sp.rigl(steps=200, every=5) if method is None else method
    sparse = sp.sparsify(model, optimizer, density=density, method=method, storage=storage)
    return model, optimizer, sparse, Run(model, optimizer, (), sparse)


def train(model, optimizer, steps=4):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()


def counts(sparse):
    return {name: topology.nnz for name, topology in sparse.topologies.items()}


def test_the_search_goes_on_with_another_fraction_period_and_end():
    model, optimizer, sparse, _ = sparse_model(method=sp.rigl(steps=200, every=5, end=0.05))
    train(model, optimizer, 20)
    assert sparse.updates == 1  # the one at the end swaps nothing
    before = sparse.method
    done = A.Search(fraction=0.4, every=7, end=0.5).apply(Run(model, optimizer, (), sparse, step=20))
    assert [t for t in range(20, 120) if sparse.method.due(t)] == [*range(27, 100, 7), 100]
    assert sparse.method.fraction(20) == 0.4
    assert sparse.method.fraction(100) == 0
    train(model, optimizer, 10)
    assert sparse.updates == 2
    done.undo()
    assert sparse.method is before


def test_a_longer_search_stretches_its_cosine():
    *_, sparse, run = sparse_model(method=sp.rigl(steps=200, every=5, end=0.5))
    A.Search(end=1.0).apply(run)
    assert sparse.method.fraction(100) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("method", "action", "why"),
    [
        (sp.static(), A.Search(fraction=0.3, every=5), "does not search"),
        (sp.set_(every=5), A.Search(end=0.5), "unknown length"),
        (sp.rigl(steps=200), A.Search(fraction=1.5), r"\[0, 1\]"),
        (sp.rigl(steps=200), A.Search(where="0"), "whole model"),
        (sp.srigl(steps=200), A.Regrow(), "its own rules"),
        (sp.top_kast(backward=0.5), A.Density(), "its own rules"),
        (sp.gmp(steps=200), A.WarmUp(), "its own way"),
        (sp.rigl(steps=200), A.WarmUp(density=2.0), "density in"),
        (sp.rigl(steps=200), A.Density("5"), "there are: '0', '2'"),
        (sp.rigl(steps=200), A.Density(times=1.0), "changes no count"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "apply") else "",
)
def test_what_makes_no_sense_is_refused(method, action, why):
    *_, sparse, run = sparse_model(method=method)
    before = counts(sparse)
    with pytest.raises(RefusedError, match=why):
        action.apply(run)
    assert counts(sparse) == before
    assert sparse.method is method


def with_dead_rows(sparse, living=6):
    """All weights of the first layer in its first rows."""
    layer = sparse.layers["0"]
    per, count = layer.topology.nnz // living, layer.topology.nnz
    places = torch.cat([row * 32 + torch.arange(per) for row in range(living)])
    extra = living * 32 + torch.arange(count - places.numel())
    topology = Topology.from_positions((24, 32), torch.cat((places, extra)))
    from sparsight.health.actions.copying import move_to

    move_to(sparse, layer, topology, torch.randn(topology.nnz))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
def test_dead_neurons_get_weights_and_the_count_stays_exact(storage, kind):
    model, optimizer, sparse, run = sparse_model(storage, kind=kind)
    train(model, optimizer)
    with_dead_rows(sparse)
    train(model, optimizer, 2)
    before, layer = counts(sparse), sparse.layers["0"]
    living = layer.topology.crow.diff() > 0
    kept = {int(p): float(v) for p, v in zip(layer.topology.positions(), layer.weight.values(), strict=True)}
    done = A.Regrow("0").apply(run)
    assert counts(sparse) == before
    assert bool((layer.topology.crow.diff() > 0).all())
    assert int(living.sum()) < 12
    now = {int(p): float(v) for p, v in zip(layer.topology.positions(), layer.weight.values(), strict=True)}
    assert all(now[p] == kept[p] for p in now.keys() & kept.keys())
    assert all(now[p] != 0 for p in now.keys() - kept.keys())
    gone = [abs(kept[p]) for p in kept.keys() - now.keys()]
    assert max(gone) < max(abs(v) for v in kept.values())
    train(model, optimizer, 8)
    assert counts(sparse) == before
    done.undo()
    assert counts(sparse) == before
    train(model, optimizer, 2)


def test_regrowing_where_nothing_is_dead_is_refused():
    *_, run = sparse_model(density=0.5)
    with pytest.raises(RefusedError, match="is dead"):
        A.Regrow().apply(run)


@pytest.mark.parametrize("storage", STORAGES)
def test_lower_sparsity_has_exactly_as_many_weights_and_the_method_keeps_them(storage):
    model, optimizer, sparse, run = sparse_model(storage)
    train(model, optimizer)
    before = counts(sparse)
    done = A.Density(times=2.5).apply(run)
    expected = {name: round(2.5 * n) for name, n in before.items()}
    assert counts(sparse) == expected
    train(model, optimizer, 12)
    assert sparse.updates >= 2
    assert counts(sparse) == expected
    done.undo()
    assert counts(sparse) == before
    train(model, optimizer, 6)
    A.Density("0", times=0.5).apply(run)
    assert counts(sparse) == {**before, "0": round(before["0"] / 2)}
    train(model, optimizer, 6)


@pytest.mark.parametrize("storage", STORAGES)
def test_warm_up_is_dense_first_and_comes_back_to_the_budget(storage):
    model, optimizer, sparse, _ = sparse_model(storage)
    before = counts(sparse)
    A.WarmUp(density=0.6, steps=20).apply(Run(model, optimizer, (), sparse))
    assert sparse.density == pytest.approx(0.6, abs=0.01)
    seen = []
    for _ in range(25):
        train(model, optimizer, 1)
        seen.append(sparse.density)
    assert seen == sorted(seen, reverse=True)
    assert counts(sparse) == before
    updates = sparse.updates
    train(model, optimizer, 10)
    assert sparse.updates > updates


def test_warm_up_undone_is_sparse_at_once():
    model, optimizer, sparse, run = sparse_model("compressed")
    before, method = counts(sparse), sparse.method
    done = A.WarmUp(density=0.6, steps=40).apply(run)
    train(model, optimizer, 6)
    done.undo()
    assert counts(sparse) == before
    assert sparse.method is method
    train(model, optimizer, 10)
    assert counts(sparse) == before
