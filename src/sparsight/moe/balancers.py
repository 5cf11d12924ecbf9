"""Balancers: losses that keep the experts evenly used, or biases that move after the step.

A layer takes any number of them and adds their losses up. What a balancer remembers is given to it as
tensors, which the layer keeps as buffers, so that a resumed run goes on as if nothing had happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparsight.dst.schedules import Schedule
from sparsight.moe.routing import Routing

State = Mapping[str, Tensor]


class Balancer(Protocol):
    """`loss` is asked once a forward pass in training, `update` once an optimizer step."""

    def state(self, experts: int) -> dict[str, Tensor]: ...
    def loss(self, routing: Routing, state: State, step: int) -> Tensor | None: ...
    def update(self, state: State, load: Tensor, tokens: int) -> None: ...


def at(coef: float | Schedule, step: int) -> float:
    """A coefficient at a step."""
    return float(coef(step)) if callable(coef) else float(coef)


def _check(name: str, coef: float | Schedule) -> None:
    if not callable(coef) and not (coef >= 0 and math.isfinite(coef)):
        raise ValueError(f"{name}: coef must be a number >= 0 or a schedule, got {coef}")


def _distribution(routing: Routing) -> Tensor:
    """Scores as shares of their sum, token by token; a softmax stays what it is."""
    total = routing.prob.sum(-1, keepdim=True)
    return routing.prob / total.clamp_min(torch.finfo(total.dtype).tiny)


def world_sum(tensor: Tensor) -> Tensor:
    """The sum over ranks, in place; the tensor itself where there is one rank."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


@dataclass(frozen=True)
class SwitchLoss:
    """coef · E·Σ f_i P_i with f_i the share of assignments and P_i the mean probability (Fedus et al., 2022).

    1 at perfect balance, for every k, since f adds up to 1. f is taken before anything is dropped.
    `over="batch"` is one loss for this layer and batch; `"sequence"` is the mean over sequences of each
    one's loss; `"global"` takes f over all ranks and all micro-batches of the optimizer step so far (Qiu et
    al., 2025).

    >>> prob = torch.full((4, 2), 0.5)
    >>> even = Routing(torch.arange(4), torch.tensor([0, 1, 0, 1]), prob[:, 0], prob, prob.log())
    >>> SwitchLoss(1.0).loss(even, {}, 0).item()
    1.0
    """

    coef: float | Schedule = 0.01
    over: Literal["batch", "sequence", "global"] = "batch"

    def __post_init__(self) -> None:
        _check("SwitchLoss", self.coef)
        if self.over not in ("batch", "sequence", "global"):
            raise ValueError(f"SwitchLoss: over must be 'batch', 'sequence' or 'global', got '{self.over}'")

    def state(self, experts: int) -> dict[str, Tensor]:
        """The load of this step so far."""
        return {"so_far": torch.zeros(experts, dtype=torch.int64)} if self.over == "global" else {}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor:
        """See the class."""
        if self.over == "sequence":
            return at(self.coef, step) * self._by_sequence(routing)
        load = routing.load()
        if self.over == "global":
            state["so_far"].add_(load)
            load = world_sum(state["so_far"].clone())
        prob = _distribution(routing)
        share = load.to(prob.dtype) / load.sum()
        return at(self.coef, step) * routing.experts * (share * prob.mean(0)).sum()

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """A new step begins."""
        if self.over == "global":
            state["so_far"].zero_()

    def _by_sequence(self, routing: Routing) -> Tensor:
        if routing.sequence is None:
            raise ValueError(
                "SwitchLoss(over='sequence') needs inputs [..., sequence, dim]; got a flat batch of tokens"
            )
        prob = _distribution(routing)
        count = int(routing.sequence.max()) + 1
        zeros = prob.new_zeros(count, routing.experts)
        kept = slice(None) if routing.counted is None else routing.counted
        token, expert = routing.token[kept], routing.expert[kept]
        one = prob.new_ones(token.numel())
        load = zeros.index_put((routing.sequence[token], expert), one, accumulate=True)
        mean = zeros.index_add(0, routing.sequence, prob)
        size = torch.bincount(routing.sequence, minlength=count).to(prob.dtype)[:, None]
        there = size.squeeze(1) > 0
        share, mean = load / load.sum(1, keepdim=True).clamp_min(1), mean / size.clamp_min(1)
        return (routing.experts * (share * mean).sum(1))[there].mean()


@dataclass(frozen=True)
class ZLoss:
    """coef · mean(logsumexp(z)²): keeps logits small (Zoph et al., 2022).

    >>> z = torch.zeros(3, 4)
    >>> routing = Routing(torch.arange(3), torch.zeros(3).long(), torch.ones(3), z.softmax(1), z)
    >>> round(ZLoss(1.0).loss(routing, {}, 0).item(), 4)
    1.9218
    """

    coef: float | Schedule = 1e-3

    def __post_init__(self) -> None:
        _check("ZLoss", self.coef)

    def state(self, experts: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor:
        """See the class."""
        return at(self.coef, step) * routing.logit.logsumexp(-1).square().mean()

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class ImportanceLoss:
    """coef · CV² of the experts' summed probabilities (Shazeer et al., 2017).

    CV² = variance / mean². The variance itself, not the square of a standard deviation, whose gradient is NaN
    at perfect balance.
    """

    coef: float | Schedule = 0.01

    def __post_init__(self) -> None:
        _check("ImportanceLoss", self.coef)

    def state(self, experts: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor:
        """See the class."""
        importance = _distribution(routing).mean(0)
        mean = importance.mean()
        spread: Tensor = (importance - mean).square().mean() / mean.square()
        return at(self.coef, step) * spread

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class EntropyLoss:
    """coef · (1 − H(mean p)/ln E), plus `token` · mean H(p)/ln E: even over experts, decided for each token.

    Zero when the experts are equally likely over the batch; with `token` > 0 it is mutual information.
    """

    coef: float | Schedule = 0.01
    token: float = 0.0

    def __post_init__(self) -> None:
        _check("EntropyLoss", self.coef)

    def state(self, experts: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor:
        """See the class."""
        p = _distribution(routing)
        most = math.log(max(routing.experts, 2))
        value: Tensor = 1 - torch.special.entr(p.mean(0)).sum() / most
        if self.token:
            # entr has an infinite slope at 0, where p itself has none.
            value = value + self.token * torch.special.entr(p.clamp_min(1e-12)).sum(-1).mean() / most
        return at(self.coef, step) * value

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """Nothing."""


@dataclass(frozen=True)
class LossFreeBias:
    """Select by score + b, weigh by score alone; after each step b += rate·sign(mean load − load).

    No gradient is spent on balance (Wang et al., 2024). The load is that of all ranks and micro-batches.
    Call `sp.follow_steps(model, optimizer)` once, so that b moves.
    """

    rate: float | Schedule = 1e-3

    def __post_init__(self) -> None:
        _check("LossFreeBias", self.rate)

    def state(self, experts: int) -> dict[str, Tensor]:
        """The bias, and how often it moved."""
        return {"bias": torch.zeros(experts), "moved": torch.zeros((), dtype=torch.int64)}

    def loss(self, routing: Routing, state: State, step: int) -> None:
        """None at all."""

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """See the class."""
        load = load.to(state["bias"].dtype)
        state["bias"].add_(at(self.rate, int(state["moved"])) * (load.mean() - load).sign())
        state["moved"].add_(1)


@dataclass(frozen=True)
class ReluPenalty:
    """ReMoE's λ·mean Σ f_e·relu(z_e), with λ following the sparsity (Wang et al., 2025).

    After each step λ is multiplied by `factor` where tokens have more than k experts on average, divided
    where they have fewer. f_e = E/(kT)·(tokens of e) makes busy experts pay more; `balanced=False` sets it
    to 1.
    """

    k: int
    first: float = 1e-8
    factor: float = 1.2
    balanced: bool = True

    def state(self, experts: int) -> dict[str, Tensor]:
        """λ."""
        return {"penalty": torch.tensor(self.first, dtype=torch.float64)}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor:
        """See the class."""
        mean = routing.prob.mean(0)
        if self.balanced:
            load = routing.load().to(mean.dtype)
            mean = mean * load * routing.experts / (self.k * routing.tokens)
        return state["penalty"].to(mean.dtype) * mean.sum()

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """See the class."""
        direction = float(torch.sign(load.sum() - self.k * tokens))
        state["penalty"].mul_(self.factor**direction)
