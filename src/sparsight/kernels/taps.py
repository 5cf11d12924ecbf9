"""Collecting what a dense gradient is made of, on the steps that need it.

The gradient of a linear weight is dYᵀX, that of a convolution the same over patches. A tap keeps the pairs
(X, dY) of the backward passes, and blocks of rows of the gradient are computed from them when asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.grad import conv2d_weight

_BLOCK = 1 << 19
"""Positions in a block: about a megabyte of float32."""


def _pass() -> int:
    """The number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())


class Tap:
    """The pairs (X, dY) of one weight since the step began."""

    def __init__(self, geometry: tuple[tuple[int, int], ...] = ()) -> None:
        self.geometry = geometry
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._arriving: list[tuple[int, Tensor, Tensor]] = []

    def collect(self, x: Tensor, dy: Tensor) -> None:
        """Called by a backward pass. Compiled code reuses its buffers, hence the copies."""
        self._arriving.append((_pass(), x.detach().clone(), dy.detach().clone()))

    def settle(self, *, anew: bool) -> None:
        """This backward pass was added to the parameter's gradient: so is what it left here, or it begins
        a new step. What other passes left (for a gradient of something else) is forgotten.
        """
        arrived = [(x, dy) for number, x, dy in self._arriving if number == _pass()]
        self.pairs = arrived if anew else self.pairs + arrived
        self._arriving = []

    def blocks(self, size: int = _BLOCK) -> Iterator[tuple[int, Tensor]]:
        """The dense gradient as (first row, block of rows), never more than a block of it at once."""
        if not self.pairs:
            return
        fan_in = self.pairs[0][0].shape[1] * (math.prod(self.geometry[0]) if self.geometry else 1)
        rows = max(size // max(fan_in, 1), 1)
        for first in range(0, self.pairs[0][1].shape[1], rows):
            total = self._product(*self.pairs[0], first, first + rows)
            for x, dy in self.pairs[1:]:
                total += self._product(x, dy, first, first + rows)
            yield first, total

    def _product(self, x: Tensor, dy: Tensor, first: int, last: int) -> Tensor:
        part = dy[:, first:last]
        if not self.geometry:
            return part.T @ x
        kernel, stride, padding, dilation = self.geometry
        size = (part.shape[1], x.shape[1], *kernel)
        grad: Tensor = conv2d_weight(x, size, part.contiguous(), stride, padding, dilation)
        return grad.flatten(1)
