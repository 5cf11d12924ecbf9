"""One sparse layer as a Sparsifier keeps it: the weight, its budget, and what it has been through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsight.dst.explored import Explored
from sparsight.dst.method import DenseMomentum
from sparsight.dst.rewire import Fill
from sparsight.dst.structures import Unstructured
from sparsight.dst.view import LayerView
from sparsight.nn.accumulation import Reduce
from sparsight.nn.compressed import CompressedWeight
from sparsight.nn.masked import MaskedWeight
from sparsight.topology import Topology


class RunningMomentum:
    """The running mean of a dense gradient, and of its square where asked."""

    def __init__(self, settings: DenseMomentum, weight: Tensor) -> None:
        self.settings = settings
        self.mean = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
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
    weight: MaskedWeight | CompressedWeight
    start: int
    budget: int
    target: int
    explored: Explored
    momentum: RunningMomentum | None = None
    why: str = ""
    """Why the weight is stored as it is."""

    @property
    def topology(self) -> Topology:
        return self.weight.topology

    @property
    def latent(self) -> MaskedWeight:
        """The weight of a method whose weights live on outside the forward set."""
        assert isinstance(self.weight, MaskedWeight), "latent weights are stored masked"
        return self.weight

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
        filled = Unstructured().fill(None, forward.positions(), iter([(0, size)]), plan)
        return Topology.from_positions(forward.shape, filled)

    def view(self, seed: int, reduce: Reduce = lambda tensor: tensor) -> LayerView:
        """What a criterion may see, with the dense gradient in blocks where it was collected."""
        weight = self.weight
        whole = LayerView(
            name=self.name,
            topology=weight.topology,
            values=weight.values(),
            seed=seed,
            grad=weight.grad(),
            momentum=None if self.momentum is None else self.momentum.value().flatten(),
            latent=None if weight.reserve is None else weight.param.detach().flatten(),
        )
        if not weight.has_dense_grad or self.momentum is not None:
            return whole

        def stream() -> Iterator[LayerView]:
            for first, block in weight.gradient_blocks(reduce):
                yield replace(whole, first=first, count=block.numel(), dense_grad=block)

        return replace(whole, stream=stream)

    def follow_momentum(self, reduce: Reduce) -> None:
        """Take this step's dense gradient into the running mean (SNFS)."""
        if self.momentum is not None and self.weight.has_dense_grad:
            blocks = [block for _, block in self.weight.gradient_blocks(reduce)]
            self.momentum.update(torch.cat(blocks).view_as(self.momentum.mean))
