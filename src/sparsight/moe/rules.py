"""Quadrature rules and the estimators built on them, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from sparsight.moe.estimators import Needs, Quadrature
from sparsight.moe.gates import Mask, Rule, Score, drawn_weight, gumbel_argmax, softmax, too_far
from sparsight.moe.routing import Routing, choices

euler = Quadrature((1.0,), (1.0,))
"""Exact for f of degree 1."""
midpoint = Quadrature((0.5,), (1.0,))
"""Exact to degree 2: SparseMixer's rule."""
heun3 = Quadrature((1 / 3, 1.0), (3 / 4, 1 / 4))
"""Exact to degree 3: Heun's third-order method, which is also Radau's rule of two nodes."""
simpson = Quadrature((0.0, 0.5, 1.0), (1 / 6, 4 / 6, 1 / 6))
"""Exact to degree 4: the quadrature of RK4, and Lobatto's rule of three nodes."""
gauss2 = Quadrature(((1 - 1 / sqrt(3)) / 2, (1 + 1 / sqrt(3)) / 2), (0.5, 0.5))
"""Exact to degree 4."""
radau = Quadrature(
    ((4 - sqrt(6)) / 10, (4 + sqrt(6)) / 10, 1.0), ((16 - sqrt(6)) / 36, (16 + sqrt(6)) / 36, 1 / 9)
)
"""Exact to degree 5: three nodes, the last at 1, where the first term of the gradient needs one anyway."""
gauss3 = Quadrature(((1 - sqrt(3 / 5)) / 2, 0.5, (1 + sqrt(3 / 5)) / 2), (5 / 18, 8 / 18, 5 / 18))
"""Exact to degree 6."""
lobatto = Quadrature(
    (0.0, (1 - 1 / sqrt(5)) / 2, (1 + 1 / sqrt(5)) / 2, 1.0), (1 / 12, 5 / 12, 5 / 12, 1 / 12)
)
"""Exact to degree 6: four nodes, both ends among them."""


def SparseMixer(  # noqa: N802 - reads like the other estimators
    r: float = 0.1,
    *,
    rule: Rule = "paper",
    euler_on_argmax: bool = True,
    omega: bool = True,
    expert_grad: Literal["paper", "code"] = "paper",
) -> Quadrature:
    """Midpoint rule on a masked softmax (Liu et al., 2023: "Sparse backpropagation for MoE training").

    As published it uses Euler's rule where the best expert was drawn and scales the layer's output by a
    learned vector ω.

    >>> SparseMixer().nodes
    (0.5,)
    """
    return Quadrature(
        midpoint.nodes, midpoint.weights, Mask(r, rule), 1.0, euler_on_argmax, expert_grad, omega
    )


def SparseMixer2Star(  # noqa: N802
    r: float = 0.1,
    *,
    rule: Rule = "paper",
    temperature: float = 2.0,
    euler_on_argmax: bool = False,
    expert_grad: Literal["paper", "code"] = "paper",
) -> Quadrature:
    """Heun's third-order rule with the node probabilities and the doubling that the derivation asks for.

    What `SparseMixer2` sets out to be: 1/3 is drawn with probability 3/8 and 1 with 5/8, whichever expert
    it is, and the gradient is doubled. The masked softmax has temperature 2.

    >>> SparseMixer2Star().draws()[1]
    (0.375, 0.625)
    """
    return Quadrature(heun3.nodes, heun3.weights, Mask(r, rule), temperature, euler_on_argmax, expert_grad)


@dataclass(frozen=True)
class SparseMixer2:
    """SparseMixer v2 as shipped in Phi-3.5-MoE (Liu et al., 2024: "GRIN").

    The forward pass is p_D × {1 if D is the best or with probability 1/4, else 1/3}; the gradient into the
    logits is p_D(onehot_D − p), not doubled. Agrees with transformers' PhiMoE number for number, which is
    why a third is `third=0.3333` here. The mask is the code's, with r = 0.01.

    >>> routing = SparseMixer2()(torch.tensor([[1.0, 3.0, 2.99]]), 2, training=False)
    >>> routing.expert.tolist()
    [1, 2]
    """

    r: float = 0.01
    rule: Rule = "code"
    third: float = 0.3333
    expert_grad: Literal["paper", "code"] = "code"

    def __post_init__(self) -> None:
        Mask(self.r, self.rule)  # which says what is wrong with them

    @property
    def needs(self) -> Needs:
        """A distribution to draw from."""
        return Needs(samples=True)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        rounds = []
        plain_logits = logits.detach()
        left, alone = plain_logits, None
        for turn in range(k):
            # Round after round the threshold is the best that is left, measured against all the logits.
            drops = too_far(self.r, self.rule, plain_logits, left.amax(-1, keepdim=True))
            masked = left.masked_fill(drops, -torch.inf)
            if turn == 0:
                alone = masked.isneginf().sum(-1).eq(masked.shape[-1] - 1).sum()
            chosen = gumbel_argmax(masked) if training else left.argmax(-1, keepdim=True)
            p = masked.softmax(-1)
            plain = p.gather(-1, chosen)
            scale = self._scale(p, plain, chosen) if training else torch.ones_like(plain)
            rounds.append((chosen, drawn_weight(logits, p, chosen, scale, 1.0), plain))
            if turn + 1 < k:
                left = left.scatter(-1, chosen, -torch.inf)
        chosen, weight, plain = (torch.cat(parts, -1) for parts in zip(*rounds, strict=True))
        through = plain if training and self.expert_grad == "paper" else None
        return replace(choices(chosen, weight, score.prob(logits), logits, through), alone=alone)

    def _scale(self, p: Tensor, plain: Tensor, chosen: Tensor) -> Tensor:
        whole = (chosen == p.argmax(-1, keepdim=True)) | (torch.rand_like(plain) > 0.75)
        return torch.add(self.third, whole, alpha=1 - self.third).type_as(p)
