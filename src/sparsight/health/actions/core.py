"""What an action is: plain data that knows how to change a run, and says what it did and how to go back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsight.dst.layer import Layer
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics.routes import Route
from sparsight.health.actions.pace import Pace
from sparsight.moe.layer import MoE

if TYPE_CHECKING:
    from sparsight.health.checkpoints import Checkpoints


class RefusedError(ValueError):
    """An action that makes no sense here. Nothing was changed."""


@dataclass(frozen=True)
class Done:
    """What an action did."""

    message: str
    undo: Callable[[], None] | None = None
    """Takes it back; None where it cannot be, and then the message says why."""
    later: tuple[int, Action] | None = None
    """(steps from now, action) where a second action belongs to this one."""


class Action(Protocol):
    """A frozen dataclass of JSON-able fields. `apply` checks everything before it changes anything."""

    setting: ClassVar[bool]
    """Whether it changes what no state_dict holds, so that a resumed run has to be told again."""

    @property
    def where(self) -> str:
        """The layer, or "" for all that it can be applied to."""
        ...

    def apply(self, run: Run) -> Done: ...


@dataclass(frozen=True)
class Run:
    """What actions may change, and what they may know."""

    model: nn.Module
    optimizer: Optimizer
    routes: tuple[Route, ...] = ()
    sparsifier: Sparsifier | None = None
    step: int = 0
    seed: int = 0
    loads: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """The latest loads of the experts, layer by layer."""
    pace: Pace = field(default_factory=Pace)
    checkpoints: Checkpoints | None = None
    restoring: bool = False
    """Whether a resumed run is being told its settings again; weights come from its checkpoint."""

    def routed(self, where: str) -> list[Route]:
        """The expert layers that a place names."""
        found = [r for r in self.routes if r.family == "moe" and where in ("", r.name)]
        if not found:
            names = [r.name for r in self.routes if r.family == "moe"]
            raise RefusedError(_nowhere("expert layer", where, names))
        return found

    def own(self, where: str, what: str) -> list[tuple[str, MoE]]:
        """This library's own expert layers that a place names: others keep their settings to themselves."""
        found = [(r.name, r.module) for r in self.routed(where) if isinstance(r.module, MoE)]
        if not found:
            kind = type(self.routed(where)[0].module).__name__
            raise RefusedError(
                f"{what} can be changed in sp.MoE layers; {where or 'every layer'} is a {kind}"
            )
        return found

    def sparse(self, where: str = "") -> tuple[Sparsifier, list[Layer]]:
        """The sparse layers that a place names."""
        if self.sparsifier is None:
            raise RefusedError("nothing here is sparsified: no Sparsifier follows this optimizer")
        layers = self.sparsifier.layers
        found = [layer for name, layer in layers.items() if where in ("", name) and layer.trains]
        if not found:
            raise RefusedError(_nowhere("sparse layer that trains", where, list(layers)))
        return self.sparsifier, found

    def layer_of(self, param: Tensor) -> Layer | None:
        """The sparse layer that a parameter belongs to."""
        layers = () if self.sparsifier is None else self.sparsifier.layers.values()
        return next((layer for layer in layers if layer.weight.param is param), None)

    def slots(self, param: Tensor) -> dict[str, Tensor]:
        """What the optimizer remembers of each weight of a parameter."""
        held: dict[str, Any] = self.optimizer.state.get(param, {})
        return {k: v for k, v in held.items() if isinstance(v, Tensor) and v.shape == param.shape}


def _nowhere(what: str, where: str, names: Iterable[str]) -> str:
    known = ", ".join(f"'{name}'" for name in names)
    place = f"'{where}'" if where else "in this model"
    return f"no {what} {place}; there are: {known or 'none'}"


def positive(name: str, value: float) -> None:
    """Refuse a factor that is not one."""
    if not 0 < value < float("inf"):
        raise RefusedError(f"{name} must be a number above 0, got {value}")


def experts_of(route: Route, experts: Iterable[int]) -> list[int]:
    """Indices of experts that exist, each once."""
    found = sorted(set(experts))
    if not found or found[0] < 0 or found[-1] >= route.experts:
        raise RefusedError(
            f"'{route.name}' has the experts 0 to {route.experts - 1}; got {list(experts) or 'none at all'}"
        )
    return found


def several_processes() -> bool:
    """Whether more than one process trains this model."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def undo_all(undo: list[Callable[[], None]]) -> None:
    """Take several things back, the last first."""
    for one in reversed(undo):
        one()
