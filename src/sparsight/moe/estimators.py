"""Estimators: what is selected, how much it weighs, and what flows back into the router.

With y = p_D·E_D and D drawn from p, the router's exact gradient has two terms. Gating-only keeps the first.
A quadrature rule of nodes c and weights b estimates both from the one expert that ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from sparsight.moe.gates import Mask, Score, drawn_weight, exponential, gumbel_argmax, softmax
from sparsight.moe.routing import Routing, choices


class Estimator(Protocol):
    """(logits, k, ...) → Routing. `bias` moves the selection and never the weight."""

    def __call__(
        self, logits: Tensor, k: int, *, score: Score, bias: Tensor | None, training: bool
    ) -> Routing: ...


@dataclass(frozen=True)
class Needs:
    """What an estimator asks of the rest of the layer; `sense` refuses what does not fit."""

    samples: bool = False
    """Draws from a distribution, so scores must be probabilities and a selection bias has no place."""
    top1: bool = False
    dense: bool = False
    """Runs every expert on every token."""
    omega: bool = False
    """A learned scale of the output, kept at inference (SparseMixer v1)."""
    defaults: float | None = None
    """A running mean of each expert's output, with this decay (Default MoE)."""
    loss: float | None = None
    """The loss, through `sp.reinforce_loss`, and a running mean of it with this decay."""


def needs_of(estimator: object) -> Needs:
    """What it declares in `needs`; an ordinary function needs nothing."""
    needs = getattr(estimator, "needs", Needs())
    assert isinstance(needs, Needs)
    return needs


@dataclass(frozen=True)
class GatingOnly:
    """The k best experts, weighted by their scores: Switch, Mixtral and most others.

    Gradients reach the router through the weights alone: the first of the two terms. `normalise` divides
    the k weights by their sum. `sample=True` draws the experts from p instead of taking the best.

    >>> routing = GatingOnly()(torch.tensor([[1.0, 3.0]]), 1, score=softmax)
    >>> routing.expert.tolist(), round(routing.weight.item(), 3)
    ([1], 0.881)
    """

    normalise: bool = False
    sample: bool = False

    @property
    def needs(self) -> Needs:
        """Samples only if asked to."""
        return Needs(samples=self.sample)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        prob = score.prob(logits)
        with torch.no_grad():
            rank = prob if bias is None else prob + bias
            if self.sample and training:
                rank = logits - exponential(logits).log_()
            chosen = rank.argmax(-1, keepdim=True) if k == 1 else rank.topk(k, dim=-1).indices
        if self.normalise:
            # exp of a log-softmax over the chosen: their scores over the sum of their scores, and no floor
            # in the denominator that the router could reach by making every score small.
            weight = score.log(logits).gather(-1, chosen).softmax(-1)
        else:
            weight = prob.gather(-1, chosen)
        return choices(chosen, weight, prob, logits)

    def outcomes(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `oracle.outcomes`."""
        p = logits.softmax(-1)
        return [(p[d].detach(), _only(p, d)) for d in range(p.numel())]


def _only(p: Tensor, d: int) -> Tensor:
    gate = torch.zeros_like(p)
    gate[d] = 1
    return gate * p


@dataclass(frozen=True)
class Quadrature:
    """Both terms of the router's gradient, by a quadrature rule on [0, 1].

    f(a) − f(0) ≈ a·Σ b_j f'(c_j a). So draw D from p, draw the node c_j with probability b'_j = (b_j + [c_j
    = 1]) / 2, scale the forward pass by it and double what flows back into p_D. The bias is zero where the
    rule is exact. With k > 1, experts are drawn without replacement, masked and normalised anew each round.

    `euler_on_argmax` uses the node 1 alone where D is the best expert: steadier, and biased.
    `expert_grad="paper"` sends p_D back into the expert, `"code"` what the forward pass was scaled by.

    >>> Quadrature((0.5,), (1.0,)).draws()
    ((0.5, 1.0), (0.5, 0.5))
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]
    mask: Mask | None = None
    temperature: float = 1.0
    euler_on_argmax: bool = False
    expert_grad: Literal["paper", "code"] = "paper"
    omega: bool = False

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.weights) or not self.nodes:
            raise ValueError(
                f"Quadrature: expected as many weights as nodes, got {len(self.nodes)} nodes and "
                f"{len(self.weights)} weights"
            )
        if not all(0 <= c <= 1 for c in self.nodes) or not all(b > 0 for b in self.weights):
            raise ValueError(
                f"Quadrature: nodes must lie in [0, 1] and weights must be positive, since they become "
                f"probabilities; got nodes {self.nodes} and weights {self.weights}"
            )
        if not math.isclose(sum(self.weights), 1, abs_tol=1e-9):
            raise ValueError(f"Quadrature: weights must add up to 1, got {sum(self.weights)}")
        if not self.temperature > 0:
            raise ValueError(f"Quadrature: temperature must be positive, got {self.temperature}")
        if self.expert_grad not in ("paper", "code"):
            raise ValueError(f"Quadrature: expert_grad must be 'paper' or 'code', got '{self.expert_grad}'")

    @property
    def needs(self) -> Needs:
        """A distribution to draw from."""
        return Needs(samples=True, omega=self.omega)

    def draws(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The scales of the forward pass and how likely each is."""
        likely = {c: b / 2 for c, b in zip(self.nodes, self.weights, strict=True)}
        likely[1.0] = likely.get(1.0, 0.0) + 0.5
        return tuple(likely), tuple(likely.values())

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
        left, alone = logits.detach(), None
        for turn in range(k):
            masked = self._masked(left)
            if turn == 0 and self.mask is not None:
                alone = masked.isneginf().sum(-1).eq(masked.shape[-1] - 1).sum()
            p = masked.softmax(-1)
            if training:
                chosen = gumbel_argmax(masked)
                weight = self._weigh(logits, p, chosen, self._scale(chosen, masked))
            else:
                chosen = masked.argmax(-1, keepdim=True)
                weight = drawn_weight(logits, p, chosen, torch.ones_like(p[:, :1]), 1 / self.temperature)
            rounds.append((chosen, weight, p.gather(-1, chosen)))
            if turn + 1 < k:
                left = left.scatter(-1, chosen, -torch.inf)
        chosen, weight, plain = (torch.cat(parts, -1) for parts in zip(*rounds, strict=True))
        through = plain if training and self.expert_grad == "paper" else None
        return replace(choices(chosen, weight, score.prob(logits), logits, through), alone=alone)

    def outcomes(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `oracle.outcomes`."""
        row = logits[None]
        p = self.distribution(row).detach()
        listed = []
        for d in range(p.numel()):
            on_best = self.euler_on_argmax and d == int(p.argmax())
            scales, likely = ((1.0,), (1.0,)) if on_best else self.draws()
            for c, share in zip(scales, likely, strict=True):
                weight = self._weigh(row, p, torch.tensor([[d]]), torch.tensor(c, dtype=p.dtype))
                one = nn.functional.one_hot(torch.tensor(d), p.numel()).to(p.dtype)
                listed.append((p[0, d] * share, one * weight[0, 0]))
        return listed

    def distribution(self, logits: Tensor) -> Tensor:
        """What D is drawn from: the masked and tempered softmax."""
        return self._masked(logits).softmax(-1)

    def _masked(self, logits: Tensor) -> Tensor:
        """The logits that p is the softmax of: a new tensor, the caller's stays whole."""
        if self.mask is not None:
            logits = logits.masked_fill(self.mask.drops(logits), -torch.inf)
        return logits if self.temperature == 1 else logits / self.temperature

    def _scale(self, chosen: Tensor, masked: Tensor) -> Tensor:
        scales, likely = self.draws()
        u = torch.rand(chosen.shape, device=chosen.device)
        edges = torch.tensor(likely, device=u.device).cumsum(0)[:-1]
        c = torch.tensor(scales, dtype=masked.dtype, device=u.device)[torch.bucketize(u, edges, right=True)]
        if self.euler_on_argmax:
            c = torch.where(chosen == masked.argmax(-1, keepdim=True), 1.0, c)
        return c

    def _weigh(self, logits: Tensor, p: Tensor, chosen: Tensor, c: Tensor) -> Tensor:
        return drawn_weight(logits, p, chosen, c, 2.0 / self.temperature)
