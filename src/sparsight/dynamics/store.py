"""The store: one SQLite file per run, which training appends to in batches while anyone reads.

Schema 1 (`PRAGMA user_version`; `PRAGMA application_id` marks the file as ours):

    meta    (key, value)                     what is known about the run, each value as JSON
    series  (id, name, place)                a quantity at a layer ("" is the whole model)
    scalar  (series, step, value)            a number; NULL is NaN
    vector  (series, step, value)            little-endian float32, one after the other
    event   (id, step, time, kind, rule, severity, place, message, data)

Write-ahead logging: readers never block the writer, and a run killed at any moment leaves a file that opens
and lacks at most the last batch.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from sparsight.dynamics.records import Event, Record

FILE = "run.sqlite"
APPLICATION = 0x53504152
SCHEMA = 1

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, place TEXT NOT NULL, UNIQUE (name, place));
CREATE TABLE scalar (series INTEGER, step INTEGER, value REAL, PRIMARY KEY (series, step)) WITHOUT ROWID;
CREATE TABLE vector (series INTEGER, step INTEGER, value BLOB NOT NULL, PRIMARY KEY (series, step))
  WITHOUT ROWID;
CREATE TABLE event (id INTEGER PRIMARY KEY, step INTEGER, time REAL, kind TEXT, rule TEXT, severity TEXT,
  place TEXT, message TEXT, data TEXT);
"""


class StoreError(ValueError):
    """A file or folder that is not a run that this version can use."""


def check(connection: sqlite3.Connection, file: Path) -> None:
    """Refuse another program's database, and one of a newer Sparsight."""
    try:
        mark = connection.execute("PRAGMA application_id").fetchone()[0]
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{file} is not the store of a run: {error}") from None
    if mark != APPLICATION:
        raise StoreError(f"{file} belongs to another program; expected the store of a Sparsight run")
    if schema > SCHEMA:
        raise StoreError(
            f"{file} has schema {schema}, and this version of Sparsight knows schemas up to {SCHEMA}; "
            "update Sparsight to read it"
        )


class Store:
    """The writing end. One process at a time holds it; `close()` writes what is left."""

    def __init__(self, folder: Path, meta: Mapping[str, Any] | None = None, *, patience: float = 2.0) -> None:
        self.folder, self.file = folder, folder / FILE
        self.patience = patience
        """A batch is written once it is this many seconds old."""
        self._records: list[Record] = []
        self._events: list[Event] = []
        self._meta: dict[str, Any] = dict(meta or {})
        self._ids: dict[tuple[str, str], int] = {}
        self._failing = False
        self._lost = 0
        self._pid = os.getpid()
        self._written = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the run folder {folder} cannot be made: {error}") from None
        if self.file.exists():
            _ours(self.file)  # before anything is written into another program's folder
        self._lock = _lock(folder)
        try:
            self._connection = _open(self.file)
            known = self._connection.execute("SELECT id, name, place FROM series")
            self._ids = {(name, place): id_ for id_, name, place in known}
        except BaseException:
            self._lock.close()
            raise
        self.flush()

    def append(self, records: Sequence[Record]) -> None:
        """Take records; they are written with their batch."""
        self._records.extend(records)
        self._if_old()

    def event(self, event: Event) -> None:
        """Take an event; it is written with its batch."""
        self._events.append(event)
        self._if_old()

    def describe(self, **meta: Any) -> None:
        """Add to what is known about the run."""
        self._meta.update(meta)
        self._if_old()

    def _if_old(self) -> None:
        # A disk that is full now will be in two seconds: the batch that waits grows, so try less often.
        patience = 10 * self.patience if self._failing else self.patience
        if time.monotonic() - self._written > patience:
            self.flush()

    def flush(self) -> None:
        """Write the batch. Where the disk is full, keep it and try again with the next one."""
        if os.getpid() != self._pid:
            # A forked child holds a copy of this object, not the file.
            self._records, self._events, self._meta = [], [], {}
            return
        self._written = time.monotonic()
        if not (self._records or self._events or self._meta):
            return
        try:
            with self._connection:
                self._write()
        except sqlite3.Error as error:
            self._ids = {}
            self._complain(error)
            return
        self._records, self._events, self._meta = [], [], {}
        if self._failing:
            self._failing = False
            warnings.warn(f"{self.file}: writing again; {self._lost} records were lost", stacklevel=3)
            self._lost = 0

    def _write(self) -> None:
        run = self._connection.executemany
        if not self._ids:
            known = self._connection.execute("SELECT id, name, place FROM series")
            self._ids = {(name, place): id_ for id_, name, place in known}
        scalars, vectors = [], []
        for record in self._records:
            place = self._id(record.name, record.where)
            if isinstance(record.value, np.ndarray):
                vectors.append((place, record.step, record.value.astype("<f4").tobytes()))
            else:
                scalars.append((place, record.step, record.value))
        run("INSERT OR REPLACE INTO scalar VALUES (?, ?, ?)", scalars)
        run("INSERT OR REPLACE INTO vector VALUES (?, ?, ?)", vectors)
        run(
            "INSERT INTO event (step, time, kind, rule, severity, place, message, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (e.step, e.time, e.kind, e.rule, e.severity, e.where, e.message, _json(e.data))
                for e in self._events
            ],
        )
        run(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(key, _json(value)) for key, value in self._meta.items()],
        )

    def _id(self, name: str, place: str) -> int:
        found = self._ids.get((name, place))
        if found is None:
            row = self._connection.execute("INSERT INTO series (name, place) VALUES (?, ?)", (name, place))
            found = self._ids[name, place] = int(row.lastrowid or 0)
        return found

    def _complain(self, error: sqlite3.Error) -> None:
        if not self._failing:
            self._failing = True
            warnings.warn(
                f"{self.file}: {error}. Training goes on; records are kept in memory and written when it "
                "is possible again",
                stacklevel=4,
            )
        if (excess := len(self._records) - _MOST_KEPT) > 0:
            self._lost += excess
            del self._records[:excess]

    def trim(self, step: int) -> None:
        """Forget what came after a step: a run resumed from a checkpoint goes that way again."""
        self.flush()
        with self._connection:
            for table in ("scalar", "vector", "event"):
                self._connection.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def last(self) -> tuple[int, float]:
        """The last step there is a number for, and the seconds that the run had taken by then."""
        step = self._connection.execute("SELECT max(step) FROM scalar").fetchone()[0]
        row = self._connection.execute(
            "SELECT value FROM scalar JOIN series ON series = id WHERE name = 'run/time' "
            "ORDER BY step DESC LIMIT 1"
        ).fetchone()
        return step or 0, 0.0 if row is None else row[0]

    def close(self) -> None:
        """Write what is left and let go of the file."""
        if os.getpid() != self._pid:
            return
        self.flush()
        self._connection.close()
        self._lock.close()


_MOST_KEPT = 200_000


def _json(value: Any) -> str:
    """JSON of what people put into configs and evidence: NumPy's and torch's numbers are numbers."""

    def plain(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.dumps(dict(value) if isinstance(value, Mapping) else value, default=plain)


def _ours(file: Path) -> None:
    if file.is_file() and file.stat().st_size:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            check(connection, file)


def _open(file: Path) -> sqlite3.Connection:
    new = not file.exists() or file.stat().st_size == 0
    connection = None
    try:
        connection = sqlite3.connect(file, check_same_thread=False)
        if new:
            connection.execute("PRAGMA journal_mode = WAL")
            with connection:
                connection.executescript(
                    f"BEGIN; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}; {_TABLES}"
                )
        else:
            check(connection, file)
        connection.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, StoreError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{file} cannot be written: {error}") from None
    return connection


def _lock(folder: Path) -> sqlite3.Connection:
    """An exclusive lock on a file beside the store: the system releases it when its holder dies."""
    lock = sqlite3.connect(folder / "writer.lock", timeout=0, isolation_level=None, check_same_thread=False)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        lock.close()
        if "locked" in str(error):
            raise StoreError(f"the run {folder} is being written by another process or watch") from None
        raise StoreError(f"the run folder {folder} cannot be used: {error}") from None
    return lock
