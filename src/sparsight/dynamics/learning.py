"""Who learns: update frequency, gradient norms and signal-to-noise, effective learning rate, similarity.

The probes look at gradients after the optimizer's step, so at the ones it used (a fused optimizer under a
GradScaler has written them back unscaled), and at a sample of the weights before and after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from sparsight.dynamics.records import Record
from sparsight.dynamics.routes import Part, Route
from sparsight.dynamics.samples import Floats, Places, Samples, norms

BINS = 10

Rates = Mapping[int, float]


def learning_rates(optimizer: Optimizer) -> dict[int, float]:
    """The learning rate of each parameter, by its id."""
    return {id(p): float(group.get("lr", 1.0)) for group in optimizer.param_groups for p in group["params"]}


def _per_rate(moved: Floats, units: Sequence[Sequence[Part]], rates: Rates) -> Floats:
    """Mean |Δw| per unit of learning rate; NaN where the optimizer does not hold the unit."""
    of = [max((rates.get(id(part.param), 0.0) for part in unit), default=0.0) for unit in units]
    rate = np.array(of, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rate > 0, moved / rate, np.nan).astype(np.float32)


def _relative(values: Floats) -> Floats:
    """Values over their mean; NaN stays NaN."""
    known = values[np.isfinite(values)]
    mean = float(known.mean()) if len(known) else 0.0
    return values / mean if mean else values


def _learning(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.param.requires_grad)


class PathLearning:
    """The experts of one route, and its router."""

    def __init__(self, route: Route, compressed: Set[int] = frozenset()) -> None:
        self.route = route
        self.units = [_learning(parts) for parts in route.parts]
        self.router = _learning([Part(p) for p in route.router])
        self.samples = Samples(self.units)
        # In compressed experts the same place is not the same weight: nothing to compare place by place.
        self._comparable = not any(id(part.param) in compressed for unit in self.units for part in unit)

    def before_step(self) -> None:
        """Remember the weights."""
        self.samples.remember()

    def read(self, step: int, rates: Rates) -> list[Record]:
        """After the step."""
        where, family = self.route.name, self.route.family
        found: list[Record] = []
        if self.router:
            norm = float(norms([self.router])[0])
            found.append(Record(step, f"{family}/router_grad_norm", where, norm))
        if not self.units:
            return found
        self.samples.take(counts_absence=True)
        weights = self.samples.weights()
        vectors = {
            "grad_norm": norms(self.units),
            "grad_snr": self.samples.snr(),
            "effective_lr": _relative(_per_rate(self.samples.moved(weights), self.units, rates)),
        }
        found += [Record(step, f"{family}/{name}", where, vector) for name, vector in vectors.items()]
        rows = self.samples.rows(weights)
        if rows is not None and len(rows) > 1 and rows.shape[1] and self._comparable:
            found.append(Record(step, f"{family}/similarity", where, mean_cosine(rows)))
        return found


def mean_cosine(rows: NDArray[np.float32]) -> float:
    """Mean cosine between two different rows.

    >>> mean_cosine(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], np.float32)).__round__(3)
    0.333
    """
    count = len(rows)
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-20)
    return float(((unit.sum(0) ** 2).sum() - (unit**2).sum()) / (count * (count - 1)))


class LayerLearning:
    """All layers that are not experts: the sparse ones and the dense ones."""

    def __init__(self, units: Mapping[tuple[str, str], Sequence[Part]], places: Mapping[str, Places]) -> None:
        self.units = {key: tuple(parts) for key, parts in units.items()}
        self.samples = Samples(list(self.units.values()))
        self._places = dict(places)
        """For masked sparse layers: from numbers of existing weights to places in the parameter."""
        self._part = {}
        part = 0
        for key, parts in self.units.items():
            self._part[key] = part
            part += len(parts)

    def rewired(self, name: str, weights: int) -> None:
        """A sparse layer has other weights now."""
        self.samples.renew(self._part["sparse", name], weights, self._places.get(name))

    def before_step(self) -> None:
        """Remember the weights."""
        self.samples.remember()

    def read(self, step: int, rates: Rates) -> list[Record]:
        """After the step."""
        samples = self.samples
        samples.take(counts_absence=False)
        now = samples.weights()
        grads, weights = norms(list(self.units.values())), samples.weight_norms(now)
        relative = _relative(_per_rate(samples.moved(now), list(self.units.values()), rates))
        frequency = samples.frequency()
        mean = samples.mean_of(frequency)
        found: list[Record] = []
        for number, ((family, where), parts) in enumerate(self.units.items()):
            if all(part.param.grad is None for part in parts):
                continue
            told: float | Floats = float(mean[number])
            if family == "sparse":
                own = samples.of(number, frequency)
                bins = np.minimum((own * BINS).astype(int), BINS - 1)
                told = (np.bincount(bins, minlength=BINS) / max(len(own), 1)).astype(np.float32)
            found.append(Record(step, f"{family}/grad_norm", where, float(grads[number])))
            found.append(Record(step, f"{family}/weight_norm", where, float(weights[number])))
            found.append(Record(step, f"{family}/update_freq", where, told))
            if np.isfinite(relative[number]):
                found.append(Record(step, f"{family}/effective_lr", where, float(relative[number])))
        return found
