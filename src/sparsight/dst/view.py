"""What a criterion may look at: one layer's weights and gradients, however they are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.topology import Topology


@dataclass(frozen=True)
class LayerView:
    """One layer at the moment of an update.

    Vectors over the existing weights are in the order of `topology.positions()`; dense vectors cover the
    flat positions of `span`: the whole layer, or one block of rows where a gradient is streamed.
    """

    name: str
    topology: Topology
    values: Tensor
    seed: int
    grad: Tensor | None = None
    """Gradient of the existing weights, after clipping and unscaling."""
    dense_grad: Tensor | None = None
    """Gradient of every position in `span`; there when the method asked for it."""
    momentum: Tensor | None = None
    """Running mean of the dense gradient (SNFS)."""
    latent: Tensor | None = None
    """The weight of every position, with those outside the forward set (Top-KAST, N:M)."""
    first: int = 0
    count: int | None = None
    stream: Callable[[], Iterator[LayerView]] | None = None

    @property
    def span(self) -> Tensor:
        """The flat positions that a grow score must cover."""
        return torch.arange(self.first, self.first + self.size, device=self.values.device)

    @property
    def size(self) -> int:
        """How many positions that is."""
        return self.topology.size if self.count is None else self.count

    def blocks(self) -> Iterator[LayerView]:
        """The layer in the pieces in which its dense gradient exists."""
        if self.stream is None:
            yield self
        else:
            yield from self.stream()
