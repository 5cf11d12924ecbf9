"""The reading end of the store: whole histories for rules, thinned series for pages."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sparsight.dynamics.history import History, Key, Series
from sparsight.dynamics.records import Event
from sparsight.dynamics.store import FILE, StoreError, check


def store_of(run: Path | str) -> Path:
    """The store of a run, given its folder or the file itself."""
    path = Path(run)
    file = path if path.is_file() else path / FILE
    if not file.is_file():
        what = "has no run in it" if path.is_dir() else "does not exist"
        raise StoreError(f"{path} {what}: expected a folder with {FILE}")
    return file


@contextmanager
def _opened(run: Path | str) -> Iterator[sqlite3.Connection]:
    file = store_of(run)
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            check(connection, file)
            yield connection
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{file} cannot be read: {error}") from None


def read_meta(run: Path | str) -> dict[str, Any]:
    """What is known about a run."""
    with _opened(run) as connection:
        return {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def read_keys(run: Path | str) -> list[tuple[Key, str]]:
    """Every (name, place) with "scalar" or "vector", in the order of their first record."""
    with _opened(run) as connection:
        return [((name, place), kind) for _, name, place, kind in _keys(connection)]


def _keys(connection: sqlite3.Connection) -> list[tuple[int, str, str, str]]:
    query = (
        "SELECT id, name, place, CASE WHEN EXISTS (SELECT 1 FROM vector WHERE series = id) "
        "THEN 'vector' ELSE 'scalar' END FROM series ORDER BY id"
    )
    return list(connection.execute(query))


def read_events(run: Path | str, after: int = 0) -> list[tuple[int, Event]]:
    """Events with their numbers, from those after number `after` on."""
    with _opened(run) as connection:
        return _events(connection, after)


def _events(connection: sqlite3.Connection, after: int = 0) -> list[tuple[int, Event]]:
    rows = connection.execute(
        "SELECT id, step, kind, rule, severity, place, message, data, time FROM event WHERE id > ? "
        "ORDER BY id",
        (after,),
    )
    return [
        (id_, Event(step, kind, rule, severity, place, message, json.loads(data), time))
        for id_, step, kind, rule, severity, place, message, data, time in rows
    ]


def read_series(run: Path | str, name: str, where: str = "", points: int | None = None) -> Series:
    """One series; with `points`, about that many of its readings, evenly spaced, with the first and last."""
    with _opened(run) as connection:
        row = connection.execute(
            "SELECT id FROM series WHERE name = ? AND place = ?", (name, where)
        ).fetchone()
        if row is None:
            return Series(np.empty(0, np.int64), np.empty(0))
        for table in ("scalar", "vector"):
            found = _rows(connection, table, row[0], points)
            if len(found):
                return found
        return Series(np.empty(0, np.int64), np.empty(0))


def _rows(connection: sqlite3.Connection, table: str, series: int, points: int | None) -> Series:
    steps = [
        r[0]
        for r in connection.execute(f"SELECT step FROM {table} WHERE series = ? ORDER BY step", (series,))
    ]
    if points is None or len(steps) <= points:
        rows = connection.execute(
            f"SELECT step, value FROM {table} WHERE series = ? ORDER BY step", (series,)
        )
        return _as_series(list(rows), table)
    chosen = np.unique(np.linspace(0, len(steps) - 1, points).round().astype(int))
    query = f"SELECT step, value FROM {table} WHERE series = ? AND step = ?"
    return _as_series([connection.execute(query, (series, steps[i])).fetchone() for i in chosen], table)


def _as_series(rows: list[tuple[int, Any]], table: str) -> Series:
    steps = np.array([row[0] for row in rows], np.int64)
    if table == "scalar":
        return Series(steps, np.array([np.nan if v is None else v for _, v in rows], np.float64))
    vectors = [np.frombuffer(v, "<f4") for _, v in rows]
    width = max((len(v) for v in vectors), default=0)
    same = [np.pad(v, (0, width - len(v)), constant_values=np.nan) for v in vectors]
    return Series(steps, np.array(same, np.float64).reshape(len(rows), width))


def load_run(run: Path | str) -> History:
    """The whole history of a run.

    >>> import tempfile
    >>> from sparsight.dynamics.records import Record
    >>> from sparsight.dynamics.store import Store
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder) / "run")
    ...     store.append([Record(1, "log/loss", "", 0.5)])
    ...     store.close()
    ...     load_run(Path(folder) / "run").get("log/loss").values.tolist()
    [0.5]
    """
    with _opened(run) as connection:
        connection.execute("BEGIN")  # one moment for all tables
        meta = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        keys = {id_: (name, place) for id_, name, place, _ in _keys(connection)}
        rows: dict[int, tuple[str, list[tuple[int, Any]]]] = {}
        for table in ("scalar", "vector"):
            for id_, step, value in connection.execute(
                f"SELECT series, step, value FROM {table} ORDER BY series, step"
            ):
                rows.setdefault(id_, (table, []))[1].append((step, value))
        series = {keys[id_]: _as_series(rows[id_][1], rows[id_][0]) for id_ in keys if id_ in rows}
        return History(series, meta, tuple(event for _, event in _events(connection)))
