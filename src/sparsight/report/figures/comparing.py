"""Overlays of several runs: one line a group, with the spread over its seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from sparsight.health.rules.comparison import direction
from sparsight.report.figures import look
from sparsight.report.sides import GRID, Axis, Floats, Group, common_end, curve_of


def overlay(groups: Sequence[Group], metric: str, axis: Axis) -> go.Figure | None:
    """A metric over what was spent; the dotted line is as far as all have come."""
    figure = look.blank()
    ends, values = [], []
    colours = _colours(len(groups))
    for one, colour in zip(groups, colours, strict=True):
        found = [c for h in one.runs.values() if (c := curve_of(h, metric, axis)) is not None]
        if not found:
            continue
        x, mean, deviation = together([thin(*c) for c in found])
        if deviation is not None:
            figure.add_trace(_band(x, mean, deviation, colour))
            values += [mean - deviation, mean + deviation]
        figure.add_trace(
            go.Scatter(
                x=x,
                y=mean,
                name=look.plain(one.label),
                mode="lines" if len(x) > 1 else "markers",
                line=dict(color=colour, width=2),
                hovertemplate="%{fullData.name}<br>%{x:,.4~g}: %{y:.4~g}<extra></extra>",
            )
        )
        values.append(mean)
        ends.append((look.plain(one.label, look.LONGEST), colour, float(mean[-1])))
    if not values:
        return None
    joined = np.concatenate(values)
    shares = bool(direction(metric) >= 0 and np.nanmin(joined) >= 0 and np.nanmax(joined) <= 1)
    bounds = look.vertical(figure, values, look.plain(metric), percent=shares)
    if len(ends) <= look.MOST_LABELS:
        look.label_ends(figure, ends, bounds)
    else:
        figure.update_layout(showlegend=True, legend=dict(orientation="h", y=-0.3), height=look.HEIGHT + 80)
    figure.update_xaxes(title_text=axis.unit, tickformat="~s", rangemode="tozero")
    if len(groups) > 1 and (end := common_end(groups, metric, axis)) is not None:
        figure.add_vline(x=end, line=dict(color=look.NEUTRAL, width=1, dash="dot"))
    return figure


def together(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats | None]:
    """Mean and standard deviation over runs, up to where the shortest ends; one run is as it is."""
    if len(curves) == 1:
        return *curves[0], None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.linspace(first, max(last, first), GRID)
    values = np.array([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(axis=0), values.std(axis=0, ddof=1)


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """A smooth curve at most a few hundred points long."""
    if len(x) <= 2 * GRID:
        return x, y
    grid = np.linspace(x[0], x[-1], 2 * GRID)
    return grid, np.interp(grid, x, y)


def _band(x: Floats, mean: Floats, deviation: Floats, colour: str) -> go.Scatter:
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([mean + deviation, (mean - deviation)[::-1]]),
        fill="toself",
        fillcolor=colour,
        opacity=0.18,
        line=dict(width=0),
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )


def _colours(count: int) -> list[str]:
    return list(look.PALETTE[:count]) if count <= len(look.PALETTE) else look.layer_colours(count)
