"""Pictures made of cells: colour bars, and a slider over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

MOST_FRAMES = 25
MOST_CELLS = 60_000


def frames_of(steps: np.ndarray, cells: int = 0) -> np.ndarray:
    """At most 25 of the steps, evenly spaced, with the first and the last; fewer where a picture is large."""
    most = MOST_FRAMES if not cells else int(np.clip(MOST_CELLS // cells, 2, MOST_FRAMES))
    if len(steps) <= most:
        return steps
    return np.asarray(steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))])


def colour_bar(title: str, **more: Any) -> dict[str, Any]:
    """A thin one beside the picture."""
    return dict(
        title=dict(text=title, side="right", font=dict(size=11)),
        thickness=8,
        outlinewidth=0,
        tickfont=dict(size=10),
        **more,
    )


def slider(figure: go.Figure, steps: np.ndarray, pictures: Sequence[np.ndarray]) -> None:
    """Under the first trace: which step is shown. It stands at the last."""
    if len(pictures) < 2:
        return
    figure.update_layout(
        sliders=[
            dict(
                active=len(pictures) - 1,
                x=0,
                len=1,
                pad=dict(t=34, b=0, l=0, r=0),
                currentvalue=dict(
                    prefix="step ", font=dict(size=11, color="#8a8f98"), xanchor="left", offset=4
                ),
                font=dict(size=1, color="rgba(0,0,0,0)"),  # labels of every stop would run into each other
                ticklen=0,
                minorticklen=0,
                borderwidth=0,
                bgcolor="#8a8f98",
                activebgcolor="#0072B2",
                steps=[
                    dict(method="restyle", label=f"{int(step):,}", args=[{"z": [_rows(picture)]}, [0]])
                    for step, picture in zip(steps, pictures, strict=True)
                ],
            )
        ]
    )


def _rows(picture: np.ndarray) -> list[list[float | None]]:
    """As lists: within the arguments of a slider Plotly decodes no typed arrays."""
    return [[None if np.isnan(v) else round(float(v), 3) for v in row] for row in picture]
