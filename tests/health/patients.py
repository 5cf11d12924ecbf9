"""Small runs that can be made ill on purpose, and their healthy twins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.dynamics.history import History

KINDS, DIM, HIDDEN = 4, 12, 12

Patch = Callable[[Any], None]


@dataclass(frozen=True)
class Outcome:
    quality: float
    history: History
    manager: Any
    model: nn.Module

    def events(self, kind: str = "action", mode: str | None = None) -> list[Any]:
        found = [e for e in self.history.events if e.kind == kind]
        return found if mode is None else [e for e in found if e.data.get("mode") == mode]


def tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs of four kinds, each with a rule of its own; the last feature is always 1."""
    rules = torch.randn(KINDS, DIM, DIM, generator=torch.Generator().manual_seed(0)) / DIM**0.5
    kind = torch.randint(KINDS, (count,), generator=generator)
    x = torch.randn(count, DIM, generator=generator)
    x[:, :KINDS] = 2.0 * nn.functional.one_hot(kind, KINDS)
    x[:, -1] = 1.0
    return x, torch.einsum("td,tde->te", x, rules[kind])


def expert_run(
    folder: Path,
    *,
    steps: int = 500,
    experts: int = 4,
    coef: float = 0.05,
    seed: int = 1,
    patch: Patch | None = None,
    each_step: Callable[[int, Any], None] | None = None,
    manage: dict[str, Any] | None = None,
    rate: float = 1e-2,
    **options: Any,
) -> Outcome:
    """A mixture of experts on the four kinds; quality is 1 − error²/variance on fresh tokens."""
    torch.manual_seed(seed)
    model = sp.MoE(DIM, HIDDEN, experts, balance=[sp.SwitchLoss(coef), sp.ZLoss(1e-4)], **options)
    if patch is not None:
        with torch.no_grad():
            patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(2)
    with sp.watch(model, optimizer, folder / "run") as watch:
        manager = None if manage is None else sp.manage(watch, **manage)
        for step in range(steps):
            x, target = tokens(128, generator)
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            (loss + sp.balance_loss(model)).backward()
            if each_step is not None:
                each_step(step, model)
            optimizer.step()
            watch.log(loss=loss)
        run = watch.run
    model.eval()
    with torch.no_grad():
        x, target = tokens(4096, torch.Generator().manual_seed(3))
        quality = 1 - float((model(x) - target).square().mean() / target.var())
    assert run is not None
    return Outcome(quality, sp.load_run(run), manager, model)


USEFUL, WIDE = 8, 64


def teacher(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """64 inputs of which 8 matter: whoever does not search for them learns little."""
    fixed = torch.Generator().manual_seed(5)
    first, second = torch.randn(USEFUL, 24, generator=fixed), torch.randn(24, 4, generator=fixed)
    x = torch.randn(count, WIDE, generator=generator)
    return x, (x[:, :USEFUL] @ first / USEFUL**0.5).tanh() @ second / 24**0.5


def sparse_run(
    folder: Path,
    *,
    method: Any = None,
    density: float = 0.06,
    steps: int = 500,
    seed: int = 1,
    storage: Any = "auto",
    patch: Callable[[Any], None] | None = None,
    each_step: Callable[[int, Any], None] | None = None,
    manage: dict[str, Any] | None = None,
) -> Outcome:
    """An MLP with sparse hidden layers on the teacher's data; quality is 1 − error²/variance."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDE, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    method = sp.rigl(steps=steps, every=10, fraction=0.3) if method is None else method
    sparse = sp.sparsify(model, optimizer, density=density, method=method, keep_dense=["4"], storage=storage)
    if patch is not None:
        patch(sparse)
    generator = torch.Generator().manual_seed(2)
    with sp.watch(model, optimizer, folder / "run") as watch:
        manager = None if manage is None else sp.manage(watch, **manage)
        for step in range(steps):
            x, target = teacher(128, generator)
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if each_step is not None:
                each_step(step, model)
            optimizer.step()
            watch.log(loss=loss)
        run = watch.run
    with torch.no_grad():
        x, target = teacher(4096, torch.Generator().manual_seed(3))
        quality = 1 - float((model(x) - target).square().mean() / target.var())
    assert run is not None
    return Outcome(quality, sp.load_run(run), manager, model)
