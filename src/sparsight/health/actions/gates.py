"""Routers that are too sure of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsight.health.actions.core import Done, RefusedError, Run, undo_all
from sparsight.health.actions.optimizing import forget
from sparsight.moe.layer import MoE
from sparsight.moe.routers import CosineLogits


@dataclass(frozen=True)
class CoolRouter:
    """Shrink a router's weights until the mean top probability is `top`: a saturated gate learns again.

    By the logits of the last forward pass where the layer keeps them, else by `times`.
    """

    where: str = ""
    top: float = 0.7
    times: float = 0.25
    setting: ClassVar[bool] = False

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        if not 0 < self.top < 1 or not 0 < self.times < 1:
            raise RefusedError(
                f"CoolRouter: top and times must lie in (0, 1), got {self.top} and {self.times}"
            )
        undo: list[Callable[[], None]] = []
        said = []
        for route in run.routed(self.where):
            if not route.router:
                raise RefusedError(f"CoolRouter: the router of '{route.name}' has no weights")
            logits = (
                route.module.routing.logit if isinstance(route.module, MoE) and route.module.routing else None
            )
            factor = self.times if logits is None else scale_for(logits, max(self.top, 1.2 / route.experts))
            if not factor < 1:
                continue
            undo.append(_shrink(run, route.module, route.router, factor))
            said.append(f"{route.name} by {factor:.3g}")
        if not said:
            raise RefusedError(f"CoolRouter: the mean top probability is {self.top} or less already")
        return Done(f"router weights scaled: {', '.join(said)}", lambda: undo_all(undo))


def scale_for(logits: Tensor, top: float) -> float:
    """The factor on logits at which the mean of the largest probability is `top`; 1 where it is less.

    >>> logits = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    >>> round(scale_for(logits, 0.75), 3)  # 9·0.122 = ln 3
    0.122
    """
    logits = logits.double()
    low, high = 0.0, 1.0
    if float(logits.softmax(-1).amax(-1).mean()) <= top:
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        over = float((logits * middle).softmax(-1).amax(-1).mean()) > top
        low, high = (low, middle) if over else (middle, high)
    return low


def _shrink(
    run: Run, module: nn.Module, params: tuple[nn.Parameter, ...], factor: float
) -> Callable[[], None]:
    before = [p.detach().clone() for p in params]
    router = getattr(module, "router", None)
    if isinstance(router, CosineLogits):  # cosines do not feel the size of weights; their temperature does
        clamped = float(router.log_scale.clamp(max=math.log(100.0)))
        router.log_scale.fill_(clamped + math.log(factor))
    else:
        for param in params:
            param.mul_(factor)
    # Gradients through a saturated gate were tiny, and so are the squares that Adam would divide by.
    remembered = [forget(run.optimizer, param) for param in params]

    def undo() -> None:
        with torch.no_grad():
            for param, old, restore in zip(params, before, remembered, strict=True):
                param.copy_(old)
                restore()

    return undo
