"""Scores: what makes a weight worth keeping and a position worth growing. Higher is better.

A drop score gives one number per existing weight, a grow score one per position of `view.span`. A
criterion never counts and never builds a mask: `rewire` does both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.dst.view import LayerView
from sparsight.kernels.index import uniform

Score = Callable[[LayerView], Tensor]


def _there(tensor: Tensor | None, what: str, view: LayerView) -> Tensor:
    if tensor is None:
        raise ValueError(
            f"layer '{view.name}': this criterion needs {what}, which the method does not provide"
        )
    return tensor


def magnitude(view: LayerView) -> Tensor:
    """|w| of each existing weight."""
    return view.values.abs()


def gradient(view: LayerView) -> Tensor:
    """|dense gradient| of each position (RigL)."""
    dense = _there(view.dense_grad, "the dense gradient (Method(gradient='due'))", view)
    return dense.abs()


def random(view: LayerView) -> Tensor:
    """A number in [0, 1) for each position, fixed by the seed of this update (SET)."""
    return uniform(view.first, view.size, view.seed, view.values.device)


def signed_magnitude(view: LayerView) -> Tensor:
    """SET's rule: the smallest positive and the largest negative weights go in equal proportion.

    The score is a weight's rank by magnitude within its own sign, as a share of that sign's weights.
    """
    score = torch.empty_like(view.values, dtype=torch.float64)
    negative = view.values < 0
    for group in (negative, ~negative):
        size = view.values[group].abs()
        ranks = torch.empty_like(size, dtype=torch.float64)
        ranks[size.argsort(stable=True)] = torch.arange(size.numel(), dtype=torch.float64, device=size.device)
        score[group] = (ranks + 0.5) / max(size.numel(), 1)
    return score


@dataclass(frozen=True)
class magnitude_and_gradient:  # noqa: N801 - reads like the other criteria
    """|w| + weight · |g| of each existing weight (MEST)."""

    weight: float = 1.0

    def __call__(self, view: LayerView) -> Tensor:
        grad = _there(view.grad, "the gradient of the existing weights", view)
        return view.values.abs() + self.weight * grad.abs()


def momentum(view: LayerView) -> Tensor:
    """|running mean of the dense gradient| of each position (SNFS)."""
    return _there(view.momentum, "the dense momentum (Method(gradient='always'))", view).abs()


def latent_magnitude(view: LayerView) -> Tensor:
    """|w| of each position, with the weights that wait outside the forward set (Top-KAST, N:M)."""
    return _there(view.latent, "latent weights (Method(latent=...))", view).abs()
