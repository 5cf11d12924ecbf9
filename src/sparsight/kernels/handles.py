"""Numbers for objects, so that an operator, which takes tensors alone, can be given them.

Needed under torch.compile only; eager code passes the objects themselves. An entry goes when its object does.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

# The one place where the dispatcher's world (tensors) meets ours (objects): keyed by address, held weakly.
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def handle(thing: Any) -> int:
    """A number for this object; 0 for None."""
    if thing is None:
        return 0
    _alive[id(thing)] = thing
    return id(thing)


def resolve(handles: Tensor) -> list[Any]:
    """The objects behind a tensor of handles, None for 0."""
    return [_alive[number] if number else None for number in handles.tolist()]
