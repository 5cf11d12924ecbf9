"""Scores for the first topology: one number per position, from the weights and perhaps a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def magnitude(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """|w|."""
    return {name: weight.detach().abs().flatten() for name, weight in weights.items()}


def _gradients(
    loss: Callable[[], Tensor], weights: Mapping[str, Tensor], *, create_graph: bool
) -> list[Tensor]:
    with torch.enable_grad():
        value = loss()
        grads = torch.autograd.grad(
            value, list(weights.values()), create_graph=create_graph, allow_unused=True
        )
    unused = [name for name, grad in zip(weights, grads, strict=True) if grad is None]
    if unused:
        raise ValueError(f"the loss does not depend on the weights of {unused}")
    return list(grads)


@dataclass(frozen=True)
class Snip:
    """|g·w|: how much the loss would feel the connection's absence, to first order."""

    loss: Callable[[], Tensor]

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        grads = _gradients(self.loss, weights, create_graph=False)
        return {
            name: (grad * weight.detach()).abs().flatten()
            for (name, weight), grad in zip(weights.items(), grads, strict=True)
        }


@dataclass(frozen=True)
class Grasp:
    """w·(Hg): how much of the gradient's squared norm leaves with the connection."""

    loss: Callable[[], Tensor]

    def __call__(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.enable_grad():
            grads = _gradients(self.loss, weights, create_graph=True)
            flow = sum((grad * grad.detach()).sum() for grad in grads)
            assert isinstance(flow, Tensor)
            curved = torch.autograd.grad(flow, list(weights.values()), allow_unused=True)
        return {
            name: (weight.detach() * (torch.zeros_like(weight) if hg is None else hg)).flatten()
            for (name, weight), hg in zip(weights.items(), curved, strict=True)
        }
