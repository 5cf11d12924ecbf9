"""Warnings that point at the line of the user's own code, however deep they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def notice(message: str) -> None:
    """Warn, with the innermost frame outside of Sparsight and torch as the place.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     notice("look here")
    >>> str(caught[0].message)
    'look here'
    """
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, UserWarning, stacklevel=level)
