"""Who learns: update frequency, gradient norms and signal-to-noise, effective learning rate, similarity.

A unit is an expert or a layer. The probes look at gradients after the optimizer's step, so at the ones it
used (a fused optimizer under a GradScaler has written them back unscaled), and at a sample of the weights
before and after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.optim import Optimizer

from sparsight.dynamics.records import Record
from sparsight.dynamics.routes import Part, Route
from sparsight.dynamics.samples import Sample, squared_norm

BINS = 10


@dataclass
class Unit:
    """Parameters that learn together, and what is followed of them."""

    parts: tuple[Part, ...]
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = tuple(part for part in self.parts if part.param.requires_grad)
        self.samples = self.samples or [Sample(part, salt) for salt, part in enumerate(self.parts)]

    def before_step(self) -> None:
        """Remember the sample's weights."""
        for sample in self.samples:
            sample.before = sample.weights()

    def take(self, *, counts_absence: bool) -> None:
        """Read the sample's gradients. An expert without one has learned nothing; a layer without one may
        have been rewired in place of a step, which is not held against it."""
        for sample in self.samples:
            grad = sample.gradient()
            if grad is not None or counts_absence:
                sample.moments.take(grad)

    def grad_norm(self) -> float:
        """Norm of the whole gradient; 0 without one."""
        found = [s for part in self.parts if (s := squared_norm(part)) is not None]
        return math.sqrt(float(torch.stack(found).sum())) if found else 0.0

    def has_gradient(self) -> bool:
        """Whether any part has one."""
        return any(part.param.grad is not None for part in self.parts)

    def moved(self) -> float:
        """Mean |Δw| over the sample."""
        size = sum(len(s.at) for s in self.samples)
        return sum(s.moved() * len(s.at) for s in self.samples) / max(size, 1)

    def snr(self) -> float:
        """Σ mean² / Σ variance of the gradients of late."""
        pairs = [sample.moments.signal_and_noise() for sample in self.samples]
        noise = sum(n for _, n in pairs)
        return sum(s for s, _ in pairs) / noise if noise > 0 else math.nan

    def frequencies(self) -> NDArray[np.float32]:
        """How often each followed weight has had a gradient."""
        if not self.samples:
            return np.zeros(0, np.float32)
        return torch.cat([s.moments.frequency() for s in self.samples]).float().cpu().numpy()

    def weight_norm(self) -> float:
        """Norm of the weights, estimated from the sample."""
        total = 0.0
        for sample in self.samples:
            mean = float(sample.weights().float().square().mean()) if len(sample.at) else 0.0
            total += mean * sample.part.numel
        return math.sqrt(total)


def learning_rates(optimizer: Optimizer) -> dict[int, float]:
    """The learning rate of each parameter, by its id."""
    return {id(p): float(group.get("lr", 1.0)) for group in optimizer.param_groups for p in group["params"]}


def rate_of(unit: Unit, rates: Mapping[int, float]) -> float:
    """The learning rate of a unit; 0 where the optimizer does not hold it."""
    return max((rates.get(id(part.param), 0.0) for part in unit.parts), default=0.0)


class PathLearning:
    """The experts of one route."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.units = [Unit(parts) for parts in route.parts]
        self.router = Unit(tuple(Part(p) for p in route.router), [])

    def before_step(self) -> None:
        """Remember the weights."""
        for unit in self.units:
            unit.before_step()

    def read(self, step: int, rates: Mapping[int, float]) -> list[Record]:
        """After the step."""
        where, family = self.route.name, self.route.family
        found: list[Record] = []
        if self.router.parts:
            found.append(Record(step, f"{family}/router_grad_norm", where, self.router.grad_norm()))
        if not self.units:
            return found
        for unit in self.units:
            unit.take(counts_absence=True)
        moved = np.array([_per_rate(unit.moved(), rate_of(unit, rates)) for unit in self.units], np.float32)
        vectors = {
            "grad_norm": np.array([unit.grad_norm() for unit in self.units], np.float32),
            "grad_snr": np.array([unit.snr() for unit in self.units], np.float32),
            "effective_lr": moved / max(float(moved.mean()), 1e-30),
        }
        found += [Record(step, f"{family}/{name}", where, vector) for name, vector in vectors.items()]
        alike = self._similarity()
        if alike is not None:
            found.append(Record(step, f"{family}/similarity", where, alike))
        return found

    def _similarity(self) -> float | None:
        """Mean cosine between two experts, on the same places of each."""
        rows = [[sample.weights().float() for sample in unit.samples] for unit in self.units]
        if len(rows) < 2 or any([len(w) for w in row] != [len(w) for w in rows[0]] for row in rows):
            return None
        return mean_cosine(torch.stack([torch.cat(row) for row in rows]))


def mean_cosine(rows: torch.Tensor) -> float:
    """Mean cosine between two different rows."""
    count = rows.shape[0]
    unit = functional.normalize(rows, dim=-1)
    return float((unit.sum(0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def _per_rate(moved: float, rate: float) -> float:
    return moved / rate if rate else 0.0


class LayerLearning:
    """All layers that are not experts: the sparse ones and the dense ones."""

    def __init__(self, units: Mapping[tuple[str, str], Unit]) -> None:
        self.units = dict(units)

    def before_step(self) -> None:
        """Remember the weights."""
        for unit in self.units.values():
            unit.before_step()

    def read(self, step: int, rates: Mapping[int, float]) -> list[Record]:
        """After the step."""
        found = []
        moved = {}
        for (family, where), unit in self.units.items():
            unit.take(counts_absence=False)
            if not unit.has_gradient():
                continue
            rate = rate_of(unit, rates)
            if rate:
                moved[family, where] = unit.moved() / rate
            frequency = unit.frequencies()
            found.append(Record(step, f"{family}/grad_norm", where, unit.grad_norm()))
            found.append(Record(step, f"{family}/weight_norm", where, unit.weight_norm()))
            told: float | NDArray[np.float32] = float(frequency.mean()) if len(frequency) else 0.0
            if family == "sparse":
                told = (np.histogram(frequency, BINS, (0, 1))[0] / max(len(frequency), 1)).astype(np.float32)
            found.append(Record(step, f"{family}/update_freq", where, told))
        mean = sum(moved.values()) / max(len(moved), 1)
        found += [
            Record(step, f"{family}/effective_lr", where, value / mean if mean else 0.0)
            for (family, where), value in moved.items()
        ]
        return found
