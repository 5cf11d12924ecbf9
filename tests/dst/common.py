"""A small task, and every method with what it promises about its number of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import sparsight as sp

STEPS = 80
EVERY = 5


@dataclass(frozen=True)
class Case:
    """A method under test; `total(step, layer)` is the number of weights it must have, by hand."""

    name: str
    make: Callable[[], sp.Method]
    density: float | None = 0.3
    total: Callable[[int, object], int] | None = None
    moves_layers: bool = False
    dynamic: bool = True
    latent: bool = False


def _cubic(step: int, layer, start: float) -> int:
    """Zhu & Gupta's cubic from `start` to the budget at 75 % of the training, at the last update."""
    end = int(0.75 * STEPS)
    last_update = end if step >= end else step // EVERY * EVERY
    rest = (1 - last_update / end) ** 3
    return layer.budget + round((start - layer.budget) * rest)


def _acdc(step: int, layer) -> int:
    if step < 8:  # 10 % dense
        return layer.topology.size
    sparse = step >= 60 or (step - 8) // 10 % 2 == 0
    return layer.budget if sparse else layer.topology.size


CASES = [
    Case("static", sp.static, dynamic=False),
    Case("rigl", lambda: sp.rigl(steps=STEPS, every=EVERY)),
    Case("set", lambda: sp.set_(every=EVERY)),
    Case("snfs", lambda: sp.snfs(steps=STEPS, every=EVERY), moves_layers=True),
    Case("snfs-adam", lambda: sp.snfs(steps=STEPS, every=EVERY, second=0.99), moves_layers=True),
    Case("itop", lambda: sp.itop(steps=STEPS, every=10)),
    Case("mest", lambda: sp.mest(steps=STEPS, every=EVERY)),
    Case("top_kast", lambda: sp.top_kast(backward=0.5), latent=True),
    Case("top_kast-10", lambda: sp.top_kast(backward=0.5, every=10), latent=True),
    Case("nm", lambda: sp.nm(2, 4), density=None, latent=True),
    Case(
        "gmp",
        lambda: sp.gmp(steps=STEPS, every=EVERY),
        total=lambda step, layer: _cubic(step, layer, layer.topology.size),
    ),
    Case("gmp-global", lambda: sp.gmp(steps=STEPS, every=EVERY, scope="global"), moves_layers=True),
    Case("granet", lambda: sp.granet(steps=STEPS, every=EVERY), moves_layers=True),
    Case(
        "granet-layer",
        lambda: sp.granet(steps=STEPS, every=EVERY, scope="layer"),
        total=lambda step, layer: _cubic(step - 1, layer, layer.start),
    ),
    Case("acdc", lambda: sp.acdc(steps=STEPS, phase=10), total=_acdc),
    Case("srigl", lambda: sp.srigl(steps=STEPS, every=EVERY)),
    Case("block", lambda: sp.block(4, 2, steps=STEPS, every=EVERY)),
]
BY_NAME = {case.name: case for case in CASES}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 24),
        nn.ReLU(),
        nn.Linear(24, 4),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(16, 4, 4, 4, generator=generator)
    return x, x.mean((2, 3)).argmax(1)


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sparse: sp.Sparsifier

    def backward(self, step: int) -> torch.Tensor:
        x, y = batch(step)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        return loss.detach()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.optimizer.step()

    def twin(self) -> Run:
        return Run(*copy.deepcopy((self.model, self.optimizer, self.sparse)))


def start(case: Case, *, seed: int = 0, method: sp.Method | None = None) -> Run:
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sparse = sp.sparsify(model, optimizer, density=case.density, method=method or case.make(), seed=seed)
    return Run(model, optimizer, sparse)


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Weights, masks and optimizer state, flat."""
    state = {f"model.{k}": v.clone() for k, v in run.model.state_dict().items()}
    state |= {f"sparse.{k}": v.clone() for k, v in run.sparse.state_dict().items()}
    for i, slots in run.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{i}.{k}": v.clone() for k, v in slots.items()}
    return state


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key
