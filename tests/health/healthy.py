"""Healthy runs: different seeds, sizes, routers and methods, all with their usual settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.dynamics.history import History
from tests.health.zoo import CLASSES, DIM, STEPS, PathNet, Plain, Task, adam, sparse, train

Recipe = Callable[[Path], History]


def paths(seed: int, experts: int = 4, lr: float = 3e-3, **parts) -> Recipe:
    def make(folder: Path) -> History:
        torch.manual_seed(seed)
        model = PathNet(experts, **parts)
        return train(model, adam(model, lr), folder, task=Task(seed))

    return make


def connections(seed: int, method: sp.Method, density: float = 0.2, **how) -> Recipe:
    def make(folder: Path) -> History:
        torch.manual_seed(seed)
        return sparse(folder, method, density, task=Task(seed), **how)

    return make


def dense(folder: Path) -> History:
    torch.manual_seed(5)
    model = Plain()
    return train(model, adam(model), folder, task=Task(5))


def both(folder: Path) -> History:
    torch.manual_seed(6)
    return sparse(folder, sp.rigl(steps=STEPS, every=20), 0.4, model=PathNet(4, k=2, hidden=32), task=Task(6))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(DIM, DIM), nn.Linear(DIM, CLASSES)
        self.block = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(h + self.block(h))


def upcycled(folder: Path) -> History:
    torch.manual_seed(7)
    model = Residual()
    sp.upcycle(model, experts=4, k=2, match="block", noise=0.5, balance=sp.SwitchLoss(0.05))
    return train(model, adam(model), folder, task=Task(7))


class DepthNet(nn.Module):
    """Sequences of 16 tokens, a quarter of which goes through a block."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, DIM)
        block = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.deep = sp.MixtureOfDepths(block, capacity=0.5)
        self.leave = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.enter(x)
        return self.leave(self.deep(h.view(-1, 16, DIM)).view(h.shape))


def depths(folder: Path) -> History:
    torch.manual_seed(8)
    model = DepthNet()
    return train(model, adam(model), folder, task=Task(8))


HEALTHY: dict[str, Recipe] = {
    "softmax, k=1": paths(0),
    "softmax, k=2": paths(1, 8, k=2, balance=[sp.SwitchLoss(0.01), sp.ZLoss(1e-3)]),
    "softmax, two layers": paths(2, layers=2, hidden=32),
    "softmax, 8 experts": paths(3, 8),
    "softmax, 16 experts": paths(4, 16, k=2, router=sp.routers.softmax(jitter=0.01)),
    "sigmoid": paths(5, 8, k=2, router=sp.routers.sigmoid(), estimator=sp.GatingOnly(normalise=True)),
    "cosine": paths(6, router=sp.routers.cosine(width=16)),
    "gshard": paths(7, k=2, router=sp.routers.gshard()),
    "hash": paths(8, 4, router=sp.routers.hashed(), balance=()),
    "base": paths(9, 4, router=sp.routers.base(), balance=()),
    "sinkhorn": paths(10, router=sp.routers.sinkhorn(), balance=()),
    "expert choice": paths(11, router=sp.routers.expert_choice(), causal=False, balance=()),
    "relu": paths(12, k=2, router=sp.routers.relu(first=1e-4, factor=1.05), balance=()),
    "SparseMixer": paths(13, estimator=sp.SparseMixer()),
    "SparseMixer-2*": paths(14, estimator=sp.SparseMixer2Star()),
    "DenseMixer": paths(15, k=2, estimator=sp.DenseMixer()),
    "loss-free bias": paths(16, 8, k=2, balance=sp.LossFreeBias(1e-2)),
    "capacity 1.5": paths(17, capacity=1.5),
    "GLU experts, another rate": paths(18, expert="glu", lr=1e-3),
    "importance loss": paths(19, balance=sp.ImportanceLoss(0.1)),
    "upcycled": upcycled,
    "depths": depths,
    "dense": dense,
    "sparse experts": both,
    "rigl": connections(20, sp.rigl(steps=STEPS, every=20)),
    "rigl, wide and sparse": connections(21, sp.rigl(steps=STEPS, every=10), 0.1, hidden=128),
    "set": connections(22, sp.set_(every=40, std=0.1)),
    "snfs": connections(23, sp.snfs(steps=STEPS, every=20)),
    "static": connections(24, sp.static()),
    "gmp": connections(25, sp.gmp(steps=STEPS, every=10)),
    "granet": connections(26, sp.granet(steps=STEPS, every=20)),
    "srigl": connections(27, sp.srigl(steps=STEPS, every=20)),
    "block": connections(28, sp.block(2, 2, steps=STEPS, every=20), 0.3),
    "mest": connections(29, sp.mest(steps=STEPS, every=20)),
    "itop": connections(30, sp.itop(steps=STEPS, every=40)),
    "acdc": connections(31, sp.acdc(steps=STEPS, phase=40)),
    "top-kast": connections(32, sp.top_kast(backward=0.5)),
    "2:4": connections(33, sp.nm(2, 4), None),
}
