"""All records of a run as CSV or JSON lines, in batches: a long run takes no more memory than a short one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from sparsight.dynamics.reading import read_events, store_of
from sparsight.dynamics.records import Record
from sparsight.dynamics.sampling import read_rows
from sparsight.dynamics.sinks.files import CSV, JSONL

Format = Literal["csv", "jsonl"]
BATCH = 10_000


def export_run(run: Path, to: Format, out: Path | None = None) -> Path:
    """Write `records.<to>` into the run's folder, or `out`, as the sinks do; events come last.

    A file that is there already is replaced.
    """
    target = store_of(run).parent / f"records.{to}" if out is None else out
    records = _records(run)
    try:
        target.unlink(missing_ok=True)
        sink = CSV(target) if to == "csv" else JSONL(target)
        while batch := list(islice(records, BATCH)):
            sink.write(batch)
        for _, event in read_events(run):
            sink.event(event)
        sink.close()
    except OSError as error:
        raise ValueError(f"export: {target} cannot be written: {error.strerror or error}") from None
    return target


def _records(run: Path) -> Iterator[Record]:
    for step, name, where, value in read_rows(run):
        told = (
            np.array(value, np.float32) if isinstance(value, list) else math.nan if value is None else value
        )
        yield Record(step, name, where, told)
