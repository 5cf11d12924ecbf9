"""Small runs that can be made ill on purpose, and their healthy twins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.dynamics.history import History

KINDS, DIM = 4, 16

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
    steps: int = 600,
    experts: int = 8,
    coef: float = 0.01,
    seed: int = 1,
    patch: Patch | None = None,
    each_step: Callable[[int, Any], None] | None = None,
    manage: dict[str, Any] | None = None,
    rate: float = 5e-3,
    **options: Any,
) -> Outcome:
    """A mixture of experts on the four kinds; quality is 1 − error²/variance on fresh tokens."""
    torch.manual_seed(seed)
    model = sp.MoE(DIM, 32, experts, balance=[sp.SwitchLoss(coef), sp.ZLoss(1e-4)], **options)
    if patch is not None:
        with torch.no_grad():
            patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(2)
    with sp.watch(model, optimizer, folder / "run") as watch:
        manager = None if manage is None else sp.manage(watch, **manage)
        for step in range(steps):
            x, target = tokens(256, generator)
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
