"""Sick runs with acting on: they end as well as their healthy twins, and the records show how.

The healthy twin differs in nothing but the illness. Where the illness costs quality, a run that is left alone
shows it.
"""

from functools import partial

import pytest
import torch

import sparsight as sp
from sparsight.health.actions.copying import move_to
from sparsight.topology import Topology
from tests.health.patients import expert_run, sparse_run

STEPS = 400
ACT = {"act": True, "cooldown": 100, "every": 20}


@pytest.fixture(scope="module")
def healthy_experts(tmp_path_factory):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return expert_run(tmp_path_factory.mktemp("healthy"), steps=STEPS)


@pytest.fixture(scope="module")
def healthy_rigl(tmp_path_factory):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return sparse_run(tmp_path_factory.mktemp("healthy"), steps=STEPS)


def kinds(outcome) -> set[str]:
    return {e.data["kind"] for e in outcome.events("action", "done")}


def found(outcome) -> set[str]:
    return {e.rule for e in outcome.events("finding")}


def resolved(outcome) -> set[str]:
    return {e.rule for e in outcome.events("note") if e.data.get("resolved")}


def series(outcome, name):
    return outcome.history.get(name, outcome.history.places(name)[0]).values


def collapsed(model):
    model.router.weight[0, -1] = 8.0  # the last input is always 1: expert 0 wins every token


def one_dead(model):
    model.router.weight[3, -1] = -30.0


def saturated(model):
    model.router.weight.mul_(200)


@pytest.mark.parametrize(
    ("patch", "coef", "rule", "remedy"),
    [
        (collapsed, 0.0, "expert_collapse", {"Balance", "Revive"}),
        (one_dead, 0.05, "dead_experts", {"Revive"}),
        (saturated, 0.05, "gate_saturation", {"CoolRouter"}),
    ],
    ids=["collapse", "dead expert", "saturation"],
)
def test_sick_routing_recovers(tmp_path, healthy_experts, patch, coef, rule, remedy):
    run = partial(expert_run, steps=STEPS, patch=patch, coef=coef)
    sick = run(tmp_path / "sick", manage={"every": 20})
    healed = run(tmp_path / "healed", manage=ACT)
    assert rule in found(sick)
    assert rule not in resolved(sick) or rule == "expert_collapse"
    assert sick.quality < 0.995 * healthy_experts.quality
    assert healed.quality > 0.98 * healthy_experts.quality
    assert rule in found(healed)
    assert remedy <= kinds(healed)
    assert rule in resolved(healed)
    if rule == "gate_saturation":
        assert series(healed, "moe/gate_saturation")[0] > 0.9
        assert series(healed, "moe/gate_saturation")[-5:].max() < 0.75
    else:
        assert series(healed, "moe/load_entropy")[:3].max() < 0.85
        assert series(healed, "moe/load_entropy")[-5:].min() > 0.9
    assert not [f for f in healed.manager.open.values() if f.severity == "act"]


def test_a_frozen_topology_searches_again(tmp_path, healthy_rigl):
    run = partial(sparse_run, steps=STEPS, method=sp.rigl(steps=STEPS, every=10, fraction=0.0))
    sick = run(tmp_path / "sick", manage={"every": 20})
    healed = run(tmp_path / "healed", manage=ACT)
    assert "frozen_topology" in found(sick)
    assert sick.quality < 0.95 * healthy_rigl.quality
    assert healed.quality > 0.98 * healthy_rigl.quality
    assert kinds(healed) == {"Search"}
    assert "frozen_topology" in resolved(healed)
    itop = "sparse/itop_rate"
    assert sick.history.get(itop).values[-1] == sick.history.get(itop).values[0]
    assert healed.history.get(itop).values[-1] > 2 * healed.history.get(itop).values[0]
    density = healed.history.get("sparse/density").values
    assert density.min() == density.max()


def test_an_over_sparsified_model_gets_more_weights(tmp_path, healthy_rigl):
    healed = sparse_run(tmp_path / "healed", steps=STEPS, density=0.003, manage=ACT)
    assert healed.quality > 0.95 * healthy_rigl.quality
    assert "Density" in kinds(healed)
    assert "over_sparsified" in resolved(healed)
    density = healed.history.get("sparse/density").values
    assert density[-1] > 10 * density[0]


def few_rows(sparse):
    """All weights of the first layer in its first rows."""
    layer = sparse.layers["0"]
    rows, fan_in = layer.topology.shape
    living = -(-layer.topology.nnz // fan_in)
    places = torch.arange(layer.topology.nnz)
    assert living < rows / 4
    move_to(sparse, layer, Topology.from_positions((rows, fan_in), places), 0.1 * torch.randn(rows * fan_in))


def test_dead_neurons_live_again(tmp_path, healthy_rigl):
    """RigL brings some of them back by itself, and leaves six of ten dead."""
    healed = sparse_run(tmp_path / "healed", steps=STEPS, patch=few_rows, manage=ACT)
    assert kinds(healed) == {"Regrow"}
    assert "dead_neurons" in resolved(healed)
    dead = healed.history.get("sparse/dead_neurons", "0").values
    assert dead[1] > 0.5
    assert dead[-1] < 0.2
    assert healed.quality > 0.98 * healthy_rigl.quality
    density = healed.history.get("sparse/density", "0").values
    assert density.min() == density.max()


def test_a_nan_is_met_before_it_spreads(tmp_path, healthy_experts):
    def poison(step, model):
        if step == 255:
            model.experts[1].up.weight.grad[0, 0] = torch.nan

    with pytest.raises(ValueError, match="NaN or infinite"):
        expert_run(tmp_path / "sick", steps=STEPS, each_step=lambda step, model: poison(step + 250, model))
    healed = expert_run(tmp_path / "healed", steps=STEPS, each_step=poison, manage={**ACT, "keep": 2})
    assert healed.quality > 0.98 * healthy_experts.quality
    (event,) = healed.events("action", "done")
    assert (event.step, event.rule, event.data["kind"]) == (256, "non_finite_gradient", "Rewind")
    assert "step 200" in event.message
    assert "non_finite_gradient" in resolved(healed)


def test_a_diverging_run_goes_back_and_slows_down(tmp_path, healthy_experts):
    def kick(step, model):
        if 200 <= step < 210:
            with torch.no_grad():
                for expert in model.experts:
                    expert.down.weight.mul_(2.0)

    healed = expert_run(tmp_path / "healed", steps=STEPS, each_step=kick, manage={**ACT, "keep": 3})
    assert "loss_diverging" in found(healed)
    assert {"Rewind", "LearningRate"} <= kinds(healed)
    assert healed.quality > 0.98 * healthy_experts.quality
