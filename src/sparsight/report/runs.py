"""Which runs a folder holds, and what can be said about each in a line; of a broken store, that it is."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsight.dynamics.history import History
from sparsight.dynamics.records import Event
from sparsight.dynamics.sampling import latest
from sparsight.dynamics.store import FILE, StoreError

DEEPEST = 4
MOST_RUNS = 2000
LIVE_SECONDS = 30.0


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    name: str
    step: int = 0
    seconds: float | None = None
    """How long it has trained."""
    changed: float = 0.0
    """When its store was last written to, in seconds since 1970."""
    level: str = "fine"
    """fine, info, warn or act; broken where the store cannot be read."""
    verdict: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The latest of what was logged."""
    finished: bool = False
    """Whether the run said that it was over."""

    @property
    def live(self) -> bool:
        """Whether someone has written to it just now."""
        return not self.finished and time.time() - self.changed < LIVE_SECONDS

    def as_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON does not know become null."""
        numbers = {key: value if np.isfinite(value) else None for key, value in self.numbers.items()}
        about = (self.name, self.step, self.seconds, self.changed, self.level, self.verdict)
        keys = ("name", "step", "seconds", "changed", "level", "verdict")
        return {**dict(zip(keys, about, strict=True)), "numbers": numbers, "live": self.live}


def find_runs(root: Path) -> dict[str, Path]:
    """Every run under a folder, by its path within it. Links are not followed: they may lead anywhere.

    A folder that is a run itself is the only one.
    """
    if not root.is_dir():
        raise StoreError(f"{root} is not a folder; expected one with runs in it")
    root = root.resolve()
    if is_run(root):
        return {root.name: root}
    found: dict[str, Path] = {}
    for folder, inner, files in os.walk(root, followlinks=False):
        here = Path(folder)
        inner.sort()
        if FILE in files and is_run(here):
            found[here.relative_to(root).as_posix()] = here
            inner.clear()
        elif len(here.relative_to(root).parts) >= DEEPEST:
            inner.clear()
        if len(found) >= MOST_RUNS:
            break
    return found


def is_run(folder: Path) -> bool:
    """Whether there is a store in it, a file of its own and not a link to one elsewhere."""
    files = [folder / f"{FILE}{end}" for end in ("", "-wal", "-shm")]
    return files[0].is_file() and not any(file.is_symlink() for file in files)


def stamp(folder: Path) -> tuple[float, int]:
    """Changes whenever the store does: when it was written to, and its size with the write-ahead log."""
    last, size = 0.0, 0
    for file in (folder / FILE, folder / f"{FILE}-wal"):
        try:
            found = file.stat()
        except OSError:
            continue
        if found.st_size:  # whoever reads leaves an empty log behind: that is no change
            last, size = max(last, found.st_mtime), size + found.st_size
    return last, size


def summarise(name: str, folder: Path) -> Summary:
    """A run in a line, whatever is wrong with it."""
    changed, size = stamp(folder)
    if not size:
        return Summary(name, changed=changed, verdict="the run is starting: its store is still empty")
    try:
        history = latest(folder, lambda n: n.startswith(("log/", "run/time")))
        level, verdict = recorded(history.events)
        ended = bool(history.meta.get("finished"))
        return Summary(name, *progress(history), changed, level, verdict, numbers_of(history), ended)
    except Exception as error:  # a foreign file may be wrong in any way, and the others go on
        return Summary(name, changed=changed, level="broken", verdict=reason(error, folder))


def progress(history: History) -> tuple[int, float | None]:
    """The last step and how long the run took to get there."""
    seconds = history.get("run/time")
    return history.last_step, float(seconds.last) if len(seconds) else None


def numbers_of(history: History) -> dict[str, float]:
    """The latest of what was logged, by its own name."""
    return {
        name[4:]: float(series.last)
        for (name, where), series in history.series.items()
        if name.startswith("log/") and not where and len(series) and series.values.ndim == 1
    }


def recorded(events: Sequence[Event]) -> tuple[str, str]:
    """The worst that a run says was found in it, and how much: what is known before the rules have looked."""
    counts = Counter((e.severity, e.rule, e.where) for e in events if e.kind == "finding")
    levels: Counter[str] = Counter(severity for severity, _, _ in counts)
    words = {"act": "to act on", "warn": "to look at", "info": "to know"}
    parts = [f"{levels[severity]} {text}" for severity, text in words.items() if levels[severity]]
    level = next((severity for severity in words if levels[severity]), "fine")
    return level, ", ".join(parts) if parts else "nothing found"


def reason(error: Exception, folder: Path) -> str:
    """Why a store cannot be shown, without the path in front of it."""
    text = str(error) or type(error).__name__
    return text.replace(str(folder / FILE), FILE).replace(f"{folder}{os.sep}", "")[:300]
