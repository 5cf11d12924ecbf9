"""Rules on what the model is for: its loss, and how it holds under shift."""

from __future__ import annotations

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.looking import Numbers, middle, percent, scalars

_LOSSES = ("log/loss", "log/train_loss", "log/training_loss")


def loss_of(history: History) -> Series:
    """The training loss, under the first of its usual names that was logged."""
    for name in _LOSSES:
        series = scalars(history, name)
        if len(series):
            return series
    return scalars(history, _LOSSES[0])


def loss_not_finite(history: History) -> list[Finding]:
    """The loss is NaN or infinite: nothing learned from here on is of use."""
    series = loss_of(history)
    if not len(series) or np.isfinite(series.last):
        return []
    fine = np.flatnonzero(np.isfinite(series.values))
    onset = int(series.steps[fine[-1] + 1]) if len(fine) else int(series.steps[0])
    return [
        Finding(
            "loss_not_finite",
            "act",
            "",
            int(series.steps[-1]),
            onset,
            f"the model: the loss is {'NaN' if np.isnan(series.last) else 'infinite'} since step {onset}.",
            {"last_finite_step": int(series.steps[fine[-1]]) if len(fine) else None},
        )
    ]


def loss_diverging(history: History, *, back: float = 0.5, window: int = 5) -> list[Finding]:
    """The loss has lost `back` of what it had gained, and by more than its noise.

    Gained is what lies between the first readings and the best window so far. Having lost all of it, the
    model is worse than when it began, and that must be acted on.
    """
    series = _finite(loss_of(history))
    if len(series) < 3 * window:
        return []
    middles = _windows(series.values, window)
    start, now = float(middles[0]), float(middles[-1])
    best = int(middles[:-window].argmin()) if len(middles) > window else 0
    low = float(middles[best])
    # Noise about the best place, by second differences: a loss that falls steadily has none.
    about = series.values[max(0, best - window) : best + 2 * window]
    noise = middle(np.abs(np.diff(about, 2))) / 2
    gained, lost = start - low, now - low
    if not lost > 6 * noise or not lost > back * gained or not lost > 0.1 * max(abs(low), abs(start)):
        return []
    above = np.flatnonzero(series.values <= low + 3 * noise)
    onset = int(series.steps[above[-1]]) if len(above) else int(series.steps[0])
    return [
        Finding(
            "loss_diverging",
            "act" if now >= start + 3 * noise else "warn",
            "",
            int(series.steps[-1]),
            onset,
            f"the model: the loss went from {low:.3g} back to {now:.3g} since step {onset}; it began at "
            f"{start:.3g}.",
            {"start": start, "best": low, "now": now},
        )
    ]


def not_learning(
    history: History, *, patience: int = 200, readings: int = 20, gain: float = 0.01
) -> list[Finding]:
    """After `patience` steps the loss is where it began: less than `gain` of it was won."""
    series = _finite(loss_of(history))
    if len(series) < readings or int(series.steps[-1] - series.steps[0]) < patience * 0.9:
        return []
    if int(series.steps[0]) > patience:
        return []  # a part of a run: that it is flat there does not mean that it was never learning
    size = max(3, readings // 4)
    start, now = middle(series.values[:size]), middle(series.values[-size:])
    low = float(_windows(series.values[-10 * readings :], size).min())
    if start - low > gain * abs(start):
        return []
    onset, step = int(series.steps[0]), int(series.steps[-1])
    return [
        Finding(
            "not_learning",
            "warn",
            "",
            step,
            onset,
            f"the model: the loss was {start:.3g} at step {onset} and is {now:.3g} at step {step}; nothing "
            "was learned.",
            {"start": start, "now": now},
        )
    ]


def falls_under_shift(
    history: History, *, worth_a_look: float = 0.25, too_much: float = 0.5
) -> list[Finding]:
    """Quality under a shift (`sp.stress`) is much below the clean quality: more is better, 0 is worthless.

    A model that loses half of its quality to a change of its inputs must not be used where they change.
    """
    found = []
    clean = scalars(history, "stress/quality")
    if not len(clean) or not np.isfinite(clean.last) or not clean.last > 0:
        return []
    for shift in history.places("stress/quality"):
        series = scalars(history, "stress/quality", shift)
        if not len(series) or not np.isfinite(series.last):
            continue
        loss = 1 - float(series.last) / float(clean.last)
        if loss < worth_a_look:
            continue
        step = int(series.steps[-1])
        found.append(
            Finding(
                "falls_under_shift",
                "act" if loss >= too_much else "warn",
                shift,
                step,
                step,
                f"{shift}: under this shift quality falls from {float(clean.last):.3g} to "
                f"{float(series.last):.3g}, by {percent(loss)}.",
                {"clean": float(clean.last), "shifted": float(series.last), "loss": loss},
            )
        )
    return found


def _finite(series: Series) -> Series:
    """The finite readings; of a run with very many, the first ones and the last 20,000."""
    good = np.isfinite(series.values)
    steps, values = series.steps[good], series.values[good]
    if len(values) > 20_100:
        steps = np.concatenate((steps[:100], steps[-20_000:]))
        values = np.concatenate((values[:100], values[-20_000:]))
    return Series(steps, values)


def _windows(values: Numbers, size: int) -> Numbers:
    """Medians of all windows of a size."""
    ordered = np.sort(np.lib.stride_tricks.sliding_window_view(values, size), axis=1)
    return np.asarray((ordered[:, (size - 1) // 2] + ordered[:, size // 2]) / 2)
