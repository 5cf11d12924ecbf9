"""The first topology: how many weights each layer starts and ends with, and which ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight import chance
from sparsight.dst.distributions import Distribution, total_budget
from sparsight.dst.method import Method, counts_by_ranking
from sparsight.dst.rewire import Fill, Structure
from sparsight.kernels.index import topology_of
from sparsight.topology import Topology


@dataclass(frozen=True)
class First:
    """A layer's first topology, and its numbers of weights where a ramp begins and where it ends."""

    topology: Topology
    start: int
    budget: int


def first_topologies(
    weights: Mapping[str, Tensor], density: float, spread: Distribution, method: Method, seed: int
) -> dict[str, First]:
    """For every layer, from the distribution and the method's initial scores (at random without)."""
    sizes = {name: tuple(weight.shape) for name, weight in weights.items()}
    scores = None if method.initial is None else method.initial(weights)
    if scores is not None and method.initial_scope == "global":
        budgets = counts_by_ranking(scores, total_budget(sizes, density))
    else:
        budgets = _counts(spread, sizes, density, method.structure)
    starts = budgets
    if method.initial_density is not None:
        starts = _counts(spread, sizes, max(method.initial_density, density), method.structure)
    begin = 0.0 if method.ramp is None else method.ramp(0)
    firsts = {}
    for name, weight in weights.items():
        count = budgets[name] + round((starts[name] - budgets[name]) * begin)
        own = None if scores is None else scores[name]
        topology = _topology(name, weight, count, method.structure, own, chance.mix(seed, name, "first"))
        firsts[name] = First(topology, starts[name], budgets[name])
    return firsts


def _counts(
    spread: Distribution, sizes: Mapping[str, tuple[int, ...]], density: float, structure: Structure
) -> dict[str, int]:
    counts = spread(sizes, density)
    fitted = {}
    for name, wanted in counts.items():
        try:
            fitted[name] = structure.feasible(sizes[name], wanted)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from None
    return fitted


def _topology(
    name: str, weight: Tensor, count: int, structure: Structure, score: Tensor | None, seed: int
) -> Topology:
    shape = tuple(weight.shape)
    places = torch.arange(weight.numel(), device=weight.device)
    if score is None:
        score = chance.uniform(places, seed)
    if bad := int(score.isnan().sum()):
        raise ValueError(f"layer '{name}': {bad} of {score.numel()} initial scores are NaN")
    filled = structure.fill(None, places[:0], iter([(0, score)]), Fill(shape, count, seed))
    return topology_of(shape, filled)
