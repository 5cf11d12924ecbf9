"""Everything that can be done to a run, as data. This is the only place that changes one.

An action is a frozen dataclass; `apply(run)` checks it, does it, and says what was done and how to undo it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sparsight.health.actions.core import Action, Done, RefusedError, Run
from sparsight.health.actions.density import Density, WarmUp
from sparsight.health.actions.experts import Rebalance, Reinitialise, Revive
from sparsight.health.actions.gates import CoolRouter
from sparsight.health.actions.paths import (
    Balance,
    CapacityFactor,
    ExpertsPerToken,
    Noise,
    Temperature,
    WidenMask,
)
from sparsight.health.actions.topology import Regrow, Search
from sparsight.health.actions.training import Every, ExpertRate, LearningRate, Rewind

__all__ = [
    "ALL",
    "Action",
    "Balance",
    "CapacityFactor",
    "CoolRouter",
    "Density",
    "Done",
    "Every",
    "ExpertRate",
    "ExpertsPerToken",
    "LearningRate",
    "Noise",
    "Rebalance",
    "RefusedError",
    "Regrow",
    "Reinitialise",
    "Revive",
    "Rewind",
    "Run",
    "Search",
    "Temperature",
    "WarmUp",
    "WidenMask",
    "as_data",
    "from_data",
    "kind_of",
]

ALL: tuple[type[Any], ...] = (
    Balance,
    Noise,
    Temperature,
    WidenMask,
    CapacityFactor,
    ExpertsPerToken,
    CoolRouter,
    Revive,
    Reinitialise,
    Rebalance,
    Search,
    Regrow,
    Density,
    WarmUp,
    LearningRate,
    ExpertRate,
    Rewind,
    Every,
)


def kind_of(action: Action) -> str:
    """What kind of action it is: the name of its class."""
    return type(action).__name__


def as_data(action: Action) -> dict[str, Any]:
    """An action as JSON knows it.

    >>> as_data(Revive("blocks.0", (3,)))["experts"]
    [3]
    """
    found: dict[str, Any] = {"kind": kind_of(action)}
    for field in fields(action):  # type: ignore[arg-type]
        value = getattr(action, field.name)
        if isinstance(value, tuple):
            value = list(value)
        found[field.name] = as_data(value) if hasattr(value, "apply") else value
    return found


def from_data(data: dict[str, Any]) -> Action:
    """The reverse of `as_data`.

    >>> from_data(as_data(Every(Balance(times=2.0), steps=100)))
    Every(action=Balance(where='', times=2.0, least=0.0), steps=100, times=2)
    """
    kinds = {kind.__name__: kind for kind in ALL}
    kind = kinds.get(data.get("kind", ""))
    if kind is None:
        raise ValueError(f"expected one of the actions {sorted(kinds)}, got {data.get('kind')!r}")
    values = {k: v for k, v in data.items() if k in {f.name for f in fields(kind)}}
    if isinstance(values.get("action"), dict):
        values["action"] = from_data(values["action"])
    made: Action = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    return made
