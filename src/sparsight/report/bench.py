"""A bench that judges runs one after the other in the background, so that no page waits for a verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparsight.report.health import Judgement, judge_now

REST = 10.0
"""A run is judged again after so many times what judging it took."""
SHORTEST = 2.0

Stamp = tuple[float, int]


class Bench:
    """Judgements by folder. What is asked for and not known, or old, is judged soon."""

    def __init__(self, judge: Callable[[Path], Judgement] = judge_now) -> None:
        self._judge = judge
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._known: dict[Path, tuple[Stamp, Judgement | None]] = {}
        self._due: dict[Path, float] = {}
        self._asked: set[Path] = set()
        self._lock = threading.Lock()

    def judgement(self, folder: Path, now: Stamp) -> Judgement | None:
        """The latest there is; None before the first."""
        with self._lock:
            stamp, judged = self._known.get(folder, (None, None))
            late = time.monotonic() >= self._due.get(folder, 0.0)
            if stamp != now and late and folder not in self._asked:
                self._asked.add(folder)
                self._worker.submit(self._look, folder, now)
            return judged

    def _look(self, folder: Path, now: Stamp) -> None:
        begin = time.monotonic()
        judged: Judgement | None
        try:
            judged = self._judge(folder)
        except Exception:  # the store is broken; whoever reads it to show it says so
            judged = None
        took = time.monotonic() - begin
        with self._lock:
            self._known[folder] = (now, judged)
            self._due[folder] = time.monotonic() + max(SHORTEST, REST * took)
            self._asked.discard(folder)
        time.sleep(min(took, 1.0))  # half of a core is left to whoever trains here

    def close(self) -> None:
        """Finish nothing more."""
        self._worker.shutdown(wait=False, cancel_futures=True)
