"""From a function's signature to the options of a command."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any


def knobs_of(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function with the signature of another that returns its arguments and does nothing else.

    >>> def recipe(*, lr: float = 0.1, width: int = 8) -> None:
    ...     pass
    >>> knobs_of(recipe)(lr=0.5)
    {'lr': 0.5}
    """

    def knobs(**chosen: Any) -> dict[str, Any]:
        return chosen

    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    parameters = [knob.replace(annotation=hints[name]) for name, knob in signature.parameters.items()]
    knobs.__signature__ = signature.replace(parameters=parameters, return_annotation=dict)  # type: ignore[attr-defined]
    knobs.__annotations__ = {**{name: hints[name] for name in signature.parameters}, "return": dict}
    knobs.__doc__ = function.__doc__
    return knobs
