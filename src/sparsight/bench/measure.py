"""Timing by turns: candidates take turns within every repeat, so that a slow moment hits all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline: median over repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}×"


def by_turns(
    candidates: Mapping[str, Callable[[], object]], *, repeats: int = 11, seconds: float = 0.02
) -> dict[str, list[float]]:
    """Seconds a call, `repeats` times for each candidate, in turns.

    Every timing makes enough calls to last about `seconds`; one untimed round comes first.
    """
    calls = {}
    for name, call in candidates.items():
        call()
        begin = time.perf_counter()
        call()
        calls[name] = max(int(seconds / max(time.perf_counter() - begin, 1e-7)), 1)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    gc.disable()
    try:
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                call = candidates[name]
                begin = time.perf_counter()
                for _ in range(calls[name]):
                    call()
                times[name].append((time.perf_counter() - begin) / calls[name])
    finally:
        gc.enable()
    return times


def ratio(baseline: list[float], candidate: list[float]) -> Ratio:
    """Baseline time over candidate time, turn by turn.

    >>> ratio([2.0, 2.0, 4.0], [1.0, 1.0, 1.0]).median
    2.0
    """
    pairs = sorted(base / own for base, own in zip(baseline, candidate, strict=True))
    low, _, high = statistics.quantiles(pairs, n=4)
    return Ratio(statistics.median(pairs), low, high)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
