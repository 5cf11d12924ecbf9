"""Capacity: how many tokens an expert may take, and who gives way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsight.moe.routing import Routing, count


@dataclass(frozen=True)
class Capacity:
    """Each expert takes at most max(minimum, ceil(assignments/E · factor)) tokens.

    Overflow is dropped, by `drop`: "position" (first come, first served, all first choices before any second)
    or "prob" (the least probable give way). A dropped token passes by on the residual. `eval_factor` holds at
    inference: the same as in training unless given, `inf` for none dropped.

    >>> Capacity(1.25).of(tokens=64, experts=8, training=True)
    10
    """

    factor: float = 1.25
    eval_factor: float | None = None
    minimum: int = 1
    drop: Literal["position", "prob"] = "position"

    def __post_init__(self) -> None:
        for name, value in (("factor", self.factor), ("eval_factor", self.eval_factor)):
            if value is not None and not value > 0:
                raise ValueError(f"Capacity: {name}={value} holds no token; expected a number > 0")
        if self.minimum < 1:
            raise ValueError(f"Capacity: minimum={self.minimum} holds no token; expected at least 1")
        if self.drop not in ("position", "prob"):
            raise ValueError(f"Capacity: drop must be 'position' or 'prob', got '{self.drop}'")

    def of(self, tokens: int, experts: int, training: bool) -> int:
        """The limit for this many assignments."""
        factor = self.factor if training or self.eval_factor is None else self.eval_factor
        if math.isinf(factor):
            return tokens
        # Rounded first, so that 64/8·1.1 is not a hair above 8.8 in one place and below in another.
        return max(self.minimum, math.ceil(round(tokens * factor / experts, 9)))

    def keep(self, routing: Routing, k: int, training: bool) -> tuple[Routing, int]:
        """What fits, and how many assignments were dropped."""
        limit = self.of(routing.tokens * k, routing.experts, training)
        load = count(routing.expert, routing.experts)
        if int(load.max()) <= limit:
            return routing, 0
        order, fits = self._ranked(routing, load, limit)
        kept = order[fits].sort().values
        return routing.keep(kept), routing.token.numel() - kept.numel()

    def mask(self, routing: Routing, k: int, training: bool) -> Tensor:
        """[N] what fits: the same as `keep`, in a shape that does not depend on the data."""
        limit = self.of(routing.tokens * k, routing.experts, training)
        order, fits = self._ranked(routing, count(routing.expert, routing.experts), limit)
        return torch.zeros_like(fits).scatter(0, order, fits)

    @torch.no_grad()
    def _ranked(self, routing: Routing, load: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """The assignments expert by expert, whoever comes first first, and which of them fit."""
        first = torch.arange(routing.expert.numel(), device=load.device)
        if self.drop == "prob":
            first = routing.prob[routing.token, routing.expert].argsort(descending=True, stable=True)
        order = first[routing.expert[first].argsort(stable=True)]
        expert = routing.expert[order]
        rank = torch.arange(order.numel(), device=order.device) - (load.cumsum(0) - load)[expert]
        return order, rank < limit
