"""Sparse weights: how many there are, how they are exchanged, and where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from sparsight.dynamics.history import History
from sparsight.report.figures import look
from sparsight.report.figures.grid import colour_bar, frames_of, slider
from sparsight.report.figures.lines import Role, by_layer, depth_scale, roles
from sparsight.report.figures.spectrum import histogram_by_layer

MAP = "sparse/topology_map"


def density(history: History) -> go.Figure | None:
    """Existing weights over positions."""
    return by_layer(history, "sparse/density", "share of the positions", percent=True)


def churn(history: History) -> go.Figure | None:
    """What each update replaced."""
    return by_layer(history, "sparse/churn", "share of the weights", percent=True)


def itop(history: History) -> go.Figure | None:
    """Positions that have existed at some time: what has been explored."""
    return by_layer(history, "sparse/itop_rate", "share of the positions", percent=True)


def survival(history: History) -> go.Figure | None:
    """Of the weights grown 1 to 5 updates ago, the share that still exists: the latest reading."""
    found = {}
    for where in history.places("sparse/survival"):
        series = history.get("sparse/survival", where)
        vectors = series.values if series.values.ndim == 2 else np.empty((0, 1))
        known = np.flatnonzero(np.isfinite(vectors).any(axis=1))
        if len(known):
            found[where] = series.values[known[-1]]
    if not found:
        return None
    figure = look.blank()
    names, colours = look.short_names(list(found)), look.layer_colours(len(found))
    ends = []
    for (where, values), short, colour in zip(found.items(), names, colours, strict=True):
        figure.add_trace(
            go.Scatter(
                x=np.arange(1, len(values) + 1),
                y=values.astype(np.float32),
                name=look.plain(where),
                mode="lines+markers",
                line=dict(color=colour, width=1.8),
                marker=dict(size=6),
                hovertemplate="%{fullData.name}: %{y:.1%} after %{x} updates<extra></extra>",
            )
        )
        ends.append((look.plain(short), colour, float(values[np.isfinite(values)][-1])))
    bounds = look.vertical(figure, list(found.values()), "still there", percent=True, zero=True, top=1.0)
    if len(found) <= look.MOST_LABELS:
        look.label_ends(figure, ends, bounds)
    else:
        depth_scale(figure, names)
    figure.update_xaxes(title_text="updates since they were grown", dtick=1)
    return figure


def dead(history: History) -> go.Figure | None:
    """Outputs without a weight, inputs that nobody reads."""
    parts = (
        Role("sparse/dead_neurons", "dead outputs", look.RED),
        Role("sparse/dead_inputs", "unread inputs", look.BLUE),
    )
    return roles(history, parts, "share", percent=True, top=0.05)


def updates(history: History) -> go.Figure | None:
    """How many weights have a gradient in how many of the steps."""

    def bins(counts: np.ndarray) -> np.ndarray:
        return np.asarray(counts / counts.sum() if counts.sum() > 0 else counts)

    return histogram_by_layer(history, "sparse/update_freq", "share of the weights", bins)


def effective_lr(history: History) -> go.Figure | None:
    """How far a layer's weights move for the learning rate, over the mean of all layers."""
    for name in ("sparse/effective_lr", "dense/effective_lr"):
        figure = by_layer(history, name, "× the mean over layers")
        if figure is not None:
            return figure
    return None


def grad_norm(history: History) -> go.Figure | None:
    """Gradient norms of the layers without experts."""
    for name in ("sparse/grad_norm", "dense/grad_norm"):
        figure = by_layer(history, name, "norm of the gradient")
        if figure is not None:
            return figure
    return None


def topology(history: History, layer: str | None = None) -> go.Figure | None:
    """Where the weights of a layer (the first where none is named) are, with a slider over the steps."""
    places = history.places(MAP)
    where = layer if layer in places else next(iter(places), None)
    if where is None:
        return None
    series = history.get(MAP, where)
    if not len(series) or series.values.ndim != 2:
        return None
    about = _about(history, where)
    rows, columns = _grid(about, series.values.shape[1])
    steps = frames_of(series.steps, rows * columns)
    at = np.searchsorted(series.steps, steps)
    pictures = [series.values[i].reshape(rows, columns).astype(np.float32) for i in at]
    finite = np.concatenate([p[np.isfinite(p)] for p in pictures])
    brightest = float(np.quantile(finite, 0.995)) if len(finite) else 1.0
    figure = look.blank(height=look.HEIGHT + 90)
    figure.add_trace(
        go.Heatmap(
            z=pictures[-1],
            colorscale=look.SEQUENTIAL,
            zmin=0,
            zmax=brightest or 1.0,
            colorbar=colour_bar("density", tickformat=".0%"),
            hovertemplate="%{z:.1%} of the weights of this cell exist<extra></extra>",
        )
    )
    outputs, inputs = _sizes(about)
    figure.update_xaxes(title_text=f"inputs{inputs}", showticklabels=False, showgrid=False)
    figure.update_yaxes(
        title_text=f"outputs{outputs}", showticklabels=False, showgrid=False, autorange="reversed"
    )
    slider(figure, steps, pictures)
    return figure


def _about(history: History, where: str) -> dict[str, Any]:
    layers = history.meta.get("layers")
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict) and layer.get("name") == where and layer.get("family") == "sparse":
            return layer
    return {}


def _grid(about: dict[str, Any], cells: int) -> tuple[int, int]:
    """Rows and columns as the run says; else as square as the number of cells allows."""
    said = about.get("map")
    if isinstance(said, list) and len(said) == 2 and all(isinstance(n, int) and n > 0 for n in said):
        rows, columns = said
        if rows * columns == cells:
            return rows, columns
    rows = next(n for n in range(int(cells**0.5) or 1, 0, -1) if cells % n == 0)
    return rows, cells // rows


def _sizes(about: dict[str, Any]) -> tuple[str, str]:
    shape = about.get("shape")
    if isinstance(shape, list) and shape and all(isinstance(n, int) for n in shape):
        return f" ({shape[0]:,})", f" ({int(np.prod(shape[1:])):,})"
    return "", ""
