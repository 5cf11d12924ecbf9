"""A run's history in memory while it goes on: fine where it is recent, coarse where it is old, never large.

A buffer that is full gives up every other reading of its older half. So the first reading always stays, the
latest are all there, and a History is a handful of views: nothing is copied to judge a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsight.dynamics.history import History, Key, Series
from sparsight.dynamics.records import Event, Record

NUMBERS, VECTORS = 1024, 128
"""Readings of a number, and of a vector, that are kept."""
WIDEST = 512
"""Vectors wider than this are pictures, which no rule looks at."""


class Buffer:
    """One series."""

    def __init__(self, width: int | None) -> None:
        size = NUMBERS if width is None else VECTORS
        self.steps = np.empty(size, np.int64)
        self.values = np.empty(size if width is None else (size, width), np.float64)
        self.count = 0

    def add(self, step: int, value: Any) -> None:
        """Of two readings at one step the later one counts; a step that lies back begins there anew."""
        if self.count and step <= self.steps[self.count - 1]:
            self.count = int(np.searchsorted(self.steps[: self.count], step))
        if self.count == len(self.steps):
            self._thin()
        self.steps[self.count], self.values[self.count] = step, value
        self.count += 1

    def _thin(self) -> None:
        half = self.count // 2
        kept = np.concatenate((np.arange(0, half, 2), np.arange(half, self.count)))
        # New arrays: a Series that someone holds goes on seeing what it saw.
        self.steps, self.values = self.steps.copy(), self.values.copy()
        self.steps[: len(kept)], self.values[: len(kept)] = self.steps[kept], self.values[kept]
        self.count = len(kept)

    def series(self) -> Series:
        """What is there, without a copy."""
        return Series(self.steps[: self.count], self.values[: self.count])


class Recent:
    """A sink that remembers what rules look at.

    >>> recent = Recent()
    >>> recent.write([Record(step, "log/loss", "", 1.0 / step) for step in range(1, 5001)])
    >>> series = recent.history({}).get("log/loss")
    >>> len(series) <= NUMBERS, int(series.steps[0]), int(series.steps[-1])
    (True, 1, 5000)
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, Buffer] = {}
        self._events: list[Event] = []

    def write(self, records: Sequence[Record]) -> None:
        """Take records."""
        buffers = self._buffers
        for record in records:
            key, value = (record.name, record.where), record.value
            buffer = buffers.get(key)
            if buffer is None:
                if isinstance(value, np.ndarray) and value.size > WIDEST:
                    continue
                buffer = buffers[key] = Buffer(value.size if isinstance(value, np.ndarray) else None)
            if isinstance(value, np.ndarray) and value.shape != buffer.values.shape[1:]:
                value = _fitted(value, buffer.values.shape[1:])
            buffer.add(record.step, value)

    def event(self, event: Event) -> None:
        """Events are few; the last thousand are enough."""
        self._events = [*self._events[-999:], event]

    def close(self) -> None:
        """Nothing to let go of."""

    def history(self, meta: Mapping[str, Any]) -> History:
        """What is remembered, as rules read it."""
        series = {key: buffer.series() for key, buffer in self._buffers.items()}
        return History(series, meta, tuple(self._events))

    def latest(self, name: str) -> dict[str, Any]:
        """The last value of a quantity at each place."""
        return {
            where: buffer.values[buffer.count - 1]
            for (own, where), buffer in self._buffers.items()
            if own == name and where and buffer.count
        }


def _fitted(value: Any, shape: tuple[int, ...]) -> Any:
    """A vector that changed its length, as the store's reader shows it: NaN where there is nothing."""
    fitted = np.full(shape, np.nan)
    if shape:
        count = min(len(value), shape[0])
        fitted[:count] = value[:count]
    return fitted
