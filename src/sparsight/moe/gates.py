"""From logits to probabilities: scores, SparseMixer's mask, and the draws of a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


@dataclass(frozen=True)
class Score:
    """How a router's logits become scores. `log` is its logarithm, which needs no floor to be normalised."""

    name: str
    prob: Callable[[Tensor], Tensor]
    log: Callable[[Tensor], Tensor]


softmax = Score("softmax", lambda z: z.softmax(-1), lambda z: z.log_softmax(-1))
sigmoid = Score("sigmoid", torch.sigmoid, functional.logsigmoid)

Rule = Literal["paper", "code"]


@dataclass(frozen=True)
class Mask:
    """SparseMixer's mask: only experts close to the best can be sampled (Liu et al., 2023).

    The paper keeps i iff z* − z_i ≤ r·(|z*| + |z_i|). The authors' code keeps i iff
    (z* − z_i) / max(|z_i|, z*) ≤ 2r, which is looser.

    >>> z = torch.tensor([[1.0, 0.9, -3.0]])
    >>> Mask(r=0.1).drops(z).tolist()
    [[False, False, True]]
    """

    r: float = 0.1
    rule: Rule = "paper"

    def __post_init__(self) -> None:
        if not self.r > 0:
            raise ValueError(f"Mask: r must be positive, got {self.r}")
        if self.rule not in ("paper", "code"):
            raise ValueError(f"Mask: rule must be 'paper' or 'code', got '{self.rule}'")

    @torch.no_grad()
    def drops(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        """Where an expert is too far behind. `best` [T, 1] is the best that is still to be had."""
        best = logits.amax(-1, keepdim=True) if best is None else best
        if self.rule == "paper":
            return (best - logits) > self.r * (best.abs() + logits.abs())
        return (best - logits) / logits.abs().clamp(min=best) > 2 * self.r


def gumbel_argmax(logits: Tensor) -> Tensor:
    """[T, 1] one index a row, drawn from softmax(logits) by the Gumbel-max trick."""
    with torch.no_grad():
        noise = torch.empty_like(logits, memory_format=torch.contiguous_format).exponential_().log_()
        return (logits - noise).argmax(-1, keepdim=True)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None


def scaled(x: Tensor, forward: Tensor, backward: float) -> Tensor:
    """`forward · x` whose gradient is `backward` times what arrives.

    >>> x = torch.ones(1, requires_grad=True)
    >>> y = scaled(x, torch.tensor(0.5), 2.0)
    >>> y.backward()
    >>> y.item(), x.grad.item()
    (0.5, 2.0)
    """
    return _Scaled.apply(x, forward, backward)  # type: ignore[no-any-return]
