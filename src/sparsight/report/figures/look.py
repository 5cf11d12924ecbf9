"""How every figure looks: colours, two themes, safe text, axes, labels at the ends of lines."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

# Okabe and Ito's colours, which the colour-blind can tell apart, without the yellow and the black that
# vanish on a white or a dark page.
BLUE, RED, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
PALETTE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
NEUTRAL = "#8a8f98"
SEQUENTIAL = "Cividis"
SEVERITY = {"act": RED, "warn": ORANGE, "info": SKY}
HEIGHT = 280
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MOST_LABELS = 6
LONGEST = 22


def plain(text: object, longest: int = 400) -> str:
    """A text from a store as Plotly may show it: Plotly reads some HTML in every text it draws.

    >>> plain("<script>")
    '&lt;script&gt;'
    """
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return html.escape(shown if len(shown) <= longest else shown[: longest - 1] + "…")


def template(*, dark: bool) -> go.layout.Template:
    """The theme that a page hands to Plotly; figures themselves name no text or background colour."""
    ink, faint, line = ("#d7dae0", "#9aa0aa", "#31353d") if dark else ("#24292f", "#5f6771", "#e7e9ec")
    axis = dict(
        gridcolor=line,
        linecolor=line,
        zeroline=False,
        ticks="",
        tickfont=dict(color=faint, size=11),
        title=dict(font=dict(color=faint, size=11), standoff=6),
    )
    return go.layout.Template(
        layout=dict(
            font=dict(family=FONT, size=12, color=ink),
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            colorway=list(PALETTE),
            xaxis=axis,
            yaxis={**axis, "automargin": True},
            hoverlabel=dict(
                font=dict(family=FONT, size=12, color=ink),
                bgcolor="#1d2026" if dark else "#ffffff",
                bordercolor=line,
            ),
            legend=dict(font=dict(size=11)),
            title=dict(font=dict(size=14), x=0, xanchor="left"),
            coloraxis=dict(colorbar=dict(outlinewidth=0)),
        )
    )


def blank(*, height: int = HEIGHT) -> go.Figure:
    """An empty figure with the margins of all."""
    figure = go.Figure()
    figure.update_layout(
        template=template(dark=False),
        height=height,
        margin=dict(l=48, r=12, t=10, b=42),
        showlegend=False,
        hovermode="closest",
        uirevision="keep",  # zooming survives an update
        modebar=dict(remove=["select2d", "lasso2d", "autoScale2d"]),
    )
    return figure


def over_steps(figure: go.Figure, last: int, title: str = "step") -> go.Figure:
    """The same horizontal axis for all charts of a run, so that they can be read down the page."""
    figure.update_xaxes(title_text=title, range=[0, max(last, 1) * 1.005], tickformat="~s")
    return figure


def vertical(
    figure: go.Figure,
    values: Sequence[Any],
    title: str,
    *,
    percent: bool = False,
    zero: bool = False,
    top: float | None = None,
) -> tuple[float, float]:
    """A vertical axis that fits the values, with a little room; returns its range."""
    joined = np.concatenate([np.ravel(np.asarray(v, np.float64)) for v in values]) if values else np.empty(0)
    finite = joined[np.isfinite(joined)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if zero:
        low = min(low, 0.0)
    if top is not None:
        high = max(high, top)
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    bounds = (low - (room / 2 if zero else room), high + room)
    figure.update_yaxes(title_text=title, range=list(bounds), tickformat=".0%" if percent else None)
    if percent and high - low < 0.06:
        figure.update_yaxes(tickformat=".1%")
    return bounds


def label_ends(
    figure: go.Figure,
    ends: Sequence[tuple[str, str, float]],
    bounds: tuple[float, float],
    *,
    log: bool = False,
) -> None:
    """Name lines (name, colour, last value) at their right end, apart by a line of text where they crowd.

    Names are taken as safe: they have gone through `plain`.
    """
    height = (figure.layout.height or HEIGHT) - 70
    low, high = (np.log10(b) for b in bounds) if log else bounds
    wanted: list[tuple[float, float, str, str]] = []
    for name, colour, value in ends:
        if np.isfinite(value) and not (log and value <= 0):
            place = float(np.log10(value) if log else value)
            wanted.append((float((place - low) / (high - low) * height), place, name, colour))
    wanted.sort(key=lambda w: w[0])
    places = _apart([w[0] for w in wanted], 14.0, float(height))
    longest = 0
    for (pixel, place, name, colour), final in zip(wanted, places, strict=True):
        longest = max(longest, len(html.unescape(name)))
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            xshift=4,
            y=place,
            yshift=final - pixel,
            text=f'<span style="color:{colour}">━</span> {name}',
            showarrow=False,
            font=dict(size=11),
        )
    figure.update_layout(margin_r=int(26 + 6.3 * longest))


def _apart(places: list[float], gap: float, height: float) -> list[float]:
    """Sorted places moved as little as is needed to be a gap apart, within the height where they fit."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = max(height, gap * (len(moved) - 1))
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def layer_colours(count: int) -> list[str]:
    """One for each layer: apart where they are few, from the first to the last layer where they are many."""
    if count <= len(PALETTE):
        return list(PALETTE[:count])
    found: list[str] = sample_colorscale("Viridis", np.linspace(0.1, 0.88, count).tolist())
    return found


def short_names(places: Sequence[str]) -> list[str]:
    """Layer names without what they all share.

    >>> short_names(["model.layers.0.moe", "model.layers.11.moe"])
    ['layers.0', 'layers.11']
    >>> short_names(["fc1", "fc2"]), short_names(["blocks.0.mlp"])
    (['fc1', 'fc2'], ['blocks.0.mlp'])
    """
    split = [place.split(".") for place in places]
    if len(set(places)) < 2:
        return [_cut(place) for place in places]
    front, back = _shared(split), _shared([parts[::-1] for parts in split])
    if front and all(len(parts) > front and parts[front].isdigit() for parts in split):
        front -= 1  # "layers.3" says more than "3"
    names = [".".join(parts[front : max(len(parts) - back, front + 1)]) for parts in split]
    return [_cut(name) for name in (names if len(set(names)) == len(names) and all(names) else places)]


def _shared(split: list[list[str]]) -> int:
    """How many parts they all begin with."""
    columns = enumerate(zip(*split, strict=False))
    return next((i for i, parts in columns if len(set(parts)) > 1), min(map(len, split)))


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}…{name[-LONGEST // 2 + 1 :]}"
