"""What a rewiring does to sorted positions: in C++ where it can be, in plain torch otherwise.

Every fast path stands beside its slow twin (`..._in_torch`), and a test says they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from sparsight import chance
from sparsight.kernels import native, native_index
from sparsight.topology import Topology

ScoreBlocks = Iterator[tuple[int, Tensor]]
"""Pieces of a score: (first flat position, scores from there on), in the order of the positions."""


def _fast(*tensors: Tensor) -> bool:
    return native.available() and all(tensor.device.type == "cpu" for tensor in tensors)


def _scores_fit(scores: Tensor) -> bool:
    return _fast(scores) and scores.dtype in (torch.float32, torch.float64)


def best(scores: Tensor, count: int, positions: Tensor, seed: int) -> Tensor:
    """A mask of exactly `count` entries: the highest scores, ties settled by a hash of the position.

    >>> best(torch.tensor([1.0, 3.0, 3.0, 0.0]), 2, torch.arange(4), seed=0).tolist()
    [False, True, True, False]
    """
    if _scores_fit(scores):
        return native_index.best(scores.contiguous(), count, positions.contiguous(), seed)
    return best_in_torch(scores, count, positions, seed)


def best_positions(scores: Tensor, count: int, positions: Tensor, seed: int) -> Tensor:
    """The positions that `best` would choose, in their order."""
    mask = best(scores, count, positions, seed)
    if _fast(mask, positions):
        return native_index.chosen(positions.contiguous(), mask, min(max(count, 0), mask.numel()))
    return positions[mask]


def best_in_torch(scores: Tensor, count: int, positions: Tensor, seed: int) -> Tensor:
    """The slow twin of `best`, for any device and type."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= scores.numel():
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.topk(count, sorted=False).values.min()
    chosen = scores > threshold
    short = count - int(chosen.sum())
    tied = (scores == threshold).nonzero().squeeze(1)
    if short < tied.numel():
        # The hash is a bijection of the position, so no tie is left.
        tied = tied[chance.hashes(positions[tied], seed).topk(short, largest=False).indices]
    chosen[tied] = True
    return chosen


def best_of_blocks(kept: Tensor, blocks: ScoreBlocks, count: int, seed: int) -> Tensor:
    """Sorted: the `count` best positions outside `kept` (sorted), from scores that come block by block."""
    first = next(blocks, None)
    if first is None or count <= 0:
        return kept[:0]
    blocks = chain([first], blocks)
    if not _scores_fit(first[1]):
        return best_of_blocks_in_torch(kept, blocks, count, seed)
    finder = native_index.TopK(count, kept, seed)
    for start, block in blocks:
        finder.update(block.contiguous(), start)
    return finder.positions()


def best_of_blocks_in_torch(kept: Tensor, blocks: ScoreBlocks, count: int, seed: int) -> Tensor:
    """The slow twin of `best_of_blocks`, for any device and type."""
    if count <= 0:
        return kept[:0]
    found, scores = kept[:0], None
    floor: Tensor | None = None
    for first, block in blocks:
        positions = torch.arange(first, first + block.numel(), device=kept.device)
        low, high = torch.searchsorted(kept, kept.new_tensor([first, first + positions.numel()])).tolist()
        free = torch.ones_like(positions, dtype=torch.bool)
        free[kept[low:high] - first] = False
        if floor is not None:
            free &= block >= floor  # anything lower is beaten already
        found = torch.cat([found, positions[free]])
        scores = block[free] if scores is None else torch.cat([scores, block[free]])
        if scores.numel() > count:
            chosen = best_in_torch(scores, count, found, seed)
            found, scores = found[chosen], scores[chosen]
            floor = scores.min()
    return found


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Two sorted vectors of different positions as one."""
    if _fast(one, other):
        return native_index.merge(one.contiguous(), other.contiguous())
    return torch.cat([one, other]).sort().values


def positions_of(topology: Topology) -> Tensor:
    """`topology.positions()`, its slow twin, in one pass."""
    if _fast(topology.crow):
        return native_index.positions_of(topology.shape, topology.crow, topology.col)
    return topology.positions()


def moved(before: Tensor, source: Tensor) -> Tensor:
    """What each of `source` (an index into `before`, or −1) points at; zero for −1.

    >>> moved(torch.tensor([5.0, 6.0]), torch.tensor([1, -1, 0])).tolist()
    [6.0, 0.0, 5.0]
    """
    if _fast(before, source) and before.dtype in (torch.float32, torch.float64):
        return native_index.moved(before.contiguous(), source.contiguous())
    return moved_in_torch(before, source)


def moved_in_torch(before: Tensor, source: Tensor) -> Tensor:
    """The slow twin of `moved`."""
    if before.numel() == 0:
        return before.new_zeros(source.shape)
    return before[source.clamp(min=0)].masked_fill_(source < 0, 0)


def topology_of(shape: tuple[int, ...], positions: Tensor) -> Topology:
    """The topology of sorted positions."""
    if _fast(positions):
        return Topology.trusted(shape, *native_index.csr_of(shape, positions.contiguous()))
    return Topology.from_positions(shape, positions)


def indices_in(before: Tensor, after: Tensor) -> Tensor:
    """For each sorted position of `after`, its index in `before` (sorted too); −1 where it is new."""
    if _fast(before, after):
        return native_index.indices_in(before.contiguous(), after.contiguous())
    return indices_in_torch(before, after)


def indices_in_torch(before: Tensor, after: Tensor) -> Tensor:
    """The slow twin of `indices_in`."""
    if before.numel() == 0:
        return torch.full_like(after, -1)
    index = torch.searchsorted(before, after).clamp_(max=before.numel() - 1)
    return torch.where(before[index] == after, index, -1)


def uniform(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """A number in [0, 1) for each of the positions first, first + 1, …; the twin is `chance.uniform`."""
    if native.available() and device.type == "cpu":
        return native_index.uniform(first, count, seed)
    return chance.uniform(torch.arange(first, first + count, device=device), seed)


def set_bits(positions: Tensor, bits: Tensor) -> None:
    """Set the bit of each sorted position in a vector of bytes, in place."""
    if _fast(positions, bits):
        native_index.set_bits(positions.contiguous(), bits)
    else:
        set_bits_in_torch(positions, bits)


def set_bits_in_torch(positions: Tensor, bits: Tensor) -> None:
    """The slow twin of `set_bits`."""
    unpacked = bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    unpacked.view(-1)[positions] = 1
    bits.copy_((unpacked << torch.arange(8, dtype=torch.uint8)).sum(1))
