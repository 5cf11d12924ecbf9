"""Which weights of a layer exist: a CSR over the weight seen as (out, fan_in).

A Topology never changes; a rewiring makes a new one. Columns are sorted, indices are int32, and a
malformed one is refused here so that no kernel has to look again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_INT32_MAX = 2**31 - 1


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The (out, fan_in) view of a weight: a convolution's kernel and input channels are one row."""
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True, eq=False)
class Topology:
    """The existing weights of one layer, in row-major order.

    >>> mask = torch.tensor([[True, False, True], [False, False, False]])
    >>> t = Topology.from_mask(mask)
    >>> t.nnz, t.density, t.crow.tolist(), t.col.tolist()
    (2, 0.3333333333333333, [0, 2, 2], [0, 2])
    """

    shape: tuple[int, ...]
    crow: Tensor
    col: Tensor

    def __post_init__(self) -> None:
        rows, fan_in = matrix_shape(self.shape)
        for name, index in (("crow", self.crow), ("col", self.col)):
            if index.dtype != torch.int32 or index.dim() != 1:
                raise ValueError(
                    f"Topology of shape {self.shape}: {name} must be a vector of int32, "
                    f"got {index.dtype} with {index.dim()} dimensions"
                )
        if self.crow.numel() != rows + 1:
            raise ValueError(
                f"Topology of shape {self.shape}: crow must have {rows + 1} entries "
                f"(rows + 1), got {self.crow.numel()}"
            )
        lengths = self.crow.diff()
        ends = (int(self.crow[0]), int(self.crow[-1]))
        if ends != (0, self.col.numel()) or bool((lengths < 0).any()):
            raise ValueError(
                f"Topology of shape {self.shape}: crow must rise from 0 to {self.col.numel()} "
                f"(the length of col), got {ends[0]} to {ends[1]}"
            )
        if self.col.numel() == 0:
            return
        low, high = int(self.col.min()), int(self.col.max())
        if low < 0 or high >= fan_in:
            raise ValueError(
                f"Topology of shape {self.shape}: columns must lie in [0, {fan_in}), got {low} to {high}"
            )
        if bool((self.positions().diff() <= 0).any()):
            raise ValueError(
                f"Topology of shape {self.shape}: columns must be sorted and distinct within a row"
            )

    @classmethod
    def trusted(cls, shape: tuple[int, ...], crow: Tensor, col: Tensor) -> Topology:
        """From an index that was just made and needs no checking."""
        topology = object.__new__(cls)
        for name, value in (("shape", tuple(shape)), ("crow", crow), ("col", col)):
            object.__setattr__(topology, name, value)
        return topology

    @classmethod
    def from_positions(cls, shape: tuple[int, ...], positions: Tensor) -> Topology:
        """From the sorted flat positions (row * fan_in + column) of the existing weights."""
        rows, fan_in = matrix_shape(shape)
        if positions.numel() > _INT32_MAX:
            raise ValueError(f"{positions.numel()} weights in one layer: more than int32 can index")
        row = torch.div(positions, max(fan_in, 1), rounding_mode="floor")
        crow = torch.zeros(rows + 1, dtype=torch.int32, device=positions.device)
        torch.cumsum(torch.bincount(row, minlength=rows), 0, out=crow[1:])
        return cls(tuple(shape), crow, (positions - row * fan_in).to(torch.int32))

    @classmethod
    def from_mask(cls, mask: Tensor) -> Topology:
        """From a boolean tensor of the weight's shape."""
        return cls.from_positions(tuple(mask.shape), mask.flatten().nonzero().squeeze(1))

    @classmethod
    def full(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Topology:
        """Every weight exists."""
        return cls.from_positions(shape, torch.arange(math.prod(shape), device=device))

    @property
    def rows(self) -> int:
        return matrix_shape(self.shape)[0]

    @property
    def fan_in(self) -> int:
        return matrix_shape(self.shape)[1]

    @property
    def size(self) -> int:
        """All positions, existing or not."""
        return math.prod(self.shape)

    @property
    def nnz(self) -> int:
        """How many weights exist."""
        return self.col.numel()

    @property
    def density(self) -> float:
        return self.nnz / self.size

    def row_of_each(self) -> Tensor:
        """The row of every existing weight, int64."""
        rows = torch.arange(self.rows, device=self.col.device)
        return rows.repeat_interleave(self.crow.diff(), output_size=self.nnz)

    def positions(self) -> Tensor:
        """Sorted flat positions of the existing weights, int64."""
        begins = torch.arange(self.rows, device=self.col.device) * self.fan_in
        return begins.repeat_interleave(self.crow.diff(), output_size=self.nnz).add_(self.col)

    def mask(self) -> Tensor:
        """True where a weight exists, in the weight's own shape."""
        flat = torch.zeros(self.size, dtype=torch.bool, device=self.col.device)
        flat[self.positions()] = True
        return flat.view(self.shape)

    def to(self, device: torch.device | str) -> Topology:
        if torch.device(device) == self.col.device:
            return self
        return Topology(self.shape, self.crow.to(device), self.col.to(device))

    def same_as(self, other: Topology) -> bool:
        """Whether both hold exactly the same weights."""
        return (
            self.shape == other.shape
            and torch.equal(self.crow, other.crow)
            and torch.equal(self.col, other.col)
        )
