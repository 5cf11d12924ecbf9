"""Numbers as people read them."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Four digits that matter.

    >>> number(0.91234), number(12345.0), number(float("nan"))
    ('0.9123', '12,345', 'nan')
    """
    if value is None or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Two units at most.

    >>> duration(0.5), duration(75), duration(7300), duration(None)
    ('0.5 s', '1 min 15 s', '2 h 1 min', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
