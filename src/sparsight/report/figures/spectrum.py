"""Histograms of how often parameters learn, and of how long connections live."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go

from sparsight.dynamics.history import History
from sparsight.report.figures import look
from sparsight.report.figures.lines import depth_scale

CENTRES = np.arange(5, 100, 10)


def histogram_by_layer(
    history: History, name: str, title: str, bins: Callable[[np.ndarray], np.ndarray]
) -> go.Figure | None:
    """The latest histogram over ten bins: bars for all layers together, an outline for each."""
    found = {}
    for where in history.places(name):
        series = history.get(name, where)
        if len(series) and series.values.ndim == 2:
            share = bins(np.asarray(series.last))
            if share.shape == (10,) and np.isfinite(share).all():
                found[where] = share
    if not found:
        return None
    figure = look.blank()
    figure.add_trace(
        go.Bar(
            x=CENTRES,
            width=9.4,
            y=np.mean(list(found.values()), axis=0),
            name="all layers",
            marker=dict(color=look.NEUTRAL, opacity=0.35),
            hovertemplate="all layers: %{y:.1%} in about %{x} % of the steps<extra></extra>",
        )
    )
    names, colours = look.short_names(list(found)), look.layer_colours(len(found))
    for (where, share), colour in zip(found.items(), colours, strict=True):
        figure.add_trace(
            go.Scatter(
                x=[0, *CENTRES.tolist(), 100],  # the outline goes to both edges
                y=[share[0], *share.tolist(), share[-1]],
                name=look.plain(where),
                mode="lines",
                line=dict(color=colour, width=1.6, shape="hvh"),
                hovertemplate="%{fullData.name}: %{y:.1%} in about %{x} % of the steps<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="steps with a gradient", range=[0, 100], dtick=20, ticksuffix=" %")
    look.vertical(figure, [*found.values()], title, percent=True, zero=True)
    if len(found) > look.MOST_LABELS:
        depth_scale(figure, names)
    elif len(found) > 1:
        for trace, short in zip(figure.data[1:], names, strict=True):
            trace.name = look.plain(short)
        figure.update_layout(showlegend=True, legend=dict(x=0.5, xanchor="center", y=1, yanchor="top"))
    return figure
