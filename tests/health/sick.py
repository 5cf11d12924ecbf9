"""Sick runs, each made ill on purpose: which rule must name it, and since when it has been so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics.history import History, collect
from sparsight.dynamics.records import Record
from tests.health.healthy import DepthNet
from tests.health.zoo import EVERY, KINDS, STEPS, Careful, PathNet, Plain, Task, adam, sparse, train

LATER = 60


@dataclass(frozen=True)
class Sick:
    rule: str
    make: Callable[[Path], History]
    onset: int = 0
    """The step at which the illness was given."""


def warm(model: PathNet, push: float = 3.0) -> None:
    """Every routed token gets a first feature of about `push`, so that a router's row has a bias to move."""
    with torch.no_grad():
        model.enter.weight[0] *= 0.1
        model.enter.bias[0] = push
        model.first.router.weight[:, 0] = 0


def pushed(at: int, expert: int, by: float, *, hold: bool = True, experts: int = 4, **parts):
    """From a step on, one expert's logit is moved for every token."""

    def make(folder: Path) -> History:
        model = PathNet(experts, **{"balance": (), **parts})
        warm(model)

        @torch.no_grad()
        def meddle(step: int) -> None:
            if step == at or (hold and step > at):
                model.first.router.weight[expert, 0] = by / 3.0

        return train(model, adam(model), folder, meddle=meddle)

    return make


def drifting(speed: Callable[[float], float], at: int = LATER):
    """From a step on, the first expert's logit grows with its share of the load."""

    def make(folder: Path) -> History:
        model = PathNet(8, balance=sp.SwitchLoss(0.05))
        warm(model)
        shift = torch.zeros(())

        @torch.no_grad()
        def meddle(step: int) -> None:
            if step < at:
                return
            share = float((model.first.routing.expert == 0).float().mean())
            shift.add_(speed(share))
            model.first.router.weight[0, 0] = shift / 3.0

        return train(model, adam(model), folder, meddle=meddle, steps=STEPS + LATER)

    return make


def saturated(folder: Path) -> History:
    model = PathNet()
    with torch.no_grad():
        model.first.router.weight *= 100
    return train(model, adam(model), folder)


def made_up_its_mind(folder: Path) -> History:
    """From a step on, the router learns a hundred times as fast as the rest."""
    model = PathNet()
    router = model.first.router.weight
    rest = [p for p in model.parameters() if p is not router]
    optimizer = torch.optim.Adam([{"params": rest}, {"params": [router]}], lr=3e-3)

    def meddle(step: int) -> None:
        if step == LATER:
            optimizer.param_groups[1]["lr"] = 0.3

    return train(model, optimizer, folder, meddle=meddle)


def with_hook(which: Callable[[PathNet], nn.Parameter], change, at: int = LATER, optimizer=adam, **parts):
    """From a step on, one parameter's gradient is changed."""

    def make(folder: Path) -> History:
        model = PathNet(**parts)
        now = [0]

        def meddle(step: int) -> None:
            now[0] = step

        which(model).register_hook(lambda grad: change(grad) if now[0] >= at else grad)
        return train(model, optimizer(model), folder, meddle=meddle)

    return make


def expert_weight(model: PathNet) -> nn.Parameter:
    return model.first.experts[2].up.weight


def router_weight(model: PathNet) -> nn.Parameter:
    return model.first.router.weight


def careful(model: nn.Module) -> torch.optim.Optimizer:
    return Careful(model.parameters())


def paths(**parts):
    def make(folder: Path) -> History:
        model = PathNet(**parts)
        return train(model, adam(model), folder)

    return make


def copies(folder: Path) -> History:
    """All experts start alike and share one gradient."""
    model = PathNet(4)
    experts = model.first.experts
    for expert in experts:
        expert.load_state_dict(experts[0].state_dict())

    def share(step: int) -> None:
        for same in zip(*(expert.parameters() for expert in experts), strict=True):
            have = [p.grad for p in same if p.grad is not None]
            mean = torch.stack(have).mean(0)
            for p in same:
                p.grad = mean.clone()

    return train(model, adam(model), folder, after_backward=share)


def empty_expert(folder: Path) -> History:
    """An expert of zeros serves tokens, returns zeros and has no gradient to change that."""
    model = PathNet()
    with torch.no_grad():
        for p in model.first.experts[2].parameters():
            p.zero_()
    return train(model, adam(model), folder)


def rare_tokens(folder: Path) -> History:
    """One expert's tokens come once in about 25 steps."""
    model = PathNet(4, router=sp.routers.hashed(), balance=())
    ids = torch.arange(KINDS)
    model(torch.zeros(KINDS, 16), ids)
    mine = model.first.routing.expert == 1
    often = torch.where(mine, 0.0, 1.0)
    often[ids[mine][0]] = (KINDS - mine.sum()) / (96 * 25)
    return train(model, adam(model), folder, task=Task(0, often))


def hopeless(folder: Path) -> History:
    """The labels of one expert's tokens are drawn by lot."""
    model = PathNet(4, router=sp.routers.hashed(), balance=())
    model(torch.zeros(KINDS, 16), torch.arange(KINDS))
    return train(model, adam(model, 1e-2), folder, task=Task(0, hopeless=model.first.routing.expert == 1))


def one_kind(folder: Path) -> History:
    """Three tokens of four are the same one, and a hash sends it to one expert."""
    often = torch.ones(KINDS)
    often[3] = 3.0 * (KINDS - 1)
    model = PathNet(8, router=sp.routers.hashed(), balance=())
    return train(model, adam(model), folder, task=Task(0, often))


def unused_layer(folder: Path) -> History:
    model = PathNet(4)
    model.spare = nn.Linear(8, 8)
    return train(model, adam(model), folder)


def frozen_router(folder: Path) -> History:
    model = PathNet(balance=())
    model.first.router.weight.requires_grad_(False)
    return train(model, adam(model), folder)


def deaf_depths(folder: Path) -> History:
    model = DepthNet()
    model.deep.router.weight.register_hook(torch.zeros_like)
    model.deep.ledger.balancers = ()
    return train(model, adam(model), folder)


def connections(method: sp.Method, density: float = 0.2, **how):
    return lambda folder: sparse(folder, method, density, **how)


def lopsided(weights):
    """Scores of a first topology that puts everything in a quarter of the rows."""
    scores = {}
    for name, weight in weights.items():
        rows = torch.arange(weight.shape[0]) < max(1, weight.shape[0] // 4)
        scores[name] = (torch.rand(weight.shape) + rows[:, None]).reshape(-1)
    return scores


def dense(change: Callable[[nn.Module, torch.optim.Optimizer, int], None], lr: float = 0.1, at: int = LATER):
    def make(folder: Path) -> History:
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def meddle(step: int) -> None:
            if step == at:
                change(model, optimizer, step)

        return train(model, optimizer, folder, meddle=meddle)

    return make


def too_fast(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 5.0


@torch.no_grad()
def poisoned(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.net[2].weight[0, 0] = float("nan")


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None: ...


def under_noise(folder: Path) -> History:
    """Quality on clean inputs and on inputs with noise, as `sp.stress` records it at the end."""
    model = Plain()
    history = train(model, adam(model), folder)
    task, step = Task(0), history.last_step
    batch = [task.batch() for _ in range(4)][-1]
    told = []
    for shift, noise in (("", 0.0), ("noise", 3.0)):
        x = batch.x + noise * torch.randn(batch.x.shape)
        right = (model(x, batch.ids).argmax(1) == batch.y).float().mean()
        told.append(Record(step, "stress/quality", shift, float(right)))
    return replace(history, series={**history.series, **collect(told).series})


T = STEPS
SICK: dict[str, Sick] = {
    "collapse from the start": Sick("expert_collapse", pushed(0, 0, 12.0)),
    "collapse midway": Sick("expert_collapse", pushed(LATER, 5, 12.0, experts=8), LATER),
    "a dead expert": Sick("dead_experts", pushed(LATER, 3, -30.0, balance=sp.SwitchLoss(0.05)), LATER),
    "a dead expert, k=2": Sick(
        "dead_experts", pushed(0, 7, -30.0, k=2, experts=8, balance=sp.SwitchLoss(0.05))
    ),
    "overload": Sick("overload", one_kind),
    "overload midway": Sick("overload", pushed(LATER, 2, 12.0, capacity=2.0), LATER),
    "capacity 0.25": Sick("drop_rate", paths(capacity=0.25)),
    "rich get richer": Sick("dominance", drifting(lambda share: 0.3 * share), LATER),
    "on the way to collapse": Sick("collapse_onset", drifting(lambda share: 0.1), LATER),
    "saturated gate": Sick("gate_saturation", saturated),
    "entropy crash": Sick("entropy_crash", made_up_its_mind, LATER),
    "router without a gradient": Sick(
        "router_not_learning", with_hook(router_weight, torch.zeros_like), LATER
    ),
    "router told not to learn": Sick("router_not_learning", frozen_router),
    "depth router without a gradient": Sick("router_not_learning", deaf_depths),
    "all singletons": Sick("singletons", paths(estimator=sp.SparseMixer(r=1e-4))),
    "copies that stay copies": Sick("experts_alike", copies),
    "an expert whose tokens cannot be learned": Sick("path_behind", hopeless),
    "an expert of zeros": Sick("capacity_without_competence", empty_expert),
    "NaN in one expert": Sick(
        "non_finite_gradient",
        with_hook(expert_weight, lambda g: torch.full_like(g, torch.nan), optimizer=careful),
        LATER,
    ),
    "exploding expert": Sick("exploding_gradient", with_hook(expert_weight, lambda g: 1000 * g), LATER),
    "rare tokens": Sick("starved_parameters", rare_tokens),
    "a layer nobody uses": Sick("starved_parameters", unused_layer),
    "drop fraction 0": Sick("frozen_topology", connections(sp.rigl(steps=T, every=20, fraction=0.0))),
    "T_end at 5 %": Sick("frozen_topology", connections(sp.rigl(steps=T, every=5, end=0.05)), T // 20),
    "SET that ends at once": Sick("frozen_topology", connections(sp.set_(every=10, end=20)), 20),
    "99.9 % from the start": Sick("over_sparsified", connections(sp.static(), 0.001, hidden=256)),
    "99.5 % RigL": Sick("over_sparsified", connections(sp.rigl(steps=T, every=20), 0.005, hidden=128)),
    "a quarter of the rows": Sick("dead_neurons", connections(sp.static(initial=lopsided), 0.1)),
    "grown and dropped": Sick("short_lived_growth", connections(sp.set_(every=EVERY), 0.1, lr=1e-5)),
    "hardly any search": Sick("low_exploration", connections(sp.rigl(steps=T, every=20, fraction=0.01))),
    "pruned in ten steps": Sick(
        "pruned_too_fast",
        connections(sp.gmp(steps=T, begin=0.25, end=0.3, every=5), 0.02, lr=1e-3),
        LATER,
    ),
    "learning rate too large": Sick("loss_diverging", dense(too_fast, lr=0.3), LATER),
    "NaN weights": Sick("loss_not_finite", dense(poisoned), LATER),
    "learning rate too small": Sick("not_learning", dense(nothing, lr=1e-7)),
    "noise": Sick("falls_under_shift", under_noise, STEPS),
}
