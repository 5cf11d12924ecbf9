"""What the user logs: loss, and quality."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from sparsight.dynamics.history import History, Series
from sparsight.report.figures import look
from sparsight.report.figures.lines import NOISY, curve, smooth

LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "nll", "error", "bits", "bpc", "entropy")


def is_loss(name: str) -> bool:
    """Whether a logged quantity is better when it is lower, as far as its name tells.

    >>> is_loss("log/valid_loss"), is_loss("log/accuracy")
    (True, False)
    """
    return any(word in name.rpartition("/")[2].lower() for word in LOWER_IS_BETTER)


def is_logged_loss(name: str) -> bool:
    """Whether a record belongs into the chart of losses."""
    return name.startswith("log/") and is_loss(name)


def is_quality(name: str) -> bool:
    """Whether a record belongs into the chart of quality."""
    return name.startswith("log/") and not is_loss(name)


def logged(history: History) -> dict[str, Series]:
    """What `watch.log` was told, by its own name."""
    found = {}
    for (name, where), series in history.series.items():
        if name.startswith("log/") and series.values.ndim == 1 and len(series):
            found[name[4:] + (f" ({where})" if where else "")] = series
    return found


def loss(history: History) -> go.Figure | None:
    """Losses and whatever else falls while a model learns."""
    return _curves(history, [name for name in logged(history) if is_loss(name)], "loss")


def quality(history: History) -> go.Figure | None:
    """Accuracy, BLEU and whatever else rises while a model learns."""
    return _curves(history, [name for name in logged(history) if not is_loss(name)], "quality")


def _curves(history: History, names: Sequence[str], title: str) -> go.Figure | None:
    if not names:
        return None
    figure, series = look.blank(), logged(history)
    ends = []
    for i, name in enumerate(names):
        colour, one = look.PALETTE[i % len(look.PALETTE)], series[name]
        noisy = len(one) > NOISY
        figure.add_trace(curve(one, name, colour, width=1 if noisy else 2, opacity=0.35 if noisy else 1))
        if noisy:
            one = smooth(one)
            figure.add_trace(curve(one, f"{name}, smoothed", colour, width=2.2))
        ends.append((look.plain(name, look.LONGEST), colour, float(one.last)))
    values = [series[name].values for name in names]
    low, high = spread(values)
    shares = title == "quality" and low >= 0 and high <= 1
    log = title == "loss" and low > 0 and high / low > 15
    if log:
        room = (high / low) ** 0.05
        bounds = (low / room, high * room)
        figure.update_yaxes(type="log", title_text=title, range=np.log10(bounds).tolist(), dtick="D1")
        figure.update_yaxes(nticks=5, dtick=None)
    else:
        bounds = look.vertical(figure, [[low, high]], title, percent=shares)
    if len(names) <= look.MOST_LABELS:
        look.label_ends(figure, ends, bounds, log=log)
    else:
        figure.update_layout(showlegend=True, legend=dict(orientation="h", y=-0.25), height=look.HEIGHT + 60)
    return look.over_steps(figure, history.last_step)


def spread(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """The smallest and largest finite value; a first reading far above all others does not count."""
    joined = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.empty(0)
    if not len(joined):
        return 0.0, 1.0
    return float(joined.min()), float(joined.max())
