"""The zoo: tiny seeded trainings of a second or less, watched as any run is. What is in its cages is in
sick.py and healthy.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsight as sp
from sparsight.dynamics.history import History

STEPS, EVERY, BATCH = 240, 10, 96
DIM, KINDS, CLASSES = 16, 16, 8
Meddle = Callable[[int], None]


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    ids: Tensor


class Task:
    """Points about 16 centres; the label hangs on the centre and on the side of a plane the point is on."""

    def __init__(self, seed: int, frequencies: Tensor | None = None, hopeless: Tensor | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(KINDS, DIM, generator=self.generator)
        self.planes = torch.randn(KINDS, DIM, generator=self.generator)
        self.frequencies = torch.ones(KINDS) if frequencies is None else frequencies
        self.hopeless = hopeless

    def batch(self, size: int = BATCH) -> Batch:
        kind = torch.multinomial(self.frequencies, size, replacement=True, generator=self.generator)
        noise = torch.randn(size, DIM, generator=self.generator)
        side = (noise * self.planes[kind]).sum(1) > 0
        label = (kind + 3 * side) % CLASSES
        if self.hopeless is not None:
            chance = torch.randint(CLASSES, (size,), generator=self.generator)
            label = torch.where(self.hopeless[kind], chance, label)
        return Batch(self.centres[kind] + 0.7 * noise, label, kind)


class PathNet(nn.Module):
    """in → residual expert layer → out."""

    def __init__(
        self, experts: int = 4, *, layers: int = 1, width: int = DIM, hidden: int = 16, **parts
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(DIM, width)
        parts = {"balance": sp.SwitchLoss(0.05), **parts}
        self.moe = nn.ModuleList(sp.MoE(width, hidden, experts, **parts) for _ in range(layers))
        self.leave = nn.Linear(width, CLASSES)

    @property
    def first(self) -> sp.MoE:
        return self.moe[0]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.enter(x)
        for moe in self.moe:
            h = h + moe(h, ids=ids)
        return self.leave(h)


class Plain(nn.Module):
    """An MLP that takes what PathNet takes."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(DIM, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.net(x)


class Careful(Optimizer):
    """SGD that passes over what is not finite, as careful loops do; the gradient is left as it came."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.nan_to_num(0, 0, 0), alpha=-group["lr"])


def adam(model: nn.Module, lr: float = 3e-3) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr, fused=True)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    folder: Path,
    *,
    steps: int = STEPS,
    meddle: Meddle = lambda step: None,
    after_backward: Meddle = lambda step: None,
    task: Task | None = None,
) -> History:
    """A watched training. `meddle` comes before a step, `after_backward` before the optimizer."""
    task = Task(0) if task is None else task
    routed = any(isinstance(module, (sp.MoE, sp.MixtureOfDepths)) for module in model.modules())
    if routed:
        sp.follow_steps(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing in a dense model is sparse
        watch = sp.watch(model, optimizer, folder / "run", every=EVERY)
    with watch:
        for step in range(steps):
            meddle(step)
            batch = task.batch()
            losses = nn.functional.cross_entropy(model(batch.x, batch.ids), batch.y, reduction="none")
            watch.losses(losses)
            loss = losses.mean()
            optimizer.zero_grad()
            (loss + sp.balance_loss(model) if routed else loss).backward()
            after_backward(step)
            optimizer.step()
            if (step + 1) % EVERY == 0:
                watch.log(loss=loss)
    return sp.load_run(folder / "run")


def sparse(
    folder: Path,
    method: sp.Method,
    density: float = 0.2,
    *,
    model: nn.Module | None = None,
    lr: float = 3e-3,
    hidden: int = 64,
    **how,
) -> History:
    model = Plain(hidden) if model is None else model
    optimizer = adam(model, lr)
    extra = {name: how.pop(name) for name in ("distribution", "keep_dense") if name in how}
    sparsifier = sp.sparsify(model, optimizer, density=density, method=method, **extra)
    history = train(model, optimizer, folder, **how)
    assert sparsifier is not None
    return history
