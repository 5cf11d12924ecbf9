"""Routers: what emits the logits and how they are read. Each named router is an alias of a few lines.

`softmax()`, `sigmoid()` and `cosine()` leave the choice to the estimator. The others choose by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsight import chance
from sparsight.moe import gates, selections
from sparsight.moe.balancers import Balancer, ReluPenalty
from sparsight.moe.estimators import Estimator
from sparsight.moe.gates import Score


class LinearLogits(nn.Module):
    """z = Wx. A bare parameter, so that `sparsify` leaves the router dense."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        nn.init.uniform_(self.weight, -1 / math.sqrt(dim), 1 / math.sqrt(dim))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """[T, dim] → [T, E]."""
        return functional.linear(x, self.weight.to(x.dtype))


class CosineLogits(nn.Module):
    """z = cos(Px, e_i) / τ on the sphere, with τ learned (Chi et al., 2022)."""

    def __init__(self, dim: int, experts: int, width: int, temperature: float) -> None:
        super().__init__()
        self.project = nn.Parameter(torch.empty(width, dim))
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        nn.init.uniform_(self.project, -1 / math.sqrt(dim), 1 / math.sqrt(dim))

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """[T, dim] → [T, E]."""
        place = functional.normalize(functional.linear(x, self.project.to(x.dtype)), dim=-1)
        scale = self.log_scale.to(x.dtype).clamp(max=math.log(100.0)).exp()
        return scale * functional.linear(place, functional.normalize(self.weight.to(x.dtype), dim=-1))


class HashLogits(nn.Module):
    """A fixed random preference of each token id for each expert (Roller et al., 2021)."""

    def __init__(self, dim: int, experts: int, seed: int) -> None:
        super().__init__()
        self.experts, self.seed = experts, seed

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """[T] ids → [T, E]."""
        if ids is None:
            raise ValueError("a hash router needs the token ids: call the layer as moe(x, ids=input_ids)")
        place = ids[:, None] * self.experts + torch.arange(self.experts, device=ids.device)
        return chance.uniform(place, self.seed).to(x.dtype)


@dataclass(frozen=True)
class Router:
    """What emits logits, and how they are read."""

    name: str
    logits: Callable[[int, int], nn.Module]
    """(dim, experts) → module called with (x, ids)."""
    score: Score = gates.softmax
    select: Estimator | None = None
    """Decides who goes where, in place of an estimator."""
    jitter: float = 0.0
    """ε of the multiplicative noise U(1−ε, 1+ε) on the router's input, in training (Switch)."""
    even: bool = False
    """Loads are even by construction."""
    fixed: bool = False
    """Nothing to learn."""
    causal: bool = True
    """Whether a token's route hangs on earlier tokens at most, also in training."""
    only_k: int | None = None
    companion: Callable[[int], Balancer] | None = None
    """A balancer that belongs to this router, given k."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 1:
            raise ValueError(f"router '{self.name}': jitter must lie in [0, 1), got {self.jitter}")


def softmax(*, jitter: float = 0.0) -> Router:
    """Linear logits, softmax scores; Switch uses jitter=0.01.

    >>> softmax(jitter=0.01).score.name
    'softmax'
    """
    return Router("softmax", LinearLogits, jitter=jitter)


def sigmoid(*, jitter: float = 0.0) -> Router:
    """Linear logits, each expert scored by itself (DeepSeek-V3)."""
    return Router("sigmoid", LinearLogits, gates.sigmoid, jitter=jitter)


def cosine(*, width: int = 64, temperature: float = 0.1, jitter: float = 0.0) -> Router:
    """Cosine similarity to a learned point per expert, which holds representations apart (X-MoE)."""
    if width < 1 or not temperature > 0:
        raise ValueError(f"cosine: expected width >= 1 and temperature > 0, got {width} and {temperature}")
    return Router("cosine", partial(CosineLogits, width=width, temperature=temperature), jitter=jitter)


def gshard(*, jitter: float = 0.0) -> Router:
    """Top-2 with a random second expert. See `selections.RandomSecond`."""
    return Router("gshard", LinearLogits, select=selections.RandomSecond(), jitter=jitter, only_k=2)


def expert_choice() -> Router:
    """Each expert takes its best tokens·k/E tokens. Not causal. See `selections.ByExperts`."""
    return Router("expert choice", LinearLogits, select=selections.ByExperts(), even=True, causal=False)


def base() -> Router:
    """Balanced assignment in training, greedy at inference. See `selections.Balanced`."""
    return Router("base", LinearLogits, gates.sigmoid, selections.Balanced(), even=True, only_k=1)


def sinkhorn(*, rounds: int = 20) -> Router:
    """Top-k of Sinkhorn-normalised logits in training. See `selections.BySinkhorn`."""
    if rounds < 1:
        raise ValueError(f"sinkhorn: rounds must be at least 1, got {rounds}")
    return Router("sinkhorn", LinearLogits, select=selections.BySinkhorn(rounds))


def relu(*, first: float = 1e-8, factor: float = 1.2, balanced: bool = True) -> Router:
    """ReMoE: every expert with a positive logit; k is the mean that the penalty aims at."""
    return Router(
        "relu",
        LinearLogits,
        select=selections.Positive(),
        companion=partial(ReluPenalty, first=first, factor=factor, balanced=balanced),
    )


def hashed(*, seed: int = 0) -> Router:
    """Fixed by the token id. Call the layer with `ids`."""
    return Router("hash", partial(HashLogits, seed=seed), select=selections.Fixed(), fixed=True)
