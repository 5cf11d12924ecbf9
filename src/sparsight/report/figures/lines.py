"""Curves over steps: one quantity by layer, or a few of the whole model with their layers behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from sparsight.dynamics.history import NOTHING, History, Series
from sparsight.report.figures import look

NOISY = 120
"""From so many readings on a running mean is drawn over the curve of a whole model."""


@dataclass(frozen=True)
class Role:
    """A quantity in a chart: what it is called there, and its colour."""

    name: str
    label: str
    colour: str


def scalars(history: History, name: str) -> dict[str, Series]:
    """The layers' series of a quantity, where they are numbers."""
    found = {where: history.get(name, where) for where in history.places(name)}
    return {where: s for where, s in found.items() if s.values.ndim == 1 and len(s)}


def whole(history: History, name: str) -> Series:
    """The whole model's series; where none was recorded, the mean over layers that were read together."""
    recorded = history.get(name)
    if len(recorded) and recorded.values.ndim == 1:
        return recorded
    layers = list(scalars(history, name).values())
    if not layers or any(not np.array_equal(s.steps, layers[0].steps) for s in layers):
        return NOTHING
    return Series(layers[0].steps, np.mean([s.values for s in layers], axis=0))


def curve(
    series: Series, name: str, colour: str, *, unit: str = "", width: float = 2, **more: object
) -> go.Scatter:
    """A line; `name` is text from a store or our own and is made safe here."""
    value = "%{y:.1%}" if unit == "%" else "%{y:.4~g}"
    return go.Scatter(
        x=series.steps,
        y=series.values.astype(np.float32),
        name=look.plain(name),
        mode="lines" if len(series) > 1 else "markers",
        line=dict(color=colour, width=width),
        marker=dict(color=colour, size=7),
        # The name comes in through the trace: within the template its braces would be read.
        hovertemplate=f"%{{fullData.name}}<br>step %{{x:,}}: {value}<extra></extra>",
        **more,
    )


def by_layer(history: History, name: str, title: str, *, percent: bool = False) -> go.Figure | None:
    """One line a layer, from the first to the last, and the whole model dashed."""
    layers, mean = scalars(history, name), history.get(name)
    if not layers and not len(mean):
        return None
    figure, unit = look.blank(), "%" if percent else ""
    names = look.short_names(list(layers))
    colours = look.layer_colours(len(layers))
    ends = []
    for (where, series), short, colour in zip(layers.items(), names, colours, strict=True):
        figure.add_trace(curve(series, where, colour, unit=unit, width=1.6))
        ends.append((look.plain(short), colour, float(series.last)))
    if len(mean) and mean.values.ndim == 1 and len(layers) != 1:
        mean = smooth(mean) if len(mean) > NOISY and layers else mean
        figure.add_trace(curve(mean, "whole model", look.NEUTRAL, unit=unit, width=2.5, line_dash="dash"))
        ends.append(("whole model", look.NEUTRAL, float(mean.last)))
    values = [trace.y for trace in figure.data]
    bounds = look.vertical(figure, values, title, percent=percent, zero=percent)
    _name_lines(figure, ends, bounds, names)
    return look.over_steps(figure, history.last_step)


def _name_lines(
    figure: go.Figure, ends: list[tuple[str, str, float]], bounds: tuple[float, float], layers: Sequence[str]
) -> None:
    if len(layers) <= look.MOST_LABELS:
        look.label_ends(figure, ends, bounds)
        return
    look.label_ends(figure, [end for end in ends if end[0] == "whole model"], bounds)
    depth_scale(figure, layers)


def depth_scale(figure: go.Figure, layers: Sequence[str]) -> None:
    """Where layers are many: a strip of their colours from the first to the last in place of a legend."""
    colours = look.layer_colours(len(layers))
    strip = [colours[i] for i in np.linspace(0, len(colours) - 1, min(len(colours), 24)).astype(int)]
    cells = "".join(f'<span style="color:{colour}">■</span>' for colour in strip)
    figure.add_annotation(
        x=1,
        xref="paper",
        xanchor="right",
        y=1,
        yref="paper",
        yanchor="bottom",
        text=f"{look.plain(layers[0])} {cells} {look.plain(layers[-1])}",
        showarrow=False,
        font=dict(size=10),
    )
    figure.update_layout(margin_t=26)


def roles(
    history: History,
    parts: Sequence[Role],
    title: str,
    *,
    percent: bool = False,
    zero: bool = True,
    top: float | None = None,
) -> go.Figure | None:
    """A few quantities of the whole model, each with its layers faintly behind it."""
    figure, unit = look.blank(), "%" if percent else ""
    ends = []
    for part in parts:
        layers, mean = scalars(history, part.name), whole(history, part.name)
        for where, series in layers.items():
            if len(layers) > 1 or not len(mean):
                name = f"{part.label}: {where}"
                figure.add_trace(curve(series, name, part.colour, unit=unit, width=1, opacity=0.3))
        if len(mean):
            if len(mean) > NOISY:
                figure.add_trace(curve(mean, part.label, part.colour, unit=unit, width=1, opacity=0.3))
                mean = smooth(mean)
            figure.add_trace(curve(mean, part.label, part.colour, unit=unit, width=2.4))
            ends.append((part.label, part.colour, float(mean.last)))
        elif layers:
            ends.append((part.label, part.colour, float(next(iter(layers.values())).last)))
    if not figure.data:
        return None
    values = [trace.y for trace in figure.data]
    bounds = look.vertical(figure, values, title, percent=percent, zero=zero, top=top)
    look.label_ends(figure, ends, bounds)
    return look.over_steps(figure, history.last_step)


def smooth(series: Series) -> Series:
    """A running mean over a fiftieth of the readings, for curves that are noise at first sight.

    What is not a number stays so and does not spread.
    """
    width = max(len(series) // 50, 1)
    finite = np.isfinite(series.values)

    def window(values: NDArray[np.float64]) -> NDArray[np.float64]:
        padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
        return np.convolve(padded, np.ones(width), "valid")

    total, count = window(np.where(finite, series.values, 0.0)), window(finite.astype(np.float64))
    return Series(series.steps, np.where(finite, total / np.maximum(count, 1), np.nan))
