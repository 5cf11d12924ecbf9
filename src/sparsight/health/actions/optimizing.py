"""What an optimizer remembers of a parameter: forgotten, copied, brought back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing."""
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def forget(optimizer: Optimizer, param: Tensor) -> Callable[[], None]:
    """Begin anew with a parameter; returns what brings the old memory back."""
    held = optimizer.state.pop(param, None)

    def restore() -> None:
        optimizer.state.pop(param, None)
        if held is not None:
            optimizer.state[param] = held

    return restore
