"""What a rewiring does to positions and values, in C++: one pass each. kernels/index.py is the only caller.

The slow twins are there too, and everything is checked there or here before an address crosses.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsight.kernels.native import at, check, entry, library

_MASK64 = (1 << 64) - 1


class TopK:
    """The k positions with the best scores outside a kept set, from a vector that comes in pieces.

    Equal scores are ordered by the hash of their position, smallest first, so the answer does not depend on
    how the vector was cut. `kept` is sorted.
    """

    __slots__ = ("native",)

    def __init__(self, k: int, kept: Tensor, seed: int) -> None:
        if kept.dtype != torch.int64 or not kept.is_contiguous() or kept.device.type != "cpu":
            raise ValueError(f"kept must be contiguous int64 on the CPU, got {kept.dtype} on {kept.device}")
        self.native = library().TopK(k, kept.data_ptr(), kept.numel(), seed & _MASK64)

    def update(self, scores: Tensor, first: int) -> None:
        """Take the scores of the positions first, first + 1, …"""
        check("scores", scores, (scores.numel(),), scores)
        update = self.native.update_f32 if scores.dtype == torch.float32 else self.native.update_f64
        update(scores.data_ptr(), first, scores.numel())

    def positions(self) -> Tensor:
        """The best positions, sorted."""
        positions = torch.empty(self.native.finish(), dtype=torch.int64)
        self.native.copy(positions.data_ptr())
        return positions


def best(scores: Tensor, count: int, positions: Tensor, seed: int) -> Tensor:
    """A mask of the `count` best scores, ties by the hash of their position."""
    check("scores", scores, (positions.numel(),), scores)
    mask = torch.empty(scores.numel(), dtype=torch.bool)
    find = entry("best", scores.dtype)
    find(at(scores), at(positions), scores.numel(), count, seed & _MASK64, at(mask))
    return mask


def chosen(positions: Tensor, mask: Tensor, count: int) -> Tensor:
    """The positions whose mask is true; `count` says how many there are."""
    out = positions.new_empty(count)
    library().chosen(at(positions), at(mask), positions.numel(), count, at(out))
    return out


def moved(before: Tensor, source: Tensor) -> Tensor:
    """before[source], zero where the source is negative."""
    after = torch.empty(source.numel(), dtype=before.dtype)
    run = entry("moved", before.dtype)
    if not run(at(before), before.numel(), at(source), source.numel(), at(after)):
        raise IndexError(f"a source of {int(source.max())} lies outside {before.numel()} weights")
    return after


def merge(one: Tensor, other: Tensor) -> Tensor:
    """Two sorted vectors of int64 as one."""
    out = one.new_empty(one.numel() + other.numel())
    library().merge(at(one), one.numel(), at(other), other.numel(), at(out))
    return out


def csr_of(shape: tuple[int, ...], positions: Tensor) -> tuple[Tensor, Tensor]:
    """crow and col of sorted positions in a weight of this shape."""
    rows, fan_in = shape[0], math.prod(shape[1:])
    if positions.numel() and not 0 <= int(positions[0]) <= int(positions[-1]) < rows * fan_in:
        raise ValueError(f"positions must lie in [0, {rows * fan_in}) for a weight of shape {shape}")
    crow = torch.empty(rows + 1, dtype=torch.int32)
    col = torch.empty(positions.numel(), dtype=torch.int32)
    library().csr_of(at(positions), positions.numel(), rows, fan_in, at(crow), at(col))
    return crow, col


def positions_of(shape: tuple[int, ...], crow: Tensor, col: Tensor) -> Tensor:
    """The sorted positions of a checked CSR."""
    positions = torch.empty(col.numel(), dtype=torch.int64)
    library().positions_of(at(crow), at(col), shape[0], math.prod(shape[1:]), at(positions))
    return positions


def indices_in(before: Tensor, after: Tensor) -> Tensor:
    """For each of `after` its index in `before`, or −1; both sorted int64."""
    out = torch.empty_like(after)
    library().indices_in(at(before), before.numel(), at(after), after.numel(), at(out))
    return out


def uniform(first: int, count: int, seed: int) -> Tensor:
    """A number in [0, 1) for each of the positions first, first + 1, …, float64."""
    out = torch.empty(count, dtype=torch.float64)
    library().uniform(first, count, seed & _MASK64, at(out))
    return out


def set_bits(positions: Tensor, bits: Tensor) -> None:
    """Set the bit of each position in a vector of bytes."""
    if positions.numel() and int(positions[-1]) >= 8 * bits.numel():
        raise ValueError(f"position {int(positions[-1])} lies outside {8 * bits.numel()} bits")
    library().set_bits(at(positions), positions.numel(), at(bits))
