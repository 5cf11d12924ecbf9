"""Selections that decide by themselves who goes where; the router's gradient is the weights' own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparsight.moe.assignment import balanced_assignment, sinkhorn
from sparsight.moe.estimators import GatingOnly
from sparsight.moe.gates import Score, softmax
from sparsight.moe.gates import sigmoid as sigmoid_score
from sparsight.moe.routing import Routing, choices


@dataclass(frozen=True)
class RandomSecond:
    """GShard: the second expert is kept at random, in proportion to its gate (Lepikhin et al., 2021).

    With g₁ + g₂ = 1, the second is kept with probability 2·g₂; the weights are normalised over the kept. The
    load is that of the first choices. At inference both are kept.
    """

    static: ClassVar[bool] = False
    """Sizes depend on the data, so torch.compile cannot follow."""

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = softmax, bias: Tensor | None, training: bool
    ) -> Routing:
        prob = score.prob(logits)
        chosen = prob.detach().topk(2, -1).indices
        gates = score.log(logits).gather(-1, chosen).softmax(-1)
        first = torch.arange(2, device=gates.device) == 0
        kept = torch.ones_like(chosen, dtype=torch.bool)
        if training:
            kept[:, 1] = torch.rand_like(gates[:, 1]) < 2 * gates[:, 1].detach()
            gates = torch.where(kept, gates, 0)
            gates = gates / gates.sum(-1, keepdim=True)
        routing = choices(chosen, gates, prob, logits)
        routing = replace(routing, counted=first.repeat_interleave(prob.shape[0]))
        return routing.keep(kept.t().reshape(-1)) if training else routing


@dataclass(frozen=True)
class ByExperts:
    """Expert choice: each expert takes its best tokens·k/E tokens (Zhou et al., 2022).

    Loads are even by construction; a token may get many experts or none. Not causal: whether a token is
    taken depends on all the others, later ones included.
    """

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = softmax, bias: Tensor | None, training: bool
    ) -> Routing:
        prob = score.prob(logits)
        tokens, experts = prob.shape
        take = min(tokens, math.ceil(tokens * k / experts))
        token = prob.detach().topk(take, dim=0).indices.t().reshape(-1)
        expert = torch.arange(experts, device=token.device).repeat_interleave(take)
        return Routing(token, expert, prob[token, expert], prob, logits)


@dataclass(frozen=True)
class Balanced:
    """BASE: a balanced assignment in training, the best expert at inference (Lewis et al., 2021).

    The assignment maximises the sum of the logits with every expert equally full. The gate is σ(z).
    """

    static: ClassVar[bool] = False
    """Sizes depend on the data, so torch.compile cannot follow."""

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = sigmoid_score, bias: Tensor | None, training: bool
    ) -> Routing:
        plain = logits.detach()
        chosen = balanced_assignment(plain) if training else plain.argmax(-1)
        prob = score.prob(logits)
        return choices(chosen[:, None], prob.gather(-1, chosen[:, None]), prob, logits)


@dataclass(frozen=True)
class BySinkhorn:
    """The k best of Sinkhorn-normalised logits in training, of logits at inference (Clark et al., 2022)."""

    rounds: int = 20

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = softmax, bias: Tensor | None, training: bool
    ) -> Routing:
        with torch.no_grad():
            rank = sinkhorn(logits, self.rounds) if training else logits
            chosen = rank.topk(k, -1).indices
        prob = score.prob(logits)
        return choices(chosen, prob.gather(-1, chosen), prob, logits)


@dataclass(frozen=True)
class Positive:
    """ReMoE: every expert whose logit is positive, weighted by it (Wang et al., 2025).

    k is the mean number of experts a token should have; the layer's penalty finds the way there.
    """

    static: ClassVar[bool] = False
    """Sizes depend on the data, so torch.compile cannot follow."""

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = softmax, bias: Tensor | None, training: bool
    ) -> Routing:
        gate = logits.relu()
        expert, token = gate.detach().t().nonzero(as_tuple=True)
        return Routing(token, expert, gate[token, expert], gate, logits)


@dataclass(frozen=True)
class Fixed:
    """Hash layers: the choice hangs on the token's id alone; each of the k experts weighs 1/k."""

    def __call__(
        self, logits: Tensor, k: int, *, score: Score = softmax, bias: Tensor | None, training: bool
    ) -> Routing:
        routing = GatingOnly()(logits, k, score=score)
        return replace(routing, weight=torch.full_like(routing.weight, 1 / k))
