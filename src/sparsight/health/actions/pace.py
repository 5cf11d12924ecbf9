"""The pace of learning, changed from outside: for all weights, or for single experts.

Splitting parameter groups would break learning-rate schedulers and optimizer checkpoints, and scaled
gradients are invisible to Adam. So the rate is multiplied for the moment of the step, whatever a scheduler
made of it, and an expert's step is stretched after it was taken. Nothing is hooked before it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics.routes import Part


class Pace:
    """Factors on learning rates."""

    def __init__(self, sparsifier: Sparsifier | None = None) -> None:
        self.sparsifier = sparsifier
        self.rate = 1.0
        """For every parameter group."""
        self._parts: dict[tuple[str, int], tuple[float, tuple[Part, ...]]] = {}
        self._handles: list[Any] = []
        self._rates: list[Any] = []
        self._before: list[tuple[Part, float, Tensor]] = []
        self._updates = 0

    def set_rate(self, optimizer: Optimizer, factor: float) -> None:
        """Multiply every learning rate by `factor` at each step."""
        self.rate = factor
        self._hook(optimizer)

    def of(self, where: str, expert: int) -> float:
        """The factor of one expert."""
        return self._parts.get((where, expert), (1.0, ()))[0]

    def set_expert(
        self, optimizer: Optimizer, where: str, expert: int, factor: float, parts: Sequence[Part]
    ) -> None:
        """Stretch each step of one expert by `factor`."""
        self._parts.pop((where, expert), None)
        if factor != 1:
            self._parts[where, expert] = factor, tuple(parts)
        self._hook(optimizer)

    def _hook(self, optimizer: Optimizer) -> None:
        wanted = self.rate != 1 or bool(self._parts)
        if wanted and not self._handles:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
        elif not wanted:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._rates = [group.get("lr") for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if rate is not None and self.rate != 1:
                group["lr"] = rate * self.rate
        self._updates = self._rewired()
        self._before = [
            (part, factor, part.cut(part.param.detach()).clone())
            for factor, parts in self._parts.values()
            for part in parts
            if part.param.grad is not None
        ]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        # After a rewiring other weights are in the places; that step stays as it is.
        if self._rewired() == self._updates:
            for part, factor, old in self._before:
                now = part.cut(part.param.detach())
                now.copy_(old + factor * (now - old))
        self._before = []

    def _rewired(self) -> int:
        return 0 if self.sparsifier is None else self.sparsifier.updates
