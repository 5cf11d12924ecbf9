"""What must hold at every step, for every method."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparsight as sp
from tests.dst.common import BY_NAME, CASES, STEPS, assert_same, start, state_of

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
dynamic_case = pytest.mark.parametrize("case", [c for c in CASES if c.dynamic], ids=lambda c: c.name)


def expected_total(case, layer, step: int) -> int:
    if case.total is not None:
        return case.total(step, layer)
    if case.name == "srigl":
        living = int((layer.topology.crow.diff() > 0).sum())
        return layer.budget // living * living
    return layer.budget


@every_case
def test_counts_are_exact_and_missing_weights_are_zero_at_every_step(case):
    run = start(case)
    whole = sum(layer.budget for layer in run.sparse.layers.values())
    for step in range(STEPS):
        run.backward(step)
        for layer in run.sparse.layers.values():
            trained = layer.weight.backward or layer.topology
            grad = layer.weight.param.grad
            assert not grad[~trained.mask()].any(), "a gradient reaches a missing weight"
        run.optimizer.step()
        held = 0
        for layer in run.sparse.layers.values():
            mask = layer.topology.mask()
            assert torch.all(layer.weight.param[~mask] == 0), "a missing weight is not zero"
            assert int(mask.sum()) == layer.topology.nnz
            held += layer.topology.nnz
            if not case.moves_layers:
                assert layer.topology.nnz == expected_total(case, layer, step + 1)
        if case.moves_layers and (case.name.startswith("snfs") or step + 1 >= 0.75 * STEPS + 1):
            assert held == whole, "the layers' budgets do not add up"
    assert run.sparse.step == STEPS
    if case.dynamic:
        assert run.sparse.updates >= 3


@dynamic_case
def test_an_update_leaves_kept_weights_alone_and_starts_grown_ones_at_zero(case):
    """Against a twin that takes the same step under the same masks without the update."""
    run = start(case)
    seen_growth = False
    for step in range(STEPS):
        before = run.sparse.topologies
        reach = {n: layer.weight.backward or layer.topology for n, layer in run.sparse.layers.items()}
        twin = run.twin()
        twin.sparse.method = replace(run.sparse.method, due=lambda step: False)
        replaced = run.sparse.method.replaces_step and run.sparse.method.due(step)
        updates = run.sparse.updates
        for each in (run, twin):
            each.backward(step)
            each.optimizer.step()
        if run.sparse.updates == updates:
            continue
        for name, layer in run.sparse.layers.items():
            other = twin.sparse.layers[name]
            now = layer.weight.backward or layer.topology
            kept = reach[name].mask() & now.mask()
            grown = now.mask() & ~reach[name].mask()
            both = before[name].mask() & layer.topology.mask()
            if not replaced:
                weight, same = layer.weight.param, other.weight.param
                assert torch.equal(weight[both], same[both])
            if not case.latent:
                assert not layer.weight.param[grown].any(), "a grown weight does not start at zero"
            slots, twins = slots_of(run, layer), slots_of(twin, other)
            for slot, same in zip(slots, twins, strict=True):
                assert not slot[grown].any(), "a grown weight has old optimizer state"
                if not replaced:
                    assert torch.equal(slot[kept], same[kept])
            seen_growth |= bool(grown.any())
    # The forward set of N:M and Top-KAST moves inside a backward set; the others must have grown.
    assert seen_growth or case.latent or case.name.startswith("gmp")


@pytest.mark.parametrize("name", ["rigl", "granet", "granet-layer", "srigl", "block", "itop"])
def test_a_due_step_replaces_the_weight_step(name):
    """Weights that existed before and after are bit for bit what they were, with their state."""
    run = start(BY_NAME[name])
    checked = 0
    for step in range(STEPS):
        run.backward(step)
        weights = {n: layer.weight.param.detach().clone() for n, layer in run.sparse.layers.items()}
        slots = {n: [s.clone() for s in slots_of(run, x)] for n, x in run.sparse.layers.items()}
        before, updates = run.sparse.topologies, run.sparse.updates
        fraction = run.sparse.method.fraction(step)
        run.optimizer.step()
        if run.sparse.updates == updates:
            continue
        for name_, layer in run.sparse.layers.items():
            if int(fraction * layer.target) == 0:
                continue  # too small to swap anything by now: its ordinary step went on
            kept = before[name_].mask() & layer.topology.mask()
            assert torch.equal(layer.weight.param[kept], weights[name_][kept])
            for slot, old in zip(slots_of(run, layer), slots[name_], strict=True):
                assert torch.equal(slot[kept], old[kept])
            checked += int(kept.sum())
    assert checked > 0


def slots_of(run, layer):
    state = run.optimizer.state[layer.weight.param]
    return [state["exp_avg"], state["exp_avg_sq"]] if state else []


@every_case
def test_the_same_seed_gives_the_same_topology_and_another_seed_another(case):
    one, two = start(case), start(case)
    other = start(case, seed=1)
    for run in (one, two, other):
        run.train(0, STEPS)
    assert_same(state_of(one), state_of(two))
    tops = zip(one.sparse.topologies.values(), other.sparse.topologies.values(), strict=True)
    # Methods that begin dense or with the largest weights leave nothing to chance.
    nothing_random = case.latent or case.name in ("gmp", "gmp-global", "acdc")
    assert all(a.same_as(b) for a, b in tops) == nothing_random


@every_case
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_resume_is_bit_identical(case, form, tmp_path):
    """Stopped before, at and after an update, saved, loaded into fresh objects: the same 200 steps."""
    length = {"torch": 200, "safetensors": 40}[form]
    straight = start(case)
    straight.train(0, 5)
    for stop in (5, 9, 10, 11) if form == "torch" else (10,):
        straight.train(straight.sparse.step, stop)
        save(straight, form, tmp_path)
        end = stop + length
        reference = straight.twin()
        reference.train(stop, end)
        fresh = start(case, seed=99)
        load(fresh, form, tmp_path)
        fresh.train(stop, end)
        assert_same(state_of(reference), state_of(fresh))
        if form == "torch":
            length = 30  # one stop goes the whole way, the others past the next updates


def save(run, form, folder):
    if form == "torch":
        parts = (run.model.state_dict(), run.optimizer.state_dict(), run.sparse.state_dict())
        torch.save(parts, folder / "run.pt")
        return
    save_file(run.model.state_dict(), folder / "model.safetensors")
    save_file(run.sparse.state_dict(), folder / "sparse.safetensors")
    slots = run.optimizer.state_dict()["state"]
    flat = {f"{i}.{name}": value for i, state in slots.items() for name, value in state.items()}
    save_file(flat, folder / "optimizer.safetensors")


def load(run, form, folder):
    if form == "torch":
        model, optimizer, sparse = torch.load(folder / "run.pt")
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)
        run.sparse.load_state_dict(sparse)
        return
    # The other order, which must do as well.
    run.sparse.load_state_dict(load_file(folder / "sparse.safetensors"))
    run.model.load_state_dict(load_file(folder / "model.safetensors"))
    state = run.optimizer.state_dict()
    for key, value in load_file(folder / "optimizer.safetensors").items():
        index, name = key.split(".")
        state["state"].setdefault(int(index), {})[name] = value
    run.optimizer.load_state_dict(state)


@dynamic_case
def test_an_update_of_fraction_zero_changes_nothing(case):
    """With nothing to swap, a run is the static run, bit for bit."""
    method = replace(case.make(), fraction=sp.constant(0.0), ramp=None, initial_density=None)
    idle = start(case, method=method)
    frozen = start(case, method=replace(method, due=lambda step: False))
    idle.train(0, 30)
    frozen.train(0, 30)
    assert idle.sparse.updates == 0
    assert_same(state_of(idle), state_of(frozen))


@every_case
def test_it_learns(case):
    run = start(case)
    first = sum(run.backward(step) for step in range(5)) / 5
    run.train(0, STEPS)
    last = sum(run.backward(step) for step in range(STEPS, STEPS + 5)) / 5
    assert last < first - 0.2
