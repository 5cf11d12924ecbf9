"""A thinned history, read without touching most of a store: what a page shows of a run of any length."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsight.dynamics.history import History, Key, Series
from sparsight.dynamics.reading import _as_series, _events, _opened


def sample(
    run: Path | str,
    names: Collection[str] | Callable[[str], bool] | None = None,
    *,
    points: int | None = 300,
    wanted: Callable[[Key], bool] | None = None,
) -> History:
    """The history of some quantities (all without `names`) with at most about `points` readings of each.

    None for `points` reads them whole.

    The numbers of the whole model keep their extremes, so that a spike is seen however long the run is;
    those of a layer, and vectors, are readings at evenly spaced steps. The first and the last are always in.
    """
    chosen = names if callable(names) or names is None else frozenset(names).__contains__
    with _opened(run) as connection:
        connection.execute("BEGIN")  # one moment for all tables
        meta = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        series: dict[Key, Series] = {}
        for id_, name, place in connection.execute("SELECT id, name, place FROM series ORDER BY id"):
            if (chosen is None or chosen(name)) and (wanted is None or wanted((name, place))):
                found = _thin(connection, id_, points, extremes=not place)
                if len(found):
                    series[name, place] = found
        return History(series, meta, tuple(event for _, event in _events(connection)))


def recent(run: Path | str, *, tail: int = 400, points: int = 200) -> History:
    """What rules need of a long run: the last `tail` readings as they are, what came before them thinned."""
    with _opened(run) as connection:
        connection.execute("BEGIN")
        meta = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        series: dict[Key, Series] = {}
        for id_, name, place in connection.execute("SELECT id, name, place FROM series ORDER BY id"):
            for table in ("scalar", "vector"):
                query = f"SELECT step, value FROM {table} WHERE series = ? ORDER BY step DESC LIMIT ?"
                rows = connection.execute(query, (id_, tail)).fetchall()[::-1]
                if len(rows) == tail:
                    early = _evenly(connection, table, id_, points)
                    rows = [row for row in early if row[0] < rows[0][0]] + rows
                if rows:
                    series[name, place] = _as_series(rows, table)
                    break
        return History(series, meta, tuple(event for _, event in _events(connection)))


def latest(run: Path | str, names: Callable[[str], bool]) -> History:
    """The last reading of some quantities of the whole model, and all events."""
    with _opened(run) as connection:
        connection.execute("BEGIN")
        meta = {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        series: dict[Key, Series] = {}
        for id_, name in connection.execute("SELECT id, name FROM series WHERE place = '' ORDER BY id"):
            if names(name):
                query = "SELECT step, value FROM scalar WHERE series = ? ORDER BY step DESC LIMIT 1"
                if rows := connection.execute(query, (id_,)).fetchall():
                    series[name, ""] = _as_series(rows, "scalar")
        return History(series, meta, tuple(event for _, event in _events(connection)))


def read_rows(run: Path | str) -> Iterator[tuple[int, str, str, Any]]:
    """Every record as (step, name, where, number or list of numbers), series after series, one at a time."""
    with _opened(run) as connection:
        connection.execute("BEGIN")  # one moment for all of it
        for table in ("scalar", "vector"):
            query = (
                f"SELECT step, name, place, value FROM {table} JOIN series ON series.id = {table}.series "
                f"ORDER BY {table}.series, step"
            )
            for step, name, place, value in connection.execute(query):
                yield step, name, place, np.frombuffer(value, "<f4").tolist() if table == "vector" else value


def _thin(connection: sqlite3.Connection, series: int, points: int | None, *, extremes: bool) -> Series:
    for table in ("scalar", "vector"):
        query = f"SELECT step, value FROM {table} WHERE series = ? ORDER BY step LIMIT ?"
        rows = connection.execute(query, (series, -1 if points is None else points + 1)).fetchall()
        if points is not None and len(rows) > points:
            if extremes and table == "scalar":
                rows = _extremes(connection, series, points)
            else:
                rows = _evenly(connection, table, series, points)
        if rows:
            return _as_series(rows, table)
    return Series(np.empty(0, np.int64), np.empty(0))


def _span(connection: sqlite3.Connection, table: str, series: int) -> tuple[int, int]:
    # Two queries, because SQLite looks up a lone MIN or MAX in the index and scans for both.
    ends = [
        connection.execute(f"SELECT {which}(step) FROM {table} WHERE series = ?", (series,)).fetchone()[0]
        for which in ("MIN", "MAX")
    ]
    return int(ends[0]), int(ends[1])


def _evenly(connection: sqlite3.Connection, table: str, series: int, points: int) -> list[tuple[int, Any]]:
    """The first reading at or after each of evenly spaced steps: a look-up each, however long the series."""
    first, last = _span(connection, table, series)
    query = f"SELECT step, value FROM {table} WHERE series = ? AND step >= ? ORDER BY step LIMIT 1"
    rows: dict[int, Any] = {}
    for step in np.unique(np.linspace(first, last, points).astype(np.int64)).tolist():
        row = connection.execute(query, (series, step)).fetchone()
        rows[row[0]] = row[1]
    return list(rows.items())


def _extremes(connection: sqlite3.Connection, series: int, points: int) -> list[tuple[int, Any]]:
    """The smallest and the largest value of each of points / 2 spans, where they were measured."""
    first, last = _span(connection, "scalar", series)
    width = max((last - first + 1) / max(points // 2, 1), 1.0)
    rows: dict[int, Any] = {}
    for which in ("MIN", "MAX"):
        # In SQLite a plain column beside MIN or MAX comes from the row that has it.
        span = "CAST((step - ?) / ? AS INTEGER)"
        query = f"SELECT step, {which}(value) FROM scalar WHERE series = ? GROUP BY {span}"
        rows.update(connection.execute(query, (series, first, width)))
    for step in (first, last):
        query = "SELECT step, value FROM scalar WHERE series = ? AND step = ?"
        rows.update([connection.execute(query, (series, step)).fetchone()])
    return sorted(rows.items())
