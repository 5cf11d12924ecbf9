"""Routing: which token goes to which expert, and with what weight. The one thing all parts agree on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """N assignments of tokens to experts, any number per token. Earlier ones are served first.

    `weight` scales the expert's output, and what flows back through it reaches the router.

    >>> prob = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    >>> routing = Routing(torch.tensor([0, 1]), torch.tensor([0, 1]), prob.amax(1), prob, prob.log())
    >>> routing.load().tolist()
    [1, 1]
    """

    token: Tensor
    """[N] which token."""
    expert: Tensor
    """[N] which expert."""
    weight: Tensor
    """[N] how much the expert's output counts."""
    prob: Tensor
    """[T, E] what the router thinks of each expert: probabilities, or scores."""
    logit: Tensor
    """[T, E] what the router said."""
    expert_weight: Tensor | None = None
    """[N] what scales the gradient into the expert, where that is not `weight`."""
    counted: Tensor | None = None
    """[N] which assignments make up the load, where that is not all of them."""
    rest: Tensor | None = None
    """[T, E] weights of the default outputs of experts that did not run (Default MoE)."""
    alone: Tensor | None = None
    """How many tokens had one expert left after masking: their routers learn nothing."""
    sequence: Tensor | None = None
    """[T] which sequence a token belongs to, where the input has sequences."""

    @property
    def tokens(self) -> int:
        return self.prob.shape[0]

    @property
    def experts(self) -> int:
        return self.prob.shape[1]

    def load(self) -> Tensor:
        """[E] how many tokens each expert was given, before any was dropped."""
        expert = self.expert if self.counted is None else self.expert[self.counted]
        return count(expert, self.experts)

    def unserved(self) -> int:
        """How many tokens no expert takes; they pass by on the residual."""
        served = torch.zeros(self.tokens, dtype=torch.bool, device=self.token.device)
        served[self.token] = True
        return self.tokens - int(served.sum())

    def keep(self, kept: Tensor) -> Routing:
        """Only the assignments `kept` names, by index or by mask."""
        through, counted = self.expert_weight, self.counted
        return replace(
            self,
            token=self.token[kept],
            expert=self.expert[kept],
            weight=self.weight[kept],
            expert_weight=None if through is None else through[kept],
            counted=None if counted is None else counted[kept],
        )

    def detach(self) -> Routing:
        """The same numbers without their history."""
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            values[field.name] = None if value is None else value.detach()
        return Routing(**values)


def count(expert: Tensor, experts: int) -> Tensor:
    """[E] how often each expert occurs: `bincount` with a size that torch.compile knows.

    >>> count(torch.tensor([2, 0, 2]), 4).tolist()
    [1, 0, 2, 0]
    """
    if not torch.compiler.is_compiling():
        return torch.bincount(expert, minlength=experts)
    zeros = torch.zeros(experts, dtype=torch.int64, device=expert.device)
    return zeros.scatter_add(0, expert, torch.ones_like(expert))


def choices(
    chosen: Tensor, weight: Tensor, prob: Tensor, logit: Tensor, expert_weight: Tensor | None = None
) -> Routing:
    """A Routing from [T, k] choices; all first choices come before any second choice."""
    tokens, k = chosen.shape
    token = torch.arange(tokens, device=chosen.device)
    if k == 1:
        flat = None if expert_weight is None else expert_weight.view(-1)
        return Routing(token, chosen.view(-1), weight.view(-1), prob, logit, flat)
    return Routing(
        token.repeat(k),
        chosen.t().reshape(-1),
        weight.t().reshape(-1),
        prob,
        logit,
        None if expert_weight is None else expert_weight.t().reshape(-1),
    )
