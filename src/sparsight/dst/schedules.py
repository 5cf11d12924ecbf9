"""Numbers that follow the step: `Schedule = Callable[[int], float]`. Any function of the step will do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Schedule = Callable[[int], float]


def _progress(step: int, begin: int, end: int) -> float:
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


def _check(name: str, begin: int, end: int) -> None:
    if not 0 <= begin < end:
        raise ValueError(f"{name}: expected 0 <= begin < end, got begin={begin}, end={end}")


@dataclass(frozen=True)
class constant:  # noqa: N801 - a schedule reads like a function call
    """The same number at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class cosine:  # noqa: N801
    """last + (first − last)/2 · (1 + cos(π·progress)): RigL's drop fraction with last = 0.

    >>> f = cosine(0.3, end=100)
    >>> f(0), round(f(50), 3), f(100)
    (0.3, 0.15, 0.0)
    """

    first: float
    last: float = 0.0
    begin: int = field(default=0, kw_only=True)
    end: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check("cosine", self.begin, self.end)

    def __call__(self, step: int) -> float:
        wave = 1 + math.cos(math.pi * _progress(step, self.begin, self.end))
        return self.last + (self.first - self.last) / 2 * wave


@dataclass(frozen=True)
class linear:  # noqa: N801
    """A straight line from first to last."""

    first: float
    last: float = 0.0
    begin: int = field(default=0, kw_only=True)
    end: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check("linear", self.begin, self.end)

    def __call__(self, step: int) -> float:
        return self.last + (self.first - self.last) * (1 - _progress(step, self.begin, self.end))


@dataclass(frozen=True)
class cubic:  # noqa: N801
    """last + (first − last)·(1 − progress)³: gradual magnitude pruning (Zhu & Gupta, 2017).

    >>> f = cubic(1.0, end=10)
    >>> f(0), f(5), f(10)
    (1.0, 0.125, 0.0)
    """

    first: float
    last: float = 0.0
    begin: int = field(default=0, kw_only=True)
    end: int = field(kw_only=True)

    def __post_init__(self) -> None:
        _check("cubic", self.begin, self.end)

    def __call__(self, step: int) -> float:
        rest = 1 - _progress(step, self.begin, self.end)
        return self.last + (self.first - self.last) * rest**3


@dataclass(frozen=True)
class exponential:  # noqa: N801
    """first · 2^(−step / half_life)."""

    first: float
    half_life: float

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise ValueError(f"exponential: half_life must be positive, got {self.half_life}")

    def __call__(self, step: int) -> float:
        return float(self.first * 0.5 ** (step / self.half_life))


@dataclass(frozen=True)
class every:  # noqa: N801
    """True at `start`, each `period` steps after it, and at `end`; never after `end`.

    `start` is one period by default: the first update comes after `period` steps.

    >>> [t for t in range(12) if every(3, end=10)(t)]
    [3, 6, 9, 10]
    """

    period: int
    start: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"every: period must be at least 1 step, got {self.period}")
        start = self.period if self.start is None else self.start
        if self.end is not None and (not isinstance(self.end, int) or self.end < start):
            raise ValueError(
                f"every: end must be a step, {start} (the first) or later, or None; got {self.end}"
            )

    def __call__(self, step: int) -> bool:
        start = self.period if self.start is None else self.start
        if step < start or (self.end is not None and step > self.end):
            return False
        return step == self.end or (step - start) % self.period == 0


@dataclass(frozen=True)
class alternating:  # noqa: N801
    """1 until `begin`, then 0 and 1 in turn for `phase` steps each, and 0 from `end` on.

    >>> [alternating(2, begin=2, end=8)(t) for t in range(10)]
    [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """

    phase: int
    begin: int = field(kw_only=True)
    end: int = field(kw_only=True)

    def __call__(self, step: int) -> float:
        if step < self.begin:
            return 1.0
        return 0.0 if step >= self.end or (step - self.begin) // self.phase % 2 == 0 else 1.0


@dataclass(frozen=True)
class changes:  # noqa: N801
    """True at the steps where a schedule takes another value than the step before."""

    schedule: Schedule

    def __call__(self, step: int) -> bool:
        return step > 0 and self.schedule(step) != self.schedule(step - 1)


def never(step: int) -> bool:
    """Never due."""
    return False
