"""Collecting what a dense gradient is made of, on the steps that need it.

The gradient of a linear weight is dYᵀX. A tap keeps the pairs (X, dY) of the backward passes, and blocks of
rows of the gradient are computed from them when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK = 1 << 18
"""Positions in a block: about a megabyte of float32."""


class Tap:
    """The pairs (X, dY) of one weight since the step began."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._arriving: list[tuple[Tensor, Tensor]] = []

    def collect(self, x: Tensor, dy: Tensor) -> None:
        """Called by a backward pass. Compiled code reuses its buffers, hence the copies."""
        self._arriving.append((x.detach().clone(), dy.detach().clone()))

    def settle(self, *, anew: bool) -> None:
        """A backward pass has reached the parameter: what arrived joins the step, or begins a new one."""
        self.pairs = self._arriving if anew else self.pairs + self._arriving
        self._arriving = []

    def blocks(self, size: int = _BLOCK) -> Iterator[tuple[int, Tensor]]:
        """The dense gradient as (first row, block of rows), never more than a block of it at once."""
        if not self.pairs:
            return
        x = torch.cat([x for x, _ in self.pairs])
        dy = torch.cat([dy for _, dy in self.pairs])
        rows = max(size // max(x.shape[1], 1), 1)
        for first in range(0, dy.shape[1], rows):
            yield first, dy[:, first : first + rows].T @ x
