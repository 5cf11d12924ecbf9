"""Copies of one expert's weights, optimizer state included, into another's place; and the way back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparsight import chance
from sparsight.dst.layer import Layer
from sparsight.dst.rewire import Rewiring
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dst.structures import Unstructured
from sparsight.dynamics.routes import Part
from sparsight.health.actions.core import RefusedError, Run
from sparsight.health.actions.optimizing import copied
from sparsight.kernels.index import indices_in
from sparsight.nn.compressed import CompressedWeight
from sparsight.topology import Topology

Undo = Callable[[], None]


def by_position(layer: Layer, tensor: Tensor) -> Tensor:
    """The entries of a tensor of the parameter's shape at the existing weights, in the topology's order."""
    weight = layer.weight
    if isinstance(weight, CompressedWeight):
        return weight.modules[0].layout.by_position(tensor.detach())
    return weight.existing(tensor)


@torch.no_grad()
def put(layer: Layer, tensor: Tensor, values: Tensor) -> None:
    """The reverse of `by_position`."""
    weight = layer.weight
    if isinstance(weight, CompressedWeight):
        tensor.copy_(weight.modules[0].layout.stored(values.to(tensor)))
    else:
        tensor.masked_scatter_(weight.topology.mask(), values.to(tensor))


def move_to(sparsifier: Sparsifier, layer: Layer, after: Topology, grown: Tensor | None = None) -> None:
    """Take a layer to another topology; its new weights begin at the first numbers of `grown`."""
    before = layer.topology
    rewiring = Rewiring(before, after, indices_in(before.positions(), after.positions()))
    sparsifier.move(layer.name, rewiring, None if grown is None else grown[: rewiring.grown])


def check_alike(run: Run, source: Part, target: Part) -> None:
    """Refuse parts that cannot be copied onto each other."""
    a, b = run.layer_of(source.param), run.layer_of(target.param)
    if (a is None) != (b is None):
        raise RefusedError("one of the two experts is sparsified and the other is not")
    if a is not None and b is not None:
        assert run.sparsifier is not None
        method = run.sparsifier.method
        if method.latent is not None:
            raise RefusedError(
                f"{method.name} keeps latent weights beside the experts'; they cannot be copied"
            )
        free = isinstance(method.structure, Unstructured)
        if a.topology.shape != b.topology.shape or not (free or a.topology.nnz == b.topology.nnz):
            raise RefusedError(
                f"'{a.name}' and '{b.name}' hold {a.topology.nnz} of {a.topology.shape} and "
                f"{b.topology.nnz} of {b.topology.shape} weights; expected the same"
            )
    elif source.cut(source.param).shape != target.cut(target.param).shape:
        raise RefusedError(
            f"experts of different shapes: {tuple(source.param.shape)} and {tuple(target.param.shape)}"
        )


@torch.no_grad()
def copy_part(run: Run, source: Part, target: Part, noise: float, seed: int) -> None:
    """Copy a part, plus `noise` of its own spread, and what the optimizer remembers of it."""
    a, b = run.layer_of(source.param), run.layer_of(target.param)
    if a is not None and b is not None:
        _copy_sparse(run, a, b, noise, seed)
        return
    values = source.cut(source.param.detach())
    target.cut(target.param.detach()).copy_(values + _noise(values, noise, seed))
    if source.index is None:
        if source.param in run.optimizer.state:
            run.optimizer.state[target.param] = copied(run.optimizer.state[source.param])
        return
    for slot in run.slots(target.param).values():
        target.cut(slot).copy_(source.cut(slot))


def _copy_sparse(run: Run, a: Layer, b: Layer, noise: float, seed: int) -> None:
    """The target takes over the source's topology, cut or filled up to its own number of weights."""
    assert run.sparsifier is not None
    values = by_position(a, a.weight.param)
    count, places = b.topology.nnz, a.topology.positions()
    if places.numel() > count:
        places = places[values.abs().topk(count).indices.sort().values]
    elif places.numel() < count:
        own = b.topology.positions()
        spare = own[indices_in(places, own) < 0][: count - places.numel()]
        places = torch.cat((places, spare)).sort().values
    move_to(run.sparsifier, b, Topology.from_positions(b.topology.shape, places))
    at = indices_in(a.topology.positions(), places)

    def moved(tensor: Tensor) -> Tensor:
        return by_position(a, tensor)[at.clamp(min=0)].masked_fill(at < 0, 0)

    new = moved(a.weight.param)
    put(b, b.weight.param, new + _noise(values, noise, seed, new.numel()))
    state = run.optimizer.state
    if a.weight.param in state:
        slots = run.slots(a.weight.param)
        made = {k: torch.zeros_like(b.weight.param) for k in slots}
        for key, slot in slots.items():
            put(b, made[key], moved(slot))
        rest = {k: v for k, v in state[a.weight.param].items() if k not in slots}
        state[b.weight.param] = {**copied(rest), **made}
    run.sparsifier.enforce()


@torch.no_grad()
def remember(run: Run, part: Part) -> tuple[int, Undo]:
    """Bytes of a copy of a part with its optimizer state, and what puts it back."""
    layer, optimizer = run.layer_of(part.param), run.optimizer
    if layer is None and part.index is not None:
        held = [part.param.detach(), *run.slots(part.param).values()]
        rows = [part.cut(t).clone() for t in held]

        def back_rows() -> None:
            for tensor, row in zip(held, rows, strict=True):
                part.cut(tensor).copy_(row)

        return sum(r.nbytes for r in rows), back_rows
    value = part.param.detach().clone()
    state = copied(optimizer.state.get(part.param, {}))
    topology = None if layer is None else layer.topology

    def back() -> None:
        if layer is not None and topology is not None:
            assert run.sparsifier is not None
            move_to(run.sparsifier, layer, topology)
        with torch.no_grad():
            part.param.copy_(value)
        optimizer.state.pop(part.param, None)
        if state:
            optimizer.state[part.param] = copied(state)
        if run.sparsifier is not None:
            run.sparsifier.enforce()

    size = value.nbytes + sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
    return size, back


def _noise(values: Tensor, share: float, seed: int, count: int | None = None) -> Tensor:
    """Normal noise with `share` of the values' own root mean square, the same on every process."""
    count = values.numel() if count is None else count
    size = float(values.float().square().mean().sqrt()) if values.numel() else 0.0
    drawn = (share * size * chance.normal(count, seed)).to(values)
    return drawn.view_as(values) if count == values.numel() else drawn
