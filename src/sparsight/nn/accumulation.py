"""What happens to a gradient between the backward pass and the optimizer: adding up, clipping, unscaling."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""The mean of a tensor over all ranks, or the tensor itself where there is one process."""


class Accumulation:
    """Watches one parameter's `.grad` between backward passes.

    A gradient that was zeroed since we last saw it begins a new step: the one before was skipped. An
    untouched one (the same version) may be zero for honest reasons and goes on.
    """

    def __init__(self) -> None:
        self._seen = -1

    def begins_anew(self, param: Tensor) -> bool:
        """Asked before the gradient is added."""
        held = param.grad
        return held is None or (held._version != self._seen and not bool(held.any()))

    def added(self, param: Tensor) -> None:
        """Told after the gradient was added."""
        if param.grad is not None:
            self._seen = param.grad._version


def scale_of(collected: Tensor, used: Tensor | None) -> float:
    """What clipping and unscaling multiplied a gradient by since it was collected; exactly 1 if nothing did.

    Both multiply `.grad` by one number, and its largest entry tells which.
    """
    if used is None or used.numel() == 0:
        return 1.0
    at = used.abs().argmax()
    factor = float(used.flatten()[at] / collected.flatten()[at])
    return factor if 0 < factor < float("inf") else 1.0
