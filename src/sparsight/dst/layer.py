"""One sparse layer as a Sparsifier keeps it: the weight, its budget, and what it has been through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.dst.explored import Explored
from sparsight.dst.find import Place
from sparsight.dst.method import DenseMomentum
from sparsight.dst.rewire import Fill
from sparsight.dst.structures import Unstructured
from sparsight.dst.view import LayerView
from sparsight.nn.masked import MaskedWeight
from sparsight.topology import Topology


class RunningMomentum:
    """The running mean of a dense gradient, and of its square where asked."""

    def __init__(self, settings: DenseMomentum, like: Tensor) -> None:
        self.settings = settings
        self.mean = torch.zeros_like(like, memory_format=torch.contiguous_format)
        self.square = None if settings.second is None else torch.zeros_like(self.mean)

    def update(self, grad: Tensor) -> None:
        self.mean.lerp_(grad, 1 - self.settings.beta)
        if self.square is not None and self.settings.second is not None:
            self.square.lerp_(grad.square(), 1 - self.settings.second)

    def value(self) -> Tensor:
        if self.square is None:
            return self.mean
        return self.mean / (self.square.sqrt() + 1e-8)


@dataclass
class Layer:
    """A weight under a topology, with the numbers of weights it starts with, has and ends with."""

    name: str
    places: list[Place]
    weight: MaskedWeight
    start: int
    budget: int
    target: int
    explored: Explored
    momentum: RunningMomentum | None = None

    @property
    def topology(self) -> Topology:
        return self.weight.topology

    @property
    def trains(self) -> bool:
        return self.weight.param.requires_grad

    def scheduled(self, ramp: float) -> int:
        """The number of weights on the way from `start` (ramp 1) to `budget` (ramp 0)."""
        return self.budget + round((self.start - self.budget) * ramp)

    def slots(self, state: Mapping[Tensor, object]) -> list[Tensor]:
        """Optimizer-state tensors that belong to single weights: those of the parameter's shape."""
        held = state.get(self.weight.param, {})
        assert isinstance(held, Mapping)
        shape = self.weight.param.shape
        return [slot for slot in held.values() if isinstance(slot, Tensor) and slot.shape == shape]

    def backward_set(self, forward: Topology, density: float | None, seed: int) -> Topology:
        """The forward set and the largest other weights, up to `density` of the layer (None: all)."""
        if density is None:
            return Topology.full(forward.shape, forward.col.device)
        plan = Fill(forward.shape, max(round(density * forward.size), forward.nnz), seed)
        size = self.weight.param.detach().abs().flatten()
        places = torch.arange(size.numel(), device=size.device)
        filled = Unstructured().fill(None, forward.positions(), iter([(places, size)]), plan)
        return Topology.from_positions(forward.shape, filled)

    def view(self, seed: int) -> LayerView:
        weight = self.weight
        dense = weight.dense_grad
        return LayerView(
            name=self.name,
            topology=weight.topology,
            values=weight.values(),
            seed=seed,
            grad=weight.grad(),
            dense_grad=None if dense is None else _rescaled(dense, weight.param.grad).flatten(),
            momentum=None if self.momentum is None else self.momentum.value().flatten(),
            latent=None if weight.reserve is None else weight.param.detach().flatten(),
        )


def _rescaled(dense: Tensor, used: Tensor | None) -> Tensor:
    """The dense gradient at the scale of the one the optimizer will use.

    Clipping and unscaling multiply `.grad` by one number after we collected ours; the largest entry that
    both have tells it, and tells exactly 1 where nothing was done.
    """
    if used is None:
        return dense
    at = used.abs().argmax()
    ours, theirs = dense.flatten()[at], used.flatten()[at]
    factor = theirs / ours
    return dense if factor == 1 or not bool(factor.isfinite()) else dense * factor
