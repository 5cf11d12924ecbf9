"""The shapes a topology may take. Each one completes a set of kept weights by the best-scoring others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.chance import hashes
from sparsight.dst.rewire import Fill
from sparsight.kernels.index import ScoreBlocks, best, best_of_blocks, best_positions, merged, positions_of
from sparsight.topology import Topology, matrix_shape


def _whole(blocks: Iterable[tuple[int, Tensor]]) -> Tensor:
    return torch.cat([scores for _, scores in blocks])


def _best_existing(topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
    return best_positions(scores, count, positions_of(topology), seed)


def _best_per_group(scores: Tensor, taken: Tensor, count: int, seed: int) -> Tensor:
    """A mask over scores [groups, members] with `count` a group: `taken` first, then the best scores."""
    order = scores.masked_fill(taken, math.inf)
    if count >= order.shape[1]:
        return torch.ones_like(taken)
    values, index = order.topk(count + 1, dim=1)
    chosen = torch.zeros_like(taken).scatter_(1, index[:, :count], True)
    tied = (values[:, count - 1] == values[:, count]).nonzero().squeeze(1)
    if tied.numel():
        # As everywhere, ties go by the hash of the position: sort by hash, then stably by score.
        width = order.shape[1]
        places = tied[:, None] * width + torch.arange(width, device=order.device)
        by_hash = hashes(places, seed).argsort(dim=1)
        ranked = order[tied].gather(1, by_hash).argsort(dim=1, descending=True, stable=True)
        rows = torch.zeros_like(taken[tied])
        chosen[tied] = rows.scatter_(1, by_hash.gather(1, ranked[:, :count]), True)
    return chosen


@dataclass(frozen=True)
class Unstructured:
    """Any weight may exist."""

    def feasible(self, shape: tuple[int, ...], wanted: int) -> int:
        return wanted

    def keep(self, topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
        return _best_existing(topology, scores, count, seed)

    def fill(self, before: Topology | None, kept: Tensor, blocks: ScoreBlocks, plan: Fill) -> Tensor:
        grown = best_of_blocks(kept, blocks, plan.total - kept.numel(), plan.seed)
        return merged(kept, grown)


@dataclass(frozen=True)
class Block:
    """Whole blocks of (rows, cols) neighbouring weights; a block's score is the sum over its weights."""

    rows: int
    cols: int

    def feasible(self, shape: tuple[int, ...], wanted: int) -> int:
        out, fan_in = matrix_shape(shape)
        if out % self.rows or fan_in % self.cols:
            raise ValueError(f"blocks of {self.rows}x{self.cols} do not divide a weight of {out}x{fan_in}")
        area = self.rows * self.cols
        return max(wanted // area, 1) * area

    def _coarse(self, shape: tuple[int, ...]) -> tuple[int, int]:
        out, fan_in = matrix_shape(shape)
        return out // self.rows, fan_in // self.cols

    def _unit_of(self, positions: Tensor, shape: tuple[int, ...]) -> Tensor:
        fan_in = matrix_shape(shape)[1]
        row, col = positions // fan_in, positions % fan_in
        return (row // self.rows) * (fan_in // self.cols) + col // self.cols

    def _expand(self, units: Tensor, shape: tuple[int, ...]) -> Tensor:
        fan_in = matrix_shape(shape)[1]
        wide = fan_in // self.cols
        corner = (units // wide) * self.rows * fan_in + (units % wide) * self.cols
        down = torch.arange(self.rows, device=units.device) * fan_in
        across = torch.arange(self.cols, device=units.device)
        offsets = (down[:, None] + across).flatten()
        return (corner[:, None] + offsets).flatten().sort().values

    def keep(self, topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
        area = self.rows * self.cols
        units, which = self._unit_of(topology.positions(), topology.shape).unique(return_inverse=True)
        pooled = torch.zeros(units.numel(), dtype=scores.dtype, device=scores.device)
        pooled.index_add_(0, which, scores)
        return self._expand(units[best(pooled, count // area, units, seed)], topology.shape)

    def fill(self, before: Topology | None, kept: Tensor, blocks: ScoreBlocks, plan: Fill) -> Tensor:
        out, wide = self._coarse(plan.shape)
        pooled = _whole(blocks).view(out, self.rows, wide, self.cols).sum((1, 3)).flatten()
        taken = self._unit_of(kept, plan.shape).unique()
        wanted = plan.total // (self.rows * self.cols) - taken.numel()
        grown = best_of_blocks(taken, iter([(0, pooled)]), wanted, plan.seed)
        return self._expand(torch.cat([taken, grown]), plan.shape)


@dataclass(frozen=True)
class NM:
    """At most N of any M neighbouring inputs; for a convolution, neighbouring input channels."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(f"N:M needs 0 < N <= M, got {self.n}:{self.m}")

    def feasible(self, shape: tuple[int, ...], wanted: int) -> int:
        if len(shape) < 2 or shape[1] % self.m:
            raise ValueError(
                f"{self.n}:{self.m} needs a fan-in that {self.m} divides, "
                f"got {shape[1] if len(shape) > 1 else 1} in a weight of shape {shape}"
            )
        return math.prod(shape) // self.m * self.n

    def keep(self, topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
        return _best_existing(topology, scores, count, seed)

    def _grouped(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """[size] → [groups, M], where a group is M input channels at one kernel position."""
        out, channels = shape[:2]
        split = flat.view(out, channels // self.m, self.m, -1).transpose(2, 3)
        return split.reshape(-1, self.m)

    def fill(self, before: Topology | None, kept: Tensor, blocks: ScoreBlocks, plan: Fill) -> Tensor:
        shape = plan.shape
        scores = _whole(blocks)
        taken = torch.zeros_like(scores, dtype=torch.bool)
        taken[kept] = True
        chosen = _best_per_group(self._grouped(scores, shape), self._grouped(taken, shape), self.n, plan.seed)
        out, channels = shape[:2]
        kernel = math.prod(shape[2:])
        back = chosen.view(out, channels // self.m, kernel, self.m).transpose(2, 3)
        return back.reshape(-1).nonzero().squeeze(1)


@dataclass(frozen=True)
class ConstantFanIn:
    """Every living neuron has the same number of weights (SRigL).

    A neuron is ablated for good when fewer than `saliency` of its weights are salient, and the others
    share what it had. Salient: kept by magnitude, or among the best of the whole layer to be grown. The
    layer then holds the largest multiple of its living neurons that its budget allows.
    """

    saliency: float = 0.0

    def feasible(self, shape: tuple[int, ...], wanted: int) -> int:
        rows = matrix_shape(shape)[0]
        return max(wanted // rows, 1) * rows

    def keep(self, topology: Topology, scores: Tensor, count: int, seed: int) -> Tensor:
        return _best_existing(topology, scores, count, seed)

    def fill(self, before: Topology | None, kept: Tensor, blocks: ScoreBlocks, plan: Fill) -> Tensor:
        rows, fan_in = matrix_shape(plan.shape)
        scores = _whole(blocks)
        alive = torch.ones(rows, dtype=torch.bool, device=kept.device)
        if before is not None and before.nnz:
            alive = before.crow.diff() > 0
            promising = best_of_blocks(kept, iter([(0, scores)]), plan.total - kept.numel(), plan.seed)
            salient = torch.bincount(torch.cat([kept, promising]) // fan_in, minlength=rows)
            alive = self._survivors(alive, salient, plan.total, fan_in)
        width = min(plan.total // int(alive.sum()), fan_in)
        taken = torch.zeros(rows * fan_in, dtype=torch.bool, device=kept.device)
        taken[kept] = True
        chosen = _best_per_group(scores.view(rows, fan_in), taken.view(rows, fan_in), width, plan.seed)
        return (chosen & alive[:, None]).flatten().nonzero().squeeze(1)

    def _survivors(self, alive: Tensor, salient: Tensor, total: int, fan_in: int) -> Tensor:
        width = total // int(alive.sum())
        enough = alive & (salient >= self.saliency * width)
        fewest = max(-(-total // fan_in), 1)  # fewer neurons could not hold the budget
        if int(enough.sum()) >= fewest:
            return enough
        order = torch.where(alive, salient, torch.full_like(salient, -1))
        return torch.zeros_like(alive).index_fill_(0, order.topk(fewest).indices, True)
