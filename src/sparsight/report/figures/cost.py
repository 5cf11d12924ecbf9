"""What a run costs: FLOPs against the dense model, time."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from sparsight.dynamics.history import History, Series
from sparsight.report.figures import look
from sparsight.report.figures.lines import curve, smooth


def flops(history: History) -> go.Figure | None:
    """FLOPs of a training step and of all steps so far, over those of the dense model; below it is saved."""
    ratio = history.get("sparse/flops_ratio")
    if not len(ratio):
        return None
    so_far = Series(ratio.steps, spent(ratio, ratio.steps) / np.maximum(ratio.steps, 1))
    figure = look.blank()
    figure.add_trace(curve(ratio, "a step", look.BLUE, unit="%"))
    figure.add_trace(curve(so_far, "all so far", look.RED, unit="%"))
    figure.add_hline(y=1, line=dict(color=look.NEUTRAL, width=1, dash="dot"))
    bounds = look.vertical(
        figure, [ratio.values, so_far.values], "FLOPs, dense = 100 %", percent=True, zero=True, top=1.0
    )
    saved = 1 - float(so_far.last)
    ends = [("a step", look.BLUE, float(ratio.last)), ("all so far", look.RED, float(so_far.last))]
    look.label_ends(figure, [*ends, (f"dense: {saved:.0%} saved", look.NEUTRAL, 1.0)], bounds)
    return look.over_steps(figure, history.last_step)


def spent(ratio: Series, steps: np.ndarray) -> np.ndarray:
    """FLOPs up to each step, in steps of the dense model; before the first reading its ratio counts."""
    if not len(ratio):
        return np.asarray(steps, np.float64)
    edges = np.concatenate([[0], ratio.steps])
    total = np.concatenate([[0.0], np.cumsum(np.diff(edges) * ratio.values)])
    beyond = np.maximum(steps - edges[-1], 0) * ratio.values[-1]
    return np.asarray(np.interp(steps, edges, total) + beyond)


def pace(history: History) -> go.Figure | None:
    """Time of a step."""
    seconds = history.get("run/step_seconds")
    if not len(seconds):
        return None
    milli = Series(seconds.steps, seconds.values * 1000)
    figure = look.blank()
    noisy = len(milli) > 40
    figure.add_trace(
        curve(milli, "ms a step", look.BLUE, width=1 if noisy else 2, opacity=0.35 if noisy else 1)
    )
    if noisy:
        figure.add_trace(curve(smooth(milli), "ms a step, smoothed", look.BLUE))
    finite = milli.values[np.isfinite(milli.values)]
    most = float(np.quantile(finite, 0.98)) if len(finite) else 1.0  # the first step compiles and warms up
    look.vertical(figure, [[0.0, most]], "milliseconds a step", zero=True)
    return look.over_steps(figure, history.last_step)
