"""Looking at a history: what all rules need, so that each of them says only what it looks for.

Nothing here fails on an empty series, on NaN or on a quantity of an unexpected shape; it sees nothing then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsight.dynamics.history import NOTHING, History, Series

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

NO_VECTORS = Series(np.empty(0, np.int64), np.empty((0, 0)))
_NOT_SEARCHING = ("static", "snip", "grasp", "gmp", "acdc", "top_kast", "nm", "prune", "lottery_ticket")
"""Methods that keep their connections, only remove them, or hold all weights alive: they do not explore by
swapping, so that no swap is no illness."""


def scalars(history: History, name: str, where: str = "") -> Series:
    """A series of numbers; empty where there is none, or where it holds vectors."""
    series = history.get(name, where)
    return series if series.values.ndim == 1 else NOTHING


def vectors(history: History, name: str, where: str = "") -> Series:
    """A series of vectors; empty where there is none, or where it holds numbers."""
    series = history.get(name, where)
    return series if series.values.ndim == 2 and series.values.shape[1] else NO_VECTORS


def since(
    series: Series, bad: Callable[[Numbers], Flags], *, readings: int = 3, steps: int = 20
) -> int | None:
    """The step at which it became bad, if every reading from there to the last is bad, else None.

    A single reading is one batch and proves little: at least `readings` of them and `steps` steps are asked.
    """
    if len(series) < readings:
        return None
    flags, size = bad(series.values[-readings:]), readings
    if not flags.all():
        return None
    # Look back twice as far each time: a run of 100,000 steps costs no more than the illness is long.
    while flags.all() and size < len(series):
        size = min(2 * size, len(series))
        flags = bad(series.values[-size:])
    good = np.flatnonzero(~flags)
    first = 0 if not len(good) else int(good[-1]) + 1
    onset = int(series.steps[len(series) - size + first])
    return onset if int(series.steps[-1]) - onset >= steps else None


def middle(values: Numbers) -> float:
    """The median of what is finite; NaN where nothing is."""
    # By hand: np.median takes ten times as long on the few numbers that rules look at.
    finite = np.sort(values[np.isfinite(values)])
    count = len(finite)
    return float(finite[(count - 1) // 2] + finite[count // 2]) / 2 if count else math.nan


def average(values: Numbers) -> float:
    """The mean of what is finite; NaN where nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def highest_of(values: Numbers) -> float:
    """The largest of what is finite; 0 where nothing is."""
    return float(values[np.isfinite(values)].max(initial=0.0))


def column_means(values: Numbers) -> Numbers:
    """The mean of each column over what is finite; NaN where nothing is."""
    finite = np.isfinite(values)
    count = finite.sum(0)
    total = np.where(finite, values, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def column_medians(values: Numbers) -> Numbers:
    """The median of each column over what is finite; NaN where nothing is."""
    count = len(values)
    if count and np.isfinite(values).all():
        ordered = np.sort(values, axis=0)
        return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    return np.array([middle(values[:, column]) for column in range(values.shape[1])])


@dataclass(frozen=True)
class Paths:
    """What is known about the experts of one layer."""

    where: str
    experts: int
    k: int
    fixed: bool
    """Whether the router has nothing to learn."""
    about: Mapping[str, Any]


def layer(history: History, where: str) -> Mapping[str, Any]:
    """What the run says about a layer; nothing where it says nothing."""
    layers = history.meta.get("layers", ())
    for entry in layers if isinstance(layers, list | tuple) else ():
        if isinstance(entry, Mapping) and entry.get("name") == where:
            return entry
    return {}


def paths(history: History, quantity: str) -> Iterator[Paths]:
    """The layers with experts that have a quantity, with at least two experts to choose from."""
    for where in history.places(f"moe/{quantity}"):
        about = layer(history, where)
        width = vectors(history, "moe/tokens_per_expert", where).values.shape[1]
        experts, k = _count(about.get("experts"), width), _count(about.get("k"), 1)
        if experts >= 2:
            fixed = bool(about.get("fixed", about.get("router") == "hash"))
            yield Paths(where, experts, max(1, min(k, experts)), fixed, about)


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and value > 0 else otherwise


@dataclass(frozen=True)
class Plan:
    """What the user asked for: the method and how long the training is to be."""

    method: str = ""
    steps: int | None = None
    rewires: bool = False
    """Whether connections are meant to be swapped. A static topology is a choice, not an illness."""

    def progress(self, step: int) -> float | None:
        """Share of the training that is over; None where its length is not known."""
        return None if not self.steps else step / self.steps


def plan(history: History) -> Plan:
    """The plan of a run, from its metadata: `method` (a name, or name, steps and grows) and `steps`."""
    said = history.meta.get("method")
    facts: Mapping[str, Any] = said if isinstance(said, Mapping) else {"name": said}
    name = facts.get("name")
    name = name if isinstance(name, str) else ""
    steps = facts.get("steps") or history.meta.get("steps")
    steps = int(steps) if isinstance(steps, int | float) and math.isfinite(steps) and steps >= 1 else None
    return Plan(name, steps, bool(name) and bool(facts.get("grows", True)) and name not in _NOT_SEARCHING)


def percent(share: float) -> str:
    """A share for a person: 97 %, 0.3 %.

    >>> percent(0.973), percent(0.003)
    ('97 %', '0.3 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def named(where: str) -> str:
    """A layer in a sentence.

    >>> named("blocks.0"), named("")
    ('blocks.0', 'the model')
    """
    return where or "the model"


def listed(indices: list[int], most: int = 6) -> str:
    """Indices in a sentence.

    >>> listed([1, 2, 3]), listed(list(range(10)), most=3)
    ('1, 2, 3', '0, 1, 2, … (10)')
    """
    shown = ", ".join(map(str, indices[:most]))
    return shown if len(indices) <= most else f"{shown}, … ({len(indices)})"
