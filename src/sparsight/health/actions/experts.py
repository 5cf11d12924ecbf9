"""Actions on experts themselves: revive a dead one, begin one anew, share the load of the busiest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsight import chance
from sparsight.dynamics.routes import Part, Route
from sparsight.health.actions.copying import by_position, check_alike, copy_part, put, remember
from sparsight.health.actions.core import Done, RefusedError, Run, experts_of, undo_all
from sparsight.health.actions.optimizing import forget
from sparsight.moe.layer import MoE

KEEP_BYTES = 256 * 2**20
"""A revived expert can be brought back as it was while its copy takes no more than this."""

Undo = Callable[[], None]


@dataclass(frozen=True)
class Revive:
    """Copy the busiest expert into the place of each named one, with noise: weights, router row, selection
    bias and optimizer state. The two then share its tokens and grow apart.

    Where several are revived, each takes half of whoever is busiest by then. `noise` is a share of the
    weights' own size; `tilt` the same for the router's row, and it decides which tokens change sides.
    """

    where: str
    experts: tuple[int, ...]
    source: int | None = None
    noise: float = 0.05
    tilt: float = 0.1
    setting: ClassVar[bool] = False

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        (route,) = run.routed(self.where) if self.where else _only(run.routed(""))
        experts = experts_of(route, self.experts)
        rows = router_rows(route)
        if not self.noise >= 0 or not self.tilt > 0:
            raise RefusedError(f"Revive: expected noise >= 0 and tilt > 0, got {self.noise} and {self.tilt}")
        pairs = list(zip(_sources(self, route, experts, run), experts, strict=True))
        if not route.parts:
            raise RefusedError(f"Revive: the parameters of the experts of '{route.name}' are not known")
        for source, expert in pairs:
            for a, b in zip(route.parts[source], route.parts[expert], strict=True):
                check_alike(run, a, b)
        undo = _remember_all(run, route, experts, rows)
        for source, expert in pairs:
            for i, (a, b) in enumerate(zip(route.parts[source], route.parts[expert], strict=True)):
                copy_part(run, a, b, self.noise, _seed(run, route, expert, i))
            for i, row in enumerate(rows):
                a, b = Part(row, source), Part(row, expert)
                copy_part(run, a, b, self.tilt, _seed(run, route, expert, -1 - i))
            for buffer in _buffers(route):
                buffer[expert] = buffer[source]
        told = ", ".join(f"{expert} from {source}" for source, expert in pairs)
        kept = "" if undo else "; too large to keep a copy for undoing it"
        return Done(f"{route.name}: revived expert {told}{kept}", undo)


@dataclass(frozen=True)
class Reinitialise:
    """Begin the named experts anew: fresh weights of the same spread as at the start of a training, no
    optimizer state. The router is left as it is. With `where` "" and no experts named: none."""

    where: str
    experts: tuple[int, ...]
    setting: ClassVar[bool] = False

    @torch.no_grad()
    def apply(self, run: Run) -> Done:
        (route,) = run.routed(self.where) if self.where else _only(run.routed(""))
        experts = experts_of(route, self.experts)
        if not route.parts:
            raise RefusedError(f"Reinitialise: the parameters of the experts of '{route.name}' are not known")
        undo = _remember_all(run, route, experts, ())
        for expert in experts:
            for i, part in enumerate(route.parts[expert]):
                _fresh(run, part, _seed(run, route, expert, i))
        if run.sparsifier is not None:
            run.sparsifier.enforce()
        kept = "" if undo else "; too large to keep a copy for undoing it"
        return Done(f"{route.name}: experts {experts} begin anew{kept}", undo)


@dataclass(frozen=True)
class Rebalance:
    """Revive every expert with less than `below` of the mean load. Repeat it with `Every`."""

    where: str = ""
    below: float = 0.1
    setting: ClassVar[bool] = False

    def apply(self, run: Run) -> Done:
        if not 0 < self.below < 1:
            raise RefusedError(f"Rebalance: below must lie in (0, 1), got {self.below}")
        todo = []
        for route in run.routed(self.where):
            load = run.loads.get(route.name)
            if load is None:
                raise RefusedError(f"Rebalance: the load of '{route.name}' has not been read yet")
            idle = np.flatnonzero(load < self.below * load.mean()).tolist()
            if idle:
                todo.append(Revive(route.name, tuple(idle)))
        if not todo:
            raise RefusedError(f"Rebalance: no expert has less than {self.below:g} of the mean load")
        done = [revive.apply(run) for revive in todo]
        undone = [d.undo for d in done if d.undo is not None]
        back = (lambda: undo_all(undone)) if len(undone) == len(done) else None
        return Done("; ".join(d.message for d in done), back)


def _only(routes: list[Route]) -> list[Route]:
    if len(routes) > 1:
        raise RefusedError(f"which layer? There are {[route.name for route in routes]}")
    return routes


def _sources(action: Revive, route: Route, experts: list[int], run: Run) -> list[int]:
    """Who is copied for each: always the busiest that is left, whose load is then halved."""
    if action.source is not None:
        if action.source in experts or not 0 <= action.source < route.experts:
            raise RefusedError(f"Revive: expert {action.source} cannot be the source for {experts}")
        return [action.source] * len(experts)
    if route.name not in run.loads:
        raise RefusedError(f"Revive: the load of '{route.name}' has not been read yet; name a source")
    load = run.loads[route.name].astype(float).copy()
    load[experts] = -1
    if load.max() < 0:
        raise RefusedError(
            f"Revive: all {route.experts} experts of '{route.name}' are named; none is left to copy"
        )
    found = []
    for _ in experts:
        busiest = int(load.argmax())
        load[busiest] /= 2
        found.append(busiest)
    return found


def router_rows(route: Route) -> list[nn.Parameter]:
    """The router's parameters that have a row for each expert."""
    if isinstance(route.module, MoE):
        weight = getattr(route.module.router, "weight", None)
        rows = [weight] if isinstance(weight, nn.Parameter) else []
    else:
        rows = [p for p in route.router if p.dim() and p.shape[0] == route.experts]
    if not rows:
        raise RefusedError(
            f"the router of '{route.name}' has no row for each expert; nothing can send it tokens"
        )
    return rows


def _buffers(route: Route) -> list[Tensor]:
    """Selection biases and running means that have an entry for each expert."""
    if isinstance(route.module, MoE):
        ledger = route.module.ledger
        found = [b for memory in ledger.memory if (b := memory._buffers.get("bias")) is not None]
        return found + ([ledger.defaults] if ledger.needs.defaults is not None else [])
    # DeepSeek's e_score_correction_bias and its like sit beside the router's weight.
    named = dict(route.module.named_buffers())
    return [b for name, b in named.items() if "bias" in name and b.shape[:1] == (route.experts,)]


def _remember_all(
    run: Run, route: Route, experts: list[int], rows: list[nn.Parameter] | tuple[()]
) -> Undo | None:
    parts = [part for expert in experts for part in route.parts[expert]]
    parts += [Part(row, expert) for row in rows for expert in experts]
    if sum(_size(part) for part in parts) > KEEP_BYTES:
        return None
    kept = [remember(run, part)[1] for part in parts]
    buffers = [(buffer, buffer.clone()) for buffer in _buffers(route)] if rows else []

    def undo() -> None:
        with torch.no_grad():
            for back in reversed(kept):
                back()
            for buffer, old in buffers:
                buffer[experts] = old[experts]

    return undo


def _size(part: Part) -> int:
    """Bytes of a part and of two slots of optimizer state."""
    return 3 * part.numel * part.param.element_size()


def _fresh(run: Run, part: Part, seed: int) -> None:
    """U(−1/√fan_in, 1/√fan_in) for matrices, as torch's Linear begins; zero for vectors."""
    layer = run.layer_of(part.param)
    if layer is not None:
        # As if the layer had been dense: what its inputs add up to is left to its own weights.
        weights_a_row = max(1.0, layer.topology.nnz / layer.topology.rows)
        spread = 1 / math.sqrt(weights_a_row)
        put(layer, part.param, spread * _uniform(by_position(layer, part.param), seed))
        forget(run.optimizer, part.param)
        return
    value = part.cut(part.param.detach())
    fan_in = _fan_in(part)
    value.copy_(_uniform(value, seed) / math.sqrt(fan_in) if fan_in else torch.zeros_like(value))
    if part.index is None:
        forget(run.optimizer, part.param)
    else:
        for slot in run.slots(part.param).values():
            part.cut(slot).zero_()


def _fan_in(part: Part) -> int:
    """Inputs of a matrix; 0 for a vector. One slice of many drops the dimension of the experts."""
    shape = part.param.shape
    if part.index is not None and part.of in (None, shape[0]):
        shape = shape[1:]
    return math.prod(shape[1:]) if len(shape) > 1 else 0


def _uniform(like: Tensor, seed: int) -> Tensor:
    drawn = chance.uniform(torch.arange(like.numel()), seed)
    return (2 * drawn - 1).to(like).view_as(like)


def _seed(run: Run, route: Route, expert: int, part: int) -> int:
    return chance.mix(run.seed, route.name, run.step, expert, part + 1000)
