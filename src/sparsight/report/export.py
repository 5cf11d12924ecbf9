"""All records of a run as CSV or JSON lines, row by row: a long run needs no more memory than a short one."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TextIO

from sparsight.dynamics.reading import read_events
from sparsight.dynamics.sampling import read_rows

Format = Literal["csv", "jsonl"]


def write_csv(run: Path | str, out: TextIO) -> None:
    """One line a number: step, name, layer, place within the vector (empty for a number), value."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "name", "where", "index", "value"])
    for step, name, where, value in read_rows(run):
        if isinstance(value, list):
            writer.writerows([step, name, where, i, v] for i, v in enumerate(value))
        else:
            writer.writerow([step, name, where, "", "nan" if value is None else value])


def write_jsonl(run: Path | str, out: TextIO) -> None:
    """One line a record, then one line an event; NaN and infinity are null."""
    for step, name, where, value in read_rows(run):
        known = [_finite(v) for v in value] if isinstance(value, list) else _finite(value)
        out.write(json.dumps({"step": step, "name": name, "where": where, "value": known}) + "\n")
    for _, event in read_events(run):
        out.write(
            json.dumps({"event": event.kind, **{k: v for k, v in asdict(event).items() if k != "kind"}})
            + "\n"
        )


def write_events_csv(run: Path | str, out: TextIO) -> None:
    """One line an event."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "time", "kind", "rule", "severity", "where", "message", "data"])
    for _, e in read_events(run):
        writer.writerow([e.step, e.time, e.kind, e.rule, e.severity, e.where, e.message, json.dumps(e.data)])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def export_run(run: Path, to: Format, out: Path | None = None) -> list[Path]:
    """Write `records.<to>` into the run's folder, or `out`; for CSV the events go into a file beside it."""
    folder = run if run.is_dir() else run.parent
    target = folder / f"records.{to}" if out is None else out
    written = []
    try:
        with target.open("w", encoding="utf-8", newline="") as file:
            (write_csv if to == "csv" else write_jsonl)(run, file)
        written.append(target)
        if to == "csv" and read_events(run):
            beside = target.with_name(f"{target.stem}-events{target.suffix}")
            with beside.open("w", encoding="utf-8", newline="") as file:
                write_events_csv(run, file)
            written.append(beside)
    except OSError as error:
        raise ValueError(f"export: {target} cannot be written: {error.strerror or error}") from None
    return written
