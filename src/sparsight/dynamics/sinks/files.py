"""Records as plain text files: CSV for a spreadsheet or a data frame, JSON lines for everything else."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from sparsight.dynamics.reading import load_run
from sparsight.dynamics.records import Event, Record

if TYPE_CHECKING:
    from sparsight.dynamics.watch import Sink


class _File:
    """A text file that is opened for its first line."""

    def __init__(self, path: str | Path, begin: Callable[[TextIO], None] = lambda file: None) -> None:
        self.path = Path(path)
        self._begin = begin
        self._file: TextIO | None = None

    def open(self) -> TextIO:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a", encoding="utf-8", newline="")
            if self._file.tell() == 0:
                self._begin(self._file)
        return self._file

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CSV:
    """A table with the columns step, name, where, index and value; a vector has a row for each number.

    A file that is there already is continued.
    """

    def __init__(self, path: str | Path, *, layers: bool = True) -> None:
        self.layers = layers
        self._file = _File(path, lambda file: _row(file, ("step", "name", "where", "index", "value")))

    def write(self, records: Sequence[Record]) -> None:
        for record in shown(records, self.layers):
            if isinstance(record.value, np.ndarray):
                for index, number in enumerate(record.value.tolist()):
                    _row(self._file.open(), (record.step, record.name, record.where, index, number))
            else:
                _row(self._file.open(), (record.step, record.name, record.where, "", record.value))
        self._file.flush()

    def event(self, event: Event) -> None:
        _row(self._file.open(), (event.step, f"events/{event.kind}", event.where, "", event.message))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _row(file: TextIO, row: Sequence[Any]) -> None:
    csv.writer(file, lineterminator="\n").writerow(row)


class JSONL:
    """One JSON object a line: a record has step, name, where and value; an event has kind, message and data.

    NaN and infinity, which JSON does not have, are null. A file that is there already is continued.
    """

    def __init__(self, path: str | Path, *, layers: bool = True) -> None:
        self.layers = layers
        self._file = _File(path)

    def write(self, records: Sequence[Record]) -> None:
        for record in shown(records, self.layers):
            value = record.value
            told = [_finite(v) for v in value.tolist()] if isinstance(value, np.ndarray) else _finite(value)
            self._line({"step": record.step, "name": record.name, "where": record.where, "value": told})
        self._file.flush()

    def event(self, event: Event) -> None:
        self._line(
            {
                "step": event.step,
                "kind": event.kind,
                "rule": event.rule,
                "severity": event.severity,
                "where": event.where,
                "message": event.message,
                "data": dict(event.data),
                "time": event.time,
            }
        )
        self._file.flush()

    def _line(self, what: dict[str, Any]) -> None:
        self._file.open().write(json.dumps(what, default=str) + "\n")

    def close(self) -> None:
        self._file.close()


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def shown(records: Sequence[Record], layers: bool) -> list[Record]:
    """The records a sink takes: of the whole model, or of every layer too."""
    return [record for record in records if layers or not record.where]


def export(run: str | Path, sink: Sink) -> None:
    """Send a run that has been recorded to a sink, step by step, and close it.

    >>> import tempfile, sparsight as sp
    >>> from sparsight.dynamics.store import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder) / "run")
    ...     store.append([Record(1, "log/loss", "", 0.5)])
    ...     store.close()
    ...     sp.sinks.export(f"{folder}/run", sp.sinks.CSV(f"{folder}/run.csv"))
    ...     print(Path(folder, "run.csv").read_text(), end="")
    step,name,where,index,value
    1,log/loss,,,0.5
    """
    history = load_run(run)
    steps: dict[int, list[Record]] = {}
    for (name, where), series in history.series.items():
        for step, value in zip(series.steps.tolist(), series.values, strict=True):
            told = value.astype(np.float32) if series.values.ndim == 2 else float(value)
            steps.setdefault(step, []).append(Record(step, name, where, told))
    for event in history.events:
        steps.setdefault(event.step, [])
    for step in sorted(steps):
        sink.write(steps[step])
        for event in history.events:
            if event.step == step:
                sink.event(event)
    sink.close()
