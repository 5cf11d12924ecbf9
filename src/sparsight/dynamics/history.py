"""A recorded history in memory: what rules and figures read. It does not know where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsight.dynamics.records import Event, Record

Key = tuple[str, str]


@dataclass(frozen=True)
class Series:
    """One quantity at one place: steps in ascending order, and a number or a vector for each."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    """[n], or [n, width] for vectors."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> Any:
        """The latest value."""
        return self.values[-1]

    def until(self, step: int) -> Series:
        """What was known at a step."""
        count = int(np.searchsorted(self.steps, step, side="right"))
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: int) -> Series:
        """What was measured at a step and after it."""
        first = int(np.searchsorted(self.steps, step, side="left"))
        return Series(self.steps[first:], self.values[first:])

    def tail(self, count: int) -> Series:
        """The latest `count` readings."""
        return Series(self.steps[-count:], self.values[-count:])


NOTHING = Series(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class History:
    """All series and events of a run, and what is known about it.

    >>> history = collect([Record(10, "log/loss", "", 2.0), Record(20, "log/loss", "", 1.5)])
    >>> history.get("log/loss").values.tolist(), history.last_step
    ([2.0, 1.5], 20)
    """

    series: Mapping[Key, Series]
    meta: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def get(self, name: str, where: str = "") -> Series:
        """A series; an empty one where nothing was recorded."""
        return self.series.get((name, where), NOTHING)

    def places(self, name: str) -> list[str]:
        """The layers that have this quantity, in the model's order; the whole model ("") is not one."""
        return [where for quantity, where in self.series if quantity == name and where]

    def names(self) -> list[str]:
        """Every quantity, once."""
        return list(dict.fromkeys(name for name, _ in self.series))

    @property
    def last_step(self) -> int:
        """The latest step of any series; 0 before the first."""
        return max((int(s.steps[-1]) for s in self.series.values() if len(s)), default=0)

    def until(self, step: int) -> History:
        """The history as it was at a step, for replaying rules."""
        cut = {key: part for key, s in self.series.items() if len(part := s.until(step))}
        return History(cut, self.meta, tuple(e for e in self.events if e.step <= step))


def stacked(values: Sequence[Any]) -> NDArray[np.float64]:
    """Numbers as [n]; vectors as [n, width], the shorter ones filled up with NaN.

    >>> stacked([np.ones(1), np.ones(2)]).tolist()
    [[1.0, nan], [1.0, 1.0]]
    """
    widths = {len(value) if isinstance(value, np.ndarray) else -1 for value in values}
    if len(widths) > 1:
        most = max(widths)
        rows = [np.atleast_1d(np.asarray(value, np.float64)) for value in values]
        values = [np.pad(row, (0, most - len(row)), constant_values=np.nan) for row in rows]
    return np.array(values, np.float64)


def collect(
    records: Iterable[Record], meta: Mapping[str, Any] | None = None, events: Iterable[Event] = ()
) -> History:
    """A history from records, in any order; of two records for one step and place the later one counts."""
    grouped: dict[Key, dict[int, Any]] = {}
    for record in records:
        grouped.setdefault((record.name, record.where), {})[record.step] = record.value
    series = {}
    for key, values in grouped.items():
        steps = np.array(sorted(values), np.int64)
        series[key] = Series(steps, stacked([values[step] for step in steps.tolist()]))
    return History(series, {} if meta is None else meta, tuple(events))
