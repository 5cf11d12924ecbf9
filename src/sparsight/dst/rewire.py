"""From scores to a new topology with exactly the right number of weights. Pure: nothing is changed here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sparsight.dst.view import LayerView
from sparsight.kernels.index import ScoreBlocks, indices_in, positions_of, topology_of
from sparsight.topology import Topology


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


def _checked(score: Tensor, expected: int, what: str, view: LayerView) -> Tensor:
    score = score.detach().flatten()
    if score.numel() != expected:
        raise ValueError(
            f"layer '{view.name}': the {what} score must have {expected} numbers, got {score.numel()}"
        )
    # One NaN makes the sum NaN; infinities of both signs do too, so count before complaining.
    if math.isnan(float(score.sum())) and (bad := int(score.isnan().sum())):
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
            yield block.first, _checked(grow(block), block.size, "grow", view)

    if quota.keep:
        scores = _checked(drop(view), old.nnz, "drop", view)
        kept = structure.keep(old, scores, quota.keep, view.seed)
    else:
        kept = positions_of(old)[:0]
    if grow is not None and quota.grow:
        plan = Fill(old.shape, quota.total, view.seed)
        kept = structure.fill(old, kept, scored(), plan)
    after = topology_of(old.shape, kept)
    return Rewiring(old, after, indices_in(positions_of(old), kept))
