"""Actions on sparse weights: search again or otherwise, give dead neurons weights, have more or fewer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparsight import chance
from sparsight.dst.layer import Layer
from sparsight.dst.method import Method
from sparsight.dst.schedules import constant, cosine
from sparsight.dst.schedules import every as each
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dst.structures import Unstructured
from sparsight.health.actions.copying import move_to
from sparsight.health.actions.core import Done, RefusedError, Run, positive, several_processes, undo_all
from sparsight.nn.compressed import CompressedWeight
from sparsight.topology import Topology


@dataclass(frozen=True)
class Search:
    """Change how connections are searched for, from here on: `fraction` of the weights swapped at first, on a
    cosine to `end` (a share of the training), `every` so many steps. What is None stays."""

    fraction: float | None = None
    every: int | None = None
    end: float | None = None
    where: str = ""
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        sparsifier, _ = run.sparse()
        before = sparsifier.method
        after = self._method(before, run.step)
        sparsifier.method = after

        def undo() -> None:
            sparsifier.method = before

        last = getattr(after.due, "end", None)
        until = f"until step {last}" if last is not None else "without end"
        fraction = after.fraction(run.step)
        return Done(f"{before.name}: swaps {fraction:.2g} of the weights, {until}", undo)

    def _method(self, method: Method, step: int) -> Method:
        if self.where:
            raise RefusedError(f"Search: the method is that of the whole model, got where='{self.where}'")
        if method.grow is None or method.latent is not None:
            raise RefusedError(f"Search: '{method.name}' does not search for connections by swapping them")
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise RefusedError(f"Search: fraction must lie in [0, 1], got {self.fraction}")
        if self.end is not None and (method.steps is None or not 0 < self.end <= 1):
            known = f"{method.steps} steps" if method.steps else "a training of unknown length"
            raise RefusedError(f"Search: end must be a share in (0, 1] of {known}, got {self.end}")
        held = method.due if isinstance(method.due, each) else None
        period = self.every or (None if held is None else held.period)
        if period is None or period < 1:
            raise RefusedError(f"Search: every must be a number of steps >= 1, got {self.every}")
        last = held.end if held is not None else None
        if self.end is not None and method.steps is not None:
            last = int(self.end * method.steps)
        if last is not None and last <= step:
            raise RefusedError(f"Search: an end at step {last} lies before this one, {step}")
        period = period if last is None else min(period, last - step)
        fraction = method.fraction
        if self.fraction is not None:
            fraction = (
                constant(self.fraction) if last is None else cosine(self.fraction, begin=step, end=last)
            )
        elif last is not None and isinstance(fraction, cosine):
            fraction = replace(fraction, end=last)
        return replace(method, fraction=fraction, due=each(period, start=step + period, end=last))


@dataclass(frozen=True)
class Regrow:
    """Give every output of a layer that has no weight some of the others', `share` of what an output has on
    average. The smallest weights move; no living output loses its last; the count stays exact."""

    where: str = ""
    share: float = 0.5
    setting: ClassVar[bool] = False

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        positive("Regrow: share", self.share)
        sparsifier, layers = free_layers(run, self.where, "Regrow")
        plans = [(layer, after) for layer in layers if (after := self._plan(layer, run)) is not None]
        if not plans:
            raise RefusedError(
                f"Regrow: no output of {self.where or 'any layer'} is dead and can be given a weight"
            )
        said, undo = [], []
        for layer, after in plans:
            rows = int((layer.topology.crow.diff() == 0).sum() - (after.crow.diff() == 0).sum())
            said.append(f"{rows} outputs of {layer.name}")
            undo.append(moved(run, sparsifier, layer, after))
        return Done(f"gave weights to {', '.join(said)}", lambda: undo_all(undo))

    def _plan(self, layer: Layer, run: Run) -> Topology | None:
        old = layer.topology
        counts = old.crow.diff().long()
        dead = (counts == 0).nonzero().squeeze(1)
        size = layer.weight.values().abs()
        # The largest of each row is not to be had: sort by row, then by size, and spare each row's last.
        row = old.row_of_each()
        order = size.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        ends = counts.cumsum(0)[counts > 0] - 1
        spare = torch.ones(old.nnz, dtype=torch.bool, device=size.device)
        spare[order[ends]] = False
        free = spare.nonzero().squeeze(1)
        each_gets = min(max(1, round(self.share * old.nnz / old.rows)), old.fan_in)
        need = min(dead.numel() * each_gets, free.numel())
        if need == 0:
            return None
        given = free[size[free].topk(need, largest=False).indices]
        keep = torch.ones(old.nnz, dtype=torch.bool, device=size.device)
        keep[given] = False
        column = shuffled(dead, old.fan_in, each_gets, seed_of(run, layer))
        new = (dead * old.fan_in + column.t()).reshape(-1)[:need]  # one for each row before two for any
        positions = torch.cat((old.positions()[keep], new)).sort().values
        return Topology.from_positions(old.shape, positions)


def shuffled(rows: Tensor, fan_in: int, count: int, seed: int) -> Tensor:
    """[rows, count] distinct columns for each row, by the hash of their position."""
    places = rows[:, None] * fan_in + torch.arange(fan_in, device=rows.device)
    return chance.uniform(places, seed).topk(count, dim=1).indices


def free_layers(run: Run, where: str, what: str, resizes: bool = False) -> tuple[Sparsifier, list[Layer]]:
    """Layers whose topology may take any shape."""
    sparsifier, layers = run.sparse(where)
    method = sparsifier.method
    if not isinstance(method.structure, Unstructured) or method.latent is not None:
        raise RefusedError(f"{what}: '{method.name}' has its own rules for which weights may exist")
    if resizes and several_processes() and any(isinstance(x.weight, CompressedWeight) for x in layers):
        raise RefusedError(
            f"{what}: a compressed layer would change its length, which DistributedDataParallel's buckets "
            "do not follow; use storage='masked'"
        )
    return sparsifier, layers


def moved(run: Run, sparsifier: Sparsifier, layer: Layer, after: Topology) -> Callable[[], None]:
    """Move a layer, new weights drawn as torch's Linear draws them; returns the way back."""
    before = layer.topology
    spread = 1 / math.sqrt(3 * max(1.0, after.nnz / after.rows))
    drawn = spread * chance.normal(after.nnz, chance.mix(seed_of(run, layer), "values"))
    move_to(sparsifier, layer, after, drawn)
    return lambda: move_to(sparsifier, layer, before)


def seed_of(run: Run, layer: Layer) -> int:
    """For what is drawn for one layer at one step."""
    return chance.mix(run.seed, layer.name, run.step)
