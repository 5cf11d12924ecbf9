"""Estimators to compare with: the ones that look at every expert, and the one that looks at the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsight.moe.estimators import GatingOnly, Needs
from sparsight.moe.gates import Score, exponential, gumbel_argmax, softmax
from sparsight.moe.routing import Routing


def _everything(gate: Tensor, through: Tensor, chosen: Tensor, prob: Tensor, logits: Tensor) -> Routing:
    """Every token to every expert, [T, E] gates; only `chosen` counts as load."""
    tokens, experts = gate.shape
    index = torch.arange(tokens * experts, device=gate.device)
    return Routing(
        index // experts,
        index % experts,
        gate.reshape(-1),
        prob,
        logits,
        expert_weight=through.detach().reshape(-1),
        counted=chosen.reshape(-1),
    )


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index, 1.0)


@dataclass(frozen=True)
class StraightThrough:
    """y = p_D·E_D forward; backward as if the one-hot of D were p. Computes every expert.

    The router's gradient is Σ_i (1{i = D} + p_i)·⟨∂y, E_i⟩·∂p_i: Euler's rule with all experts at hand
    instead of the one that was drawn (Bengio et al., 2013).

    >>> StraightThrough()(torch.zeros(2, 3), 1).expert.tolist()
    [0, 1, 2, 0, 1, 2]
    """

    @property
    def needs(self) -> Needs:
        """Every expert, one choice."""
        return Needs(samples=True, top1=True, dense=True)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        p = score.prob(logits)
        if not training:
            return GatingOnly()(logits, 1, score=score)
        one = _one_hot(gumbel_argmax(logits.detach()), p)
        return _everything((one + (p - p.detach())) * p, one * p, one.bool(), p, logits)

    def outcomes(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `oracle.outcomes`."""
        p = logits.softmax(-1)
        eye = torch.eye(p.numel(), dtype=p.dtype)
        return [(p[d].detach(), (eye[d] + (p - p.detach())) * p) for d in range(p.numel())]


@dataclass(frozen=True)
class GumbelStraightThrough:
    """D by Gumbel-max forward, the softmax of the same noisy logits backward (Jang et al., 2017).

    The relaxed sample is softmax((z + gumbel) / temperature). Computes every expert.

    >>> GumbelStraightThrough(temperature=0.5).temperature
    0.5
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"GumbelStraightThrough: temperature must be positive, got {self.temperature}")

    @property
    def needs(self) -> Needs:
        """Every expert, one choice."""
        return Needs(samples=True, top1=True, dense=True)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        if not training:
            return GatingOnly()(logits, 1, score=score)
        p = score.prob(logits)
        noisy = logits - exponential(logits.detach()).log_()
        soft = (noisy / self.temperature).softmax(-1)
        one = _one_hot(noisy.detach().argmax(-1, keepdim=True), p)
        return _everything((one + (soft - soft.detach())) * p, one * p, one.bool(), p, logits)


@dataclass(frozen=True)
class Reinforce:
    """The second term from the loss itself: (L − baseline)·∂log p_D (Williams, 1992).

    Unbiased and noisy. Add `sp.reinforce_loss(model, loss)` to what you differentiate; the baseline is a
    running mean of the loss with this decay.

    >>> Reinforce()(torch.zeros(4, 2), 1).token.tolist()
    [0, 1, 2, 3]
    """

    decay: float = 0.99

    @property
    def needs(self) -> Needs:
        """The loss, one choice."""
        return Needs(samples=True, top1=True, loss=self.decay)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        return GatingOnly(sample=True)(logits, 1, score=score, training=training)


@dataclass(frozen=True)
class DenseMixer:
    """Sparse forward, dense router gradient: ∂L/∂p_i = ⟨∂y, E_i⟩ for every i (Yao et al., 2025).

    Runs every expert for the sake of the router; experts that were not selected get no gradient.

    >>> DenseMixer()(torch.tensor([[0.0, 1.0]]), 1).weight.tolist()[0]
    0.0
    """

    @property
    def needs(self) -> Needs:
        """Every expert."""
        return Needs(dense=True)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        if not training:
            return GatingOnly()(logits, k, score=score, bias=bias)
        p = score.prob(logits)
        rank = p.detach() if bias is None else p.detach() + bias
        chosen = _one_hot(rank.topk(k, -1).indices, p)
        gate = p - p.detach() + chosen * p.detach()
        return _everything(gate, chosen * p, chosen.bool(), p, logits)


@dataclass(frozen=True)
class DefaultMoE:
    """Experts that did not run answer with a running mean of their outputs (Panda et al., 2025).

    y = Σ_{selected} p_i·E_i(x) + Σ_{others} p_i·Ê_i, so the router's gradient is dense at the cost of one
    small product. Ê moves once an optimizer step, from all tokens of the step.

    >>> DefaultMoE()(torch.zeros(2, 4), 1).rest.count_nonzero().item()
    6
    """

    decay: float = 0.9

    @property
    def needs(self) -> Needs:
        """The running means."""
        return Needs(defaults=self.decay)

    def __call__(
        self,
        logits: Tensor,
        k: int,
        *,
        score: Score = softmax,
        bias: Tensor | None = None,
        training: bool = True,
    ) -> Routing:
        routing = GatingOnly()(logits, k, score=score, bias=bias)
        return replace(routing, rest=routing.prob.scatter(-1, routing.expert.view(k, -1).t(), 0.0))
