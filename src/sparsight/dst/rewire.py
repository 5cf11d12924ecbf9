"""From scores to a new topology with exactly the right number of weights. Pure: nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from sparsight.dst import chance
from sparsight.dst.view import LayerView
from sparsight.kernels import native
from sparsight.topology import Topology

ScoreBlocks = Iterator[tuple[Tensor, Tensor]]
"""Pieces of a grow score: (flat positions, their scores), in the order of the positions."""


@dataclass(frozen=True)
class Quota:
    """How many weights of a layer stay and how many positions are grown."""

    keep: int
    grow: int

    @property
    def total(self) -> int:
        return self.keep + self.grow


@dataclass(frozen=True)
class Rewiring:
    """A new topology and where each of its weights comes from."""

    before: Topology
    after: Topology
    source: Tensor
    """For each weight of `after`: its index among the weights of `before`, or −1 where it is new."""

    @property
    def grown(self) -> int:
        return int((self.source < 0).sum())

    @property
    def dropped(self) -> int:
        return self.before.nnz - (self.after.nnz - self.grown)


class Structure(Protocol):
    """What shapes a topology may take: free, constant fan-in, N:M, blocks."""

    def feasible(self, shape: tuple[int, ...], wanted: int) -> int:
        """The nearest number of weights, at most `wanted`, that this structure can hold."""
        ...

    def keep(self, topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
        """Sorted positions of the `count` existing weights with the best scores."""
        ...

    def fill(self, before: Topology | None, kept: Tensor, blocks: ScoreBlocks, plan: Fill) -> Tensor:
        """Sorted positions: `kept`, completed with the best-scoring others to `plan.total`."""
        ...


@dataclass(frozen=True)
class Fill:
    """What a structure has to reach when it fills up a layer."""

    shape: tuple[int, ...]
    total: int
    seed: int


def best(scores: Tensor, count: int, positions: Tensor, seed: int) -> Tensor:
    """A mask of exactly `count` entries: the highest scores, ties settled by a hash of the position.

    >>> best(torch.tensor([1.0, 3.0, 3.0, 0.0]), 2, torch.arange(4), seed=0).tolist()
    [False, True, True, False]
    """
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
    """The `count` best positions outside `kept` (sorted), from scores that arrive block by block."""
    first = next(blocks, None)
    if first is None or count <= 0:
        return kept[:0]
    blocks = chain([first], blocks)
    scores = first[1]
    if native.available() and scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        finder = native.TopK(count, kept, seed)
        for positions, block in blocks:
            finder.update(block.contiguous(), int(positions[0]))
        return finder.positions().sort().values
    return best_of_blocks_in_torch(kept, blocks, count, seed)


def best_of_blocks_in_torch(kept: Tensor, blocks: ScoreBlocks, count: int, seed: int) -> Tensor:
    """The slow twin of the native search, for any device and type."""
    if count <= 0:
        return kept[:0]
    found, scores = kept[:0], None
    floor: Tensor | None = None
    for positions, block in blocks:
        first = int(positions[0])
        low, high = torch.searchsorted(kept, kept.new_tensor([first, first + positions.numel()])).tolist()
        free = torch.ones_like(positions, dtype=torch.bool)
        free[kept[low:high] - first] = False
        if floor is not None:
            free &= block >= floor  # anything lower is beaten already
        found = torch.cat([found, positions[free]])
        scores = block[free] if scores is None else torch.cat([scores, block[free]])
        if scores.numel() > count:
            chosen = best(scores, count, found, seed)
            found, scores = found[chosen], scores[chosen]
            floor = scores.min()
    return found


def _checked(score: Tensor, expected: int, what: str, view: LayerView) -> Tensor:
    score = score.detach().flatten()
    if score.numel() != expected:
        raise ValueError(
            f"layer '{view.name}': the {what} score must have {expected} numbers, got {score.numel()}"
        )
    if bad := int(score.isnan().sum()):
        raise ValueError(
            f"layer '{view.name}': {bad} of {expected} {what} scores are NaN; "
            "a weight or gradient of this layer is NaN"
        )
    return score


def rewire(
    view: LayerView,
    drop: Callable[[LayerView], Tensor],
    grow: Callable[[LayerView], Tensor] | None,
    quota: Quota,
    structure: Structure,
) -> Rewiring:
    """Keep the `quota.keep` best existing weights, then grow the `quota.grow` best other positions.

    A weight that falls out and scores best among the others is grown back at once; it then keeps its
    value, and `source` says so.
    """
    old = view.topology

    def scored() -> ScoreBlocks:
        assert grow is not None
        for block in view.blocks():
            span = block.span
            yield span, _checked(grow(block), span.numel(), "grow", view)

    if quota.keep:
        scores = _checked(drop(view), old.nnz, "drop", view)
        kept = structure.keep(old, scores, quota.keep, view.seed)
    else:
        kept = old.positions()[:0]
    if grow is not None and quota.grow:
        plan = Fill(old.shape, quota.total, view.seed)
        kept = structure.fill(old, kept, scored(), plan)
    after = Topology.from_positions(old.shape, kept)
    return Rewiring(old, after, after.indices_in(old))
