"""What a run leaves behind: numbers measured at a step, and events. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Severity = Literal["info", "warn", "act"]


@dataclass(frozen=True)
class Record:
    """A number or a vector, measured at a step.

    `name` is "<family>/<quantity>" with the families moe, depth, sparse, dense, log (the user's own) and run;
    `where` is the layer, or "" for the whole model.

    >>> Record(10, "moe/load_entropy", "blocks.0.mlp", 0.93).path
    'moe/blocks.0.mlp/load_entropy'
    """

    step: int
    name: str
    where: str
    value: float | Vector

    @property
    def path(self) -> str:
        """The name under which sinks show it."""
        family, _, quantity = self.name.partition("/")
        return f"{family}/{self.where}/{quantity}" if self.where else self.name


@dataclass(frozen=True)
class Event:
    """Something that was found, done or said at a step."""

    step: int
    kind: Literal["finding", "action", "note"]
    rule: str
    severity: Severity
    where: str
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0
    """Seconds since the run began."""
