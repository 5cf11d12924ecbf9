"""Runs side by side: which belong together, and what they reach at equal steps, equal FLOPs, equal time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsight.dynamics.history import History, Series
from sparsight.report.figures.cost import spent
from sparsight.report.figures.learning import is_loss, logged
from sparsight.report.figures.lines import NOISY, smooth

Floats = NDArray[np.float64]
MOST_METRICS = 4
GRID = 200


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    label: str
    runs: Mapping[str, History]


@dataclass(frozen=True)
class Axis:
    """Something that two runs can have spent equally much of. `along` tells it for each step of a run."""

    id: str
    title: str
    unit: str
    along: Callable[[History, NDArray[np.int64]], Floats | None]


def _steps(history: History, steps: NDArray[np.int64]) -> Floats | None:
    return steps.astype(np.float64)


def _flops(history: History, steps: NDArray[np.int64]) -> Floats | None:
    return spent(history.get("sparse/flops_ratio"), steps)


def _seconds(history: History, steps: NDArray[np.int64]) -> Floats | None:
    clock = history.get("run/time")
    if not len(clock):
        return None
    return np.asarray(np.interp(steps, [0, *clock.steps], [0.0, *clock.values]))


AXES = (
    Axis("steps", "equal steps", "steps", _steps),
    Axis("flops", "equal FLOPs", "FLOPs, in steps of the dense model", _flops),
    Axis("time", "equal time", "seconds", _seconds),
)


def group(runs: Mapping[str, History]) -> list[Group]:
    """Runs that differ only in their seed become one; all others stay alone."""
    found: dict[str, dict[str, History]] = {}
    for name, history in runs.items():
        found.setdefault(_identity(name, history.meta), {})[name] = history
    groups = [Group(_label(list(members)), members) for members in found.values()]
    labels = [g.label for g in groups]
    return [g if labels.count(g.label) == 1 else Group(next(iter(g.runs)), g.runs) for g in groups]


def _identity(name: str, meta: Mapping[str, Any]) -> str:
    """What all seeds of an experiment share. A run that says nothing of itself goes by its name."""
    config = meta.get("config")
    told = {k: v for k, v in config.items() if k != "seed"} if isinstance(config, dict) else {}
    same = {key: meta.get(key) for key in ("method", "parameters", "optimizer", "layers")}
    if not told:
        told = {"name": _seedless(name)}
    return json.dumps([told, same], sort_keys=True, default=str)


def _seedless(name: str) -> str:
    """A name without the number of its seed.

    >>> _seedless("rigl-seed3"), _seedless("rigl_12"), _seedless("rigl90")
    ('rigl', 'rigl', 'rigl90')
    """
    return re.sub(r"([-_./ ]seed[-_ ]?\d+|[-_/ ]\d+)$", "", name) or name


def _label(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    shared = {_seedless(name) for name in names}
    return shared.pop() if len(shared) == 1 else f"{names[0]} and {len(names) - 1} more"


def metrics(groups: Sequence[Group]) -> list[str]:
    """What all runs have logged: what they call their quality first, losses last."""
    told = [set(logged(h)) for g in groups for h in g.runs.values()]
    first = logged(next(iter(groups[0].runs.values())))
    shared = [name for name in first if all(name in names for names in told)]
    return sorted(shared, key=lambda name: (name not in _asked_for(groups), is_loss(name)))[:MOST_METRICS]


def _asked_for(groups: Sequence[Group]) -> set[str]:
    """The numbers that the runs themselves call their quality."""
    configs = (h.meta.get("config") for g in groups for h in g.runs.values())
    return {str(c["quality"]) for c in configs if isinstance(c, dict) and "quality" in c}


def curve_of(history: History, metric: str, axis: Axis) -> tuple[Floats, Floats] | None:
    """A metric over what was spent; noisy ones as their running mean."""
    series = logged(history)[metric]
    finite = np.isfinite(series.values)
    series = Series(series.steps[finite], series.values[finite])
    if not len(series) or (along := axis.along(history, series.steps)) is None:
        return None
    return along, (smooth(series) if len(series) > NOISY else series).values


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over the runs of a group; no deviation where there is one run."""

    mean: float
    deviation: float | None
    count: int

    def __str__(self) -> str:
        near = "" if self.deviation is None else f" ± {self.deviation:.2g}"
        return f"{self.mean:.4g}{near}"


def spread(values: Sequence[float]) -> Spread | None:
    """Of a few numbers; None where there are none."""
    if not values:
        return None
    return Spread(
        float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None, len(values)
    )


def common_end(groups: Sequence[Group], metric: str, axis: Axis) -> float | None:
    """How far all runs have come: there they can be compared. None where one cannot tell."""
    curves = [curve_of(h, metric, axis) for g in groups for h in g.runs.values()]
    if any(c is None for c in curves):
        return None
    return min(float(c[0][-1]) for c in curves if c is not None)


def value_at(one: Group, metric: str, axis: Axis, place: float) -> Spread | None:
    """What the runs of a group had reached when they had spent so much."""
    curves = [c for h in one.runs.values() if (c := curve_of(h, metric, axis)) is not None]
    return spread([float(np.interp(place, x, y)) for x, y in curves])


def final(one: Group, metric: str) -> Spread | None:
    """What the runs of a group ended with."""
    curves = [c for h in one.runs.values() if (c := curve_of(h, metric, AXES[0])) is not None]
    return spread([float(y[-1]) for _, y in curves])


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Settings in which the groups differ, with each group's value."""
    flat = [_settings(next(iter(g.runs.values())).meta) for g in groups]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [(key, [settings.get(key, "–") for settings in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(meta: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif not path.endswith("seed"):
            found[path] = value if isinstance(value, str) else json.dumps(value)

    walk({key: meta[key] for key in ("config", "method", "parameters", "optimizer") if key in meta}, "")
    return found
