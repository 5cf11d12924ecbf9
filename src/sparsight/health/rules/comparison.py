"""Rules over two runs: one, and the run it is to be better than."""

from __future__ import annotations

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.looking import middle, percent, scalars

_BETTER_UP = ("accuracy", "acc", "f1", "auc", "score", "quality", "bleu", "reward", "r2")
_BETTER_DOWN = ("loss", "error", "perplexity", "ppl", "mse", "mae", "nll", "bits")


def direction(name: str) -> int:
    """+1 where more is better, −1 where less is, 0 where the name does not tell.

    >>> direction("log/val_accuracy"), direction("log/loss"), direction("log/tokens")
    (1, -1, 0)
    """
    words = name.rpartition("/")[2].lower().split("_")
    if any(word in _BETTER_DOWN for word in words):
        return -1
    return 1 if any(word in _BETTER_UP for word in words) else 0


def speed_over_quality(
    history: History, baseline: History, *, faster: float = 1.05, worse: float = 0.02, window: int = 5
) -> list[Finding]:
    """Steps are faster than the baseline's, and after the same time the model is worse.

    A step that costs half and teaches a third is no gain: what counts is quality at equal time. Compared are
    all numbers that both runs logged and whose names tell a direction, at the end of the shorter run, each as
    the middle of the last readings by then; `worse` is relative, and must exceed the readings' noise.
    """
    mine, theirs = (middle(scalars(h, "run/step_seconds").values) for h in (history, baseline))
    clocks = [scalars(h, "run/time") for h in (history, baseline)]
    if not (mine > 0 and theirs > 0 and theirs / mine >= faster) or not all(len(c) for c in clocks):
        return []
    equal = min(float(np.nan_to_num(clock.values).max()) for clock in clocks)
    found = []
    both = sorted(set(history.names()) & set(baseline.names()))
    told = [name for name in both if name.startswith("log/") and direction(name)]
    for name in told:
        if name == "log/loss" and len(told) > 1:
            continue  # the loss of the training says less than what was measured on other data
        sign = direction(name)
        a, b = (
            _by_then(scalars(h, name), clock, equal, window)
            for h, clock in zip((history, baseline), clocks, strict=True)
        )
        if not len(a) or not len(b):
            continue
        own, other = middle(a.values), middle(b.values)
        noise = max(middle(np.abs(s.values - middle(s.values))) for s in (a, b))
        behind = sign * (other - own)
        if not behind > max(worse * abs(other), 2 * noise):
            continue
        step, quantity = int(a.steps[-1]), name.removeprefix("log/")
        found.append(
            Finding(
                "speed_over_quality",
                "warn",
                "",
                step,
                int(a.steps[0]),
                f"the model: steps are {theirs / mine:.2f} times as fast as the baseline's, but after the "
                f"same {equal:.3g} s {quantity} is {own:.3g} and the baseline's {other:.3g} "
                f"({percent(behind / max(abs(other), 1e-12))} worse): speed bought with quality.",
                {
                    "quantity": quantity,
                    "own": own,
                    "baseline": other,
                    "speed": theirs / mine,
                    "seconds": equal,
                },
            )
        )
    return found


def _by_then(series: Series, clock: Series, seconds: float, window: int) -> Series:
    """The last readings of a series that lie before a time of the run."""
    in_time = np.flatnonzero(clock.values <= seconds)
    return series.until(int(clock.steps[in_time[-1]])).tail(window) if len(in_time) else series.tail(0)
