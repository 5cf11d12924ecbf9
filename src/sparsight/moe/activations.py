"""Activations that the fast dispatch knows: forward and backward into a given buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """A function, and how it is written into a buffer."""

    name: str
    plain: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], Tensor]
    """(x, out): out = f(x)."""
    back: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(grad, x, out): out = grad · f'(x); `out` may be `grad`."""


def _gelu(approximate: str) -> Activation:
    return Activation(
        "gelu" if approximate == "none" else "gelu_tanh",
        lambda x: functional.gelu(x, approximate=approximate),
        lambda x, out: _aten.gelu.out(x, approximate=approximate, out=out),
        lambda g, x, out: _aten.gelu_backward.grad_input(g, x, approximate=approximate, grad_input=out),
    )


SILU = Activation(
    "silu",
    functional.silu,
    lambda x, out: _aten.silu.out(x, out=out),
    lambda g, x, out: _aten.silu_backward.grad_input(g, x, grad_input=out),
)
RELU = Activation(
    "relu",
    functional.relu,
    lambda x, out: torch.clamp_min(x, 0, out=out),
    lambda g, x, out: _aten.threshold_backward.grad_input(g, x, 0, grad_input=out),
)
GELU = _gelu("none")
GELU_TANH = _gelu("tanh")


def by_name(name: str) -> Activation:
    """The activation of that name.

    >>> by_name("silu").plain(torch.zeros(1)).item()
    0.0
    """
    known = {a.name: a for a in (SILU, RELU, GELU, GELU_TANH)}
    if name not in known:
        raise ValueError(f"activation must be one of {sorted(known)}, got '{name}'")
    return known[name]
