"""A method is a sentence: drop by this, grow by that, this much, at these steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsight.dst import criteria
from sparsight.dst.criteria import Score
from sparsight.dst.distributions import apportion
from sparsight.dst.rewire import Quota, Structure
from sparsight.dst.schedules import Schedule, constant, never
from sparsight.dst.structures import Unstructured
from sparsight.dst.view import LayerView
from sparsight.kernels.index import best

Share = Callable[[Mapping[str, LayerView], Mapping[str, int], float, Score], dict[str, Quota]]
"""(views, scheduled totals, drop fraction, drop score) -> how much each layer keeps and grows."""

InitialScores = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Weights by name -> one score per position, for the first topology."""


_NOTHING = constant(0.0)
_FREE = Unstructured()


@dataclass(frozen=True)
class Latent:
    """Weights outside the forward set that live on and learn (Top-KAST, N:M).

    `backward` is the density of the set that gradients reach (None: every weight). `inside` and `outside`
    are weight decays of the forward set and of the rest; with `over_density` the latter is divided by the
    density of the forward set.
    """

    backward: float | None = None
    inside: float = 0.0
    outside: float = 0.0
    over_density: bool = False

    def decays(self, density: float) -> tuple[float, float]:
        """Of the forward set and of the rest."""
        return self.inside, self.outside / density if self.over_density else self.outside


@dataclass(frozen=True)
class DenseMomentum:
    """A running mean of the dense gradient, for SNFS; with `second`, divided by the root of its square's."""

    beta: float = 0.9
    second: float | None = None


def quota_for(nnz: int, total: int, fraction: float) -> Quota:
    """Swap int(fraction · total) weights on the way from `nnz` to `total`."""
    keep = min(nnz, total - int(fraction * total))
    return Quota(keep, total - keep)


def by_layer(
    views: Mapping[str, LayerView], totals: Mapping[str, int], fraction: float, drop: Score
) -> dict[str, Quota]:
    """Every layer keeps its own budget."""
    return {n: quota_for(v.topology.nnz, totals[n], fraction) for n, v in views.items()}


def counts_by_ranking(scores: Mapping[str, Tensor], total: int) -> dict[str, int]:
    """How many of the `total` best scores of all layers together each layer has; each at least its best."""
    ranked = []
    for own in scores.values():
        own = own.detach().double().cpu().clone()
        own[own.argmax()] = math.inf  # no layer is left empty
        ranked.append(own)
    everything = torch.cat(ranked)
    chosen = best(everything, total, torch.arange(everything.numel()), seed=0)
    parts = chosen.split([own.numel() for own in ranked])
    return {name: int(part.sum()) for name, part in zip(scores, parts, strict=True)}


def by_global_score(
    views: Mapping[str, LayerView], totals: Mapping[str, int], fraction: float, drop: Score
) -> dict[str, Quota]:
    """The layers compete: one ranking of all existing weights decides how many each one holds."""
    counts = counts_by_ranking({n: drop(view) for n, view in views.items()}, sum(totals.values()))
    return {n: quota_for(view.topology.nnz, counts[n], fraction) for n, view in views.items()}


def by_mean_momentum(
    views: Mapping[str, LayerView], totals: Mapping[str, int], fraction: float, drop: Score
) -> dict[str, Quota]:
    """SNFS: what all layers drop is grown in proportion to the mean |momentum| of their weights."""
    kept = {n: quota_for(v.topology.nnz, totals[n], fraction).keep for n, v in views.items()}
    free = sum(totals[name] for name in views) - sum(kept.values())
    means = {
        name: float(criteria.momentum(view)[view.topology.positions()].mean()) for name, view in views.items()
    }
    weight = sum(means.values())
    if not math.isfinite(weight) or weight <= 0:
        return by_layer(views, totals, fraction, drop)
    caps = {name: view.topology.size for name, view in views.items()}
    # A layer that is full passes its share on: fill the fullest first and divide the rest again.
    grown: dict[str, float] = {}
    left, rest = float(free), weight
    for name in sorted(views, key=lambda n: (caps[n] - kept[n]) / max(means[n], 1e-300)):
        grown[name] = min(left * means[name] / rest if rest > 0 else 0.0, caps[name] - kept[name])
        left, rest = left - grown[name], rest - means[name]
    totals_now = apportion(
        {name: kept[name] + grown[name] for name in views}, sum(kept.values()) + free, caps
    )
    keep = {name: min(kept[name], totals_now[name]) for name in views}
    return {name: Quota(keep[name], totals_now[name] - keep[name]) for name in views}


@dataclass(frozen=True)
class Method:
    """The parts of a way to train sparse. Make one with an alias (`rigl(...)`) or from parts.

    >>> from sparsight.dst.schedules import constant, every
    >>> mine = Method("mine", grow=criteria.random, fraction=constant(0.1), due=every(50))
    """

    name: str
    drop: Score = criteria.magnitude
    grow: Score | None = None
    fraction: Schedule = _NOTHING
    due: Callable[[int], bool] = never
    replaces_step: bool = False
    """Whether an update takes the place of the weight step (RigL) or follows it (SET)."""
    gradient: Literal["never", "due", "always"] = "never"
    """When the dense gradient is collected."""
    structure: Structure = _FREE
    share: Share = by_layer
    initial: InitialScores | None = None
    """Scores of the first topology; at random when None."""
    initial_scope: Literal["layer", "global"] = "layer"
    initial_density: float | None = None
    """Where the density starts, when that is not where it ends."""
    ramp: Schedule | None = None
    """1 at the initial density, 0 at the final one."""
    density: float | None = None
    """The density this method imposes (N:M)."""
    latent: Latent | None = None
    momentum: DenseMomentum | None = None
    grow_std: float = 0.0
    """Standard deviation of a grown weight; 0: it starts at zero."""
    steps: int | None = None
    """The length of the training, where the method knows it."""

    def __post_init__(self) -> None:
        if self.momentum is not None and self.gradient != "always":
            raise ValueError(
                f"method '{self.name}': a momentum of the dense gradient needs gradient='always', "
                f"got '{self.gradient}'"
            )
