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


def _softmax(z: Tensor) -> Tensor:
    return z.softmax(-1)


def _log_softmax(z: Tensor) -> Tensor:
    return z.log_softmax(-1)


softmax = Score("softmax", _softmax, _log_softmax)
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

    def drops(self, logits: Tensor, best: Tensor | None = None) -> Tensor:
        """Where an expert is too far behind. `best` [T, 1] is the best that is still to be had."""
        return too_far(self.r, self.rule, logits, best)


@torch.no_grad()
def too_far(r: float, rule: Rule, logits: Tensor, best: Tensor | None = None) -> Tensor:
    """See `Mask`."""
    best = logits.amax(-1, keepdim=True) if best is None else best
    if rule == "paper":  # z* − r·|z*| > z + r·|z|, in few passes
        return torch.add(logits, logits.abs(), alpha=r) < best - r * best.abs()
    return (best - logits) / logits.abs().clamp(min=best) > 2 * r


def exponential(like: Tensor) -> Tensor:
    """−ln u for each entry: what `Tensor.exponential_` draws, several times faster on a CPU."""
    return torch.rand_like(like, memory_format=torch.contiguous_format).log_().neg_()


def gumbel_argmax(logits: Tensor) -> Tensor:
    """[T, 1] one index a row, drawn from softmax(logits) by Gumbel-max: argmax(z − ln exponential)."""
    with torch.no_grad():
        return exponential(logits).log_().neg_().add_(logits).argmax(-1, keepdim=True)


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, chosen: Tensor, scale: Tensor, factor: float) -> Tensor:
        plain = p.gather(-1, chosen)
        ctx.save_for_backward(p, chosen, plain)
        ctx.factor = factor
        return plain * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        p, chosen, plain = ctx.saved_tensors
        pull = grad * plain * ctx.factor
        return (p * -pull).scatter_add_(-1, chosen, pull), None, None, None, None


def drawn_weight(logits: Tensor, p: Tensor, chosen: Tensor, scale: Tensor, factor: float) -> Tensor:
    """[T, 1] `scale`·p_D, with `factor`·∂p_D/∂z = factor·p_D·(onehot_D − p) flowing back into the logits.

    `p` is a softmax of (some of) the logits, given without history: one step instead of the four that
    masking, normalising, gathering and scaling would take on the way back.

    >>> z = torch.zeros(1, 2, requires_grad=True)
    >>> w = drawn_weight(z, z.detach().softmax(-1), torch.tensor([[0]]), torch.tensor(0.5), 2.0)
    >>> w.sum().backward()
    >>> w.item(), z.grad.tolist()
    (0.25, [[0.5, -0.5]])
    """
    if torch.compiler.is_compiling():
        return traced_weight(logits, p, chosen, scale, factor)
    return _Drawn.apply(logits, p, chosen, scale, factor)  # type: ignore[no-any-return]


def traced_weight(logits: Tensor, p: Tensor, chosen: Tensor, scale: Tensor, factor: float) -> Tensor:
    """`drawn_weight` in plain operations, which torch.compile can follow.

    ∂(z_D − Σ p_i z_i)/∂z is onehot_D − p.
    """
    plain = p.gather(-1, chosen)
    pull = logits.gather(-1, chosen) - (p * logits).sum(-1, keepdim=True)
    return plain * scale + plain * factor * (pull - pull.detach())
