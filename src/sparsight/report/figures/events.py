"""Findings and actions: markers across every chart, and a timeline of their own."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from sparsight.dynamics.history import History
from sparsight.dynamics.records import Event
from sparsight.report.figures import look

MOST_MARKS = 40
RANK = {"act": 0, "warn": 1, "info": 2}
SYMBOL = {"finding": "diamond", "action": "triangle-up", "note": "circle"}


def onset(event: Event) -> int:
    """Since when it has been so; for what was done, when it was done."""
    since = event.data.get("onset") if isinstance(event.data, dict) else None
    return since if isinstance(since, int) and not isinstance(since, bool) else event.step


def mark(figure: go.Figure, events: Sequence[Event]) -> go.Figure:
    """A vertical line at each event, most urgent first, for a chart whose horizontal axis is the step."""
    shown: dict[tuple[int, str], Event] = {}
    for event in sorted(events, key=lambda e: (RANK.get(e.severity, 3), e.step)):
        shown.setdefault((event.step, event.kind), event)
    layer = "above" if any(trace.type == "heatmap" for trace in figure.data) else "below"
    for event in list(shown.values())[:MOST_MARKS]:
        figure.add_shape(
            type="line",
            xref="x",
            yref="paper",
            x0=event.step,
            x1=event.step,
            y0=0,
            y1=1,
            layer=layer,
            opacity=0.8 if len(shown) <= 8 else 0.35,
            line=dict(color=_colour(event), width=1.2, dash="dot" if event.kind == "action" else "solid"),
        )
    return figure


def _colour(event: Event) -> str:
    return look.GREEN if event.kind == "action" else look.SEVERITY.get(event.severity, look.NEUTRAL)


def timeline(history: History) -> go.Figure | None:
    """Each rule and each action in its row; colour is the severity, shape the kind."""
    if not history.events:
        return None
    rows = list(dict.fromkeys(_row(event) for event in history.events))[:24]
    figure = look.blank(height=70 + 26 * len(rows))
    kinds = [
        ("finding", "act", "finding: act"),
        ("finding", "warn", "finding: warn"),
        ("finding", "info", "finding: info"),
        ("action", None, "action"),
        ("note", None, "note"),
    ]
    for kind, severity, label in kinds:
        chosen = [
            e
            for e in history.events
            if e.kind == kind and (severity is None or e.severity == severity) and _row(e) in rows
        ]
        if chosen:
            figure.add_trace(
                go.Scatter(
                    x=[e.step for e in chosen],
                    y=[_row(e) for e in chosen],
                    text=[_wrapped(e) for e in chosen],
                    name=label,
                    mode="markers",
                    marker=dict(symbol=SYMBOL[kind], size=11, color=_colour(chosen[0])),
                    hovertemplate="step %{x:,}: %{text}<extra></extra>",
                )
            )
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=rows[::-1])
    figure.update_layout(
        showlegend=len(figure.data) > 1,
        legend=dict(orientation="h", x=1, xanchor="right", y=1, yanchor="bottom"),
        margin_t=30,
    )
    return look.over_steps(figure, history.last_step)


def _row(event: Event) -> str:
    return look.plain(event.rule.replace("_", " ") or event.kind, 26)


def _wrapped(event: Event, width: int = 60) -> str:
    """Hover text in lines: the words are made safe before the breaks, which are ours, go in."""
    lines, line = [], ""
    for word in look.plain(f"{event.where}: {event.message}" if event.where else event.message).split():
        if len(line) + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "<br>".join([*lines, line])
