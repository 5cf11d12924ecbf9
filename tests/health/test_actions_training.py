"""Actions on the training itself: pace and going back."""

import pytest
import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics.routes import find_routes, routed
from sparsight.health.actions import Run
from sparsight.health.checkpoints import Checkpoints

A = sp.actions


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_learning_rate_is_multiplied_under_a_scheduler(kind):
    """As if every rate the scheduler gave had been half, to the bit."""
    made = []
    for halved in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = kind(model.parameters(), lr=0.1 if halved else 0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        if halved:
            done = A.LearningRate(0.5).apply(Run(model, optimizer))
        for i in range(10):
            step(model, optimizer, torch.randn(8, 4, generator=torch.Generator().manual_seed(i)))
            schedule.step()
        made.append(model.weight.detach().clone())
        if halved:
            done.undo()
            assert not optimizer._optimizer_step_pre_hooks
    torch.testing.assert_close(*made)


def test_the_scheduler_never_sees_the_multiplied_rate():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    A.LearningRate(0.5).apply(Run(model, optimizer))
    step(model, optimizer, torch.randn(8, 4))
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_expert_steps_further_and_the_others_as_before(kind):
    moved = {}
    for times in (1.0, 3.0):
        torch.manual_seed(0)
        model = sp.MoE(8, 16, 4)
        optimizer = kind(model.parameters(), lr=1e-2)
        run = Run(model, optimizer, tuple(find_routes(model, (routed,))))
        if times != 1:
            done = A.ExpertRate("model", (1,), times=times).apply(run)
        before = [expert.up.weight.detach().clone() for expert in model.experts]
        step(model, optimizer, torch.randn(64, 8))
        moved[times] = [e.up.weight.detach() - b for e, b in zip(model.experts, before, strict=True)]
    for expert in range(4):
        torch.testing.assert_close(moved[3.0][expert], moved[1.0][expert] * (3 if expert == 1 else 1))
    assert A.ExpertRate("model", (1,), times=100.0).apply(run).message.endswith("{1: 8}")
    done.undo()
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("storage", ["masked", "compressed"])
@pytest.mark.parametrize("method", ["rigl", "set", "granet"])
def test_rewinding_brings_weights_state_and_topology_back(storage, method):
    methods = {
        "rigl": sp.rigl(steps=100, every=4),
        "set": sp.set_(every=4),
        "granet": sp.granet(steps=100, every=4),
    }
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sparse = sp.sparsify(model, optimizer, density=0.2, method=methods[method], storage=storage)
    kept = Checkpoints(model, optimizer, sparse, 2)
    for i in range(1, 25):
        step(model, optimizer, torch.randn(32, 16))
        if i in (6, 14):
            assert kept.keep(i)
            if i == 6:
                dense = {k: v.clone() for k, v in sparse.dense_state_dict().items()}
                topologies = sparse.topologies
    first = sparse.layers["0"]
    done = A.Rewind(15).apply(Run(model, optimizer, (), sparse, step=24, checkpoints=kept))
    assert "step 6" in done.message
    assert done.undo is None
    assert sparse.step == 24
    assert all(sparse.topologies[name].same_as(old) for name, old in topologies.items())
    assert all(torch.equal(value, dense[key]) for key, value in sparse.dense_state_dict().items())
    moments = optimizer.state[first.weight.param]["exp_avg"]
    assert moments.shape == first.weight.param.shape
    for _ in range(9):
        step(model, optimizer, torch.randn(32, 16))
    assert [c.step for c in kept.kept] == [6]


def test_a_moment_with_a_nan_is_not_kept():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Checkpoints(model, optimizer, None, 2)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    assert not kept.keep(5)
    assert not kept.kept
