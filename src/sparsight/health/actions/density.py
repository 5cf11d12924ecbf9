"""Actions on how many weights there are: more, fewer, or more for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from sparsight import chance
from sparsight.dst.layer import Layer
from sparsight.dst.schedules import cubic
from sparsight.dst.schedules import every as each
from sparsight.dst.sparsifier import Sparsifier
from sparsight.health.actions.copying import move_to
from sparsight.health.actions.core import Done, RefusedError, Run, positive, undo_all
from sparsight.health.actions.topology import free_layers, moved, seed_of, shuffled
from sparsight.topology import Topology


@dataclass(frozen=True)
class Density:
    """Have `times` as many weights in a layer, or in all of them. New ones go to outputs without any first,
    then anywhere, and begin as a layer's weights do; where there are fewer, the smallest go."""

    where: str = ""
    times: float = 2.0
    setting: ClassVar[bool] = False

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        positive("Density: times", self.times)
        sparsifier, layers = free_layers(run, self.where, "Density", resizes=True)
        wanted = [
            min(layer.topology.size, max(1, round(self.times * layer.topology.nnz))) for layer in layers
        ]
        pairs = [(x, count) for x, count in zip(layers, wanted, strict=True) if count != x.topology.nnz]
        if not pairs:
            raise RefusedError(
                f"Density: times {self.times:g} changes no count of {self.where or 'any layer'}"
            )
        before = sparsifier.density
        undo = [moved(run, sparsifier, x, resized(x, count, seed_of(run, x))) for x, count in pairs]
        message = f"density of {self.where or 'the model'} times {self.times:g}: {before:.4g} to "
        return Done(f"{message}{sparsifier.density:.4g}", lambda: undo_all(undo))


def resized(layer: Layer, count: int, seed: int) -> Topology:
    """A topology with `count` weights: the present ones and others, or the largest of the present ones."""
    old = layer.topology
    positions = old.positions()
    if count <= old.nnz:
        kept = layer.weight.values().abs().topk(count).indices.sort().values
        return Topology.from_positions(old.shape, positions[kept])
    score = chance.uniform(torch.arange(old.size, device=positions.device), seed)
    empty = (old.crow.diff() == 0).nonzero().squeeze(1)
    if empty.numel():
        first = shuffled(empty, old.fan_in, 1, seed)[:, 0]
        score[empty * old.fan_in + first] += 1
    score[positions] = 3.0
    return Topology.from_positions(old.shape, score.topk(count).indices.sort().values)


@dataclass(frozen=True)
class WarmUp:
    """Denser first, then sparse again: go to `density` now, and back on a cubic within `steps` steps."""

    density: float = 0.5
    steps: int = 200
    where: str = ""
    setting: ClassVar[bool] = True

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        if not 0 < self.density <= 1 or self.steps < 2 or self.where:
            raise RefusedError(
                f"WarmUp: expected a density in (0, 1] and steps >= 2 for the whole model, got {self}"
            )
        sparsifier, layers = free_layers(run, "", "WarmUp", resizes=True)
        method = sparsifier.method
        if method.ramp is not None:
            raise RefusedError(f"WarmUp: '{method.name}' is on its own way from dense to sparse")
        begin, period = run.step, max(1, self.steps // 10)
        due = Either(method.due, each(period, start=begin + period, end=begin + self.steps))
        undo = []
        for layer in layers:
            budget, start = layer.budget, max(layer.target, round(self.density * layer.topology.size))
            if not run.restoring:
                undo.append(_cut_back(sparsifier, layer, run))
                moved(run, sparsifier, layer, resized(layer, start, seed_of(run, layer)))
            layer.start, layer.budget = start, budget
        ramp = cubic(1.0, begin=begin, end=begin + self.steps)
        sparsifier.method = replace(method, due=due, ramp=ramp)

        def back() -> None:
            sparsifier.method = method
            for one in undo:
                one()

        return Done(f"density {self.density:g}, and back within {self.steps} steps", back)


@dataclass(frozen=True)
class Either:
    """Due where one of the two is."""

    one: Callable[[int], bool]
    other: Callable[[int], bool]

    def __call__(self, step: int) -> bool:
        return self.one(step) or self.other(step)


def _cut_back(sparsifier: Sparsifier, layer: Layer, run: Run) -> Callable[[], None]:
    count, budget = layer.target, layer.budget

    def back() -> None:
        with torch.no_grad():
            move_to(sparsifier, layer, resized(layer, min(count, layer.topology.nnz), 0))
        layer.budget = layer.start = budget

    return back
