"""Sparse paths: who gets the tokens, how sure the routers are, who learns."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from sparsight.dynamics.history import History, Series
from sparsight.report.figures import look
from sparsight.report.figures.grid import MOST_CELLS, colour_bar, frames_of, slider
from sparsight.report.figures.lines import Role, by_layer, roles
from sparsight.report.figures.spectrum import histogram_by_layer

TOKENS = "moe/tokens_per_expert"


def relative_load(series: Series) -> np.ndarray:
    """[n, experts]: the share of the tokens an expert got, over the even share; 1 is balance."""
    tokens = np.atleast_2d(series.values)
    total = np.nansum(tokens, axis=1, keepdims=True)
    experts = np.sum(~np.isnan(tokens), axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(total > 0, tokens * experts / total, np.nan))


def load(history: History) -> go.Figure | None:
    """Layer × expert: load over the even share, with a slider over the steps."""
    layers = {w: history.get(TOKENS, w) for w in history.places(TOKENS)}
    layers = {w: s for w, s in layers.items() if len(s) and s.values.ndim == 2}
    if not layers:
        return None
    width = max(s.values.shape[1] for s in layers.values())
    layers = dict(list(layers.items())[: max(MOST_CELLS // width, 1)])
    loads = {where: relative_load(series) for where, series in layers.items()}
    steps = frames_of(np.unique(np.concatenate([s.steps for s in layers.values()])), len(layers) * width)
    pictures = []
    for step in steps:
        picture = np.full((len(layers), width), np.nan, np.float32)
        for row, (where, series) in enumerate(layers.items()):
            at = int(np.searchsorted(series.steps, step, side="right")) - 1
            if at >= 0:
                picture[row, : loads[where].shape[1]] = loads[where][at]
        pictures.append(picture)
    names = [look.plain(name) for name in look.short_names(list(layers))]
    figure = look.blank(height=min(max(130 + 24 * len(layers), 215), 620))
    figure.add_trace(
        go.Heatmap(
            z=pictures[-1],
            y=names,
            colorscale=look.SEQUENTIAL,
            zmin=0,
            zmax=_brightest(pictures),
            xgap=1,
            ygap=1,
            colorbar=colour_bar("× even share"),
            hovertemplate="%{y}, expert %{x}: %{z:.2f} × the even share<extra></extra>",
        )
    )
    figure.update_xaxes(title_text="expert", showgrid=False, tickformat="d", dtick=1 if width <= 16 else None)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    slider(figure, steps, pictures)
    return figure


def load_layer(history: History, layer: str | None = None) -> go.Figure | None:
    """Expert × step for one layer (the first where none is named)."""
    places = history.places(TOKENS)
    where = layer if layer in places else next(iter(places), None)
    if where is None:
        return None
    series = history.get(TOKENS, where)
    if not len(series) or series.values.ndim != 2:
        return None
    loads = relative_load(series).astype(np.float32)
    figure = look.blank()
    figure.add_trace(
        go.Heatmap(
            z=loads.T,
            x=series.steps,
            colorscale=look.SEQUENTIAL,
            zmin=0,
            zmax=_brightest([loads]),
            colorbar=colour_bar("× even share"),
            hovertemplate="step %{x:,}, expert %{y}: %{z:.2f} × the even share<extra></extra>",
        )
    )
    figure.update_yaxes(title_text="expert", showgrid=False, tickformat="d", autorange="reversed")
    if loads.shape[1] <= 16:
        figure.update_yaxes(dtick=2 if loads.shape[1] > 8 else 1)
    return look.over_steps(figure, history.last_step)


def _brightest(pictures: list[np.ndarray]) -> float:
    finite = np.concatenate([p[np.isfinite(p)].ravel() for p in pictures])
    return float(max(2.0, np.quantile(finite, 0.99))) if len(finite) else 2.0


def entropy(history: History) -> go.Figure | None:
    """Token entropy and load entropy: both low is collapse, low and high is specialisation."""
    parts = (
        Role("moe/router_entropy", "token entropy", look.BLUE),
        Role("moe/load_entropy", "load entropy", look.RED),
    )
    return roles(history, parts, "share of the maximum", top=1.0)


def experts(history: History) -> go.Figure | None:
    """Dead experts, and tokens dropped because an expert was full."""
    parts = (
        Role("moe/dead_expert_frac", "dead experts", look.RED),
        Role("moe/drop_rate", "dropped tokens", look.BLUE),
    )
    return roles(history, parts, "share", percent=True, top=0.05)


def overload(history: History) -> go.Figure | None:
    """How far the busiest expert is above the mean load, by layer."""
    return by_layer(history, "moe/max_vio", "busiest over mean load − 1")


def gate(history: History) -> go.Figure | None:
    """How sure the gates are: saturated gates pass no gradient."""
    parts = (
        Role("moe/gate_saturation", "saturated", look.RED),
        Role("moe/gate_top1_prob", "top probability", look.BLUE),
        Role("moe/singleton_frac", "one choice left", look.PURPLE),
    )
    return roles(history, parts, "share of tokens, probability", top=1.0)


def mutual(history: History) -> go.Figure | None:
    """What a token tells about its expert, by layer."""
    return by_layer(history, "moe/routing_mi", "nats")


def similarity(history: History) -> go.Figure | None:
    """Whether the experts are all alike."""
    parts = (
        Role("moe/similarity", "of weights", look.BLUE),
        Role("moe/output_similarity", "of outputs", look.RED),
    )
    return roles(history, parts, "mean cosine between experts", top=1.0)


def expert_updates(history: History) -> go.Figure | None:
    """How many experts have a gradient in how many of the steps."""

    def bins(freq: np.ndarray) -> np.ndarray:
        counts, _ = np.histogram(freq[np.isfinite(freq)], bins=10, range=(0, 1))
        return np.asarray(counts / max(counts.sum(), 1))

    return histogram_by_layer(history, "moe/update_freq", "share of the experts", bins)


def depth(history: History) -> go.Figure | None:
    """Tokens that went through a block, and how sure its gate is."""
    parts = (
        Role("depth/taken", "tokens taken", look.BLUE),
        Role("depth/gate_mean", "mean gate", look.GREEN),
        Role("depth/gate_saturation", "saturated", look.RED),
    )
    return roles(history, parts, "share", percent=True, top=1.0)
