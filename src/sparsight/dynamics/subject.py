"""What there is to watch in a model: its routes, its sparse layers, and everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from sparsight.dst.layer import Layer
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics.connections import describe as describe_connections
from sparsight.dynamics.connections import positions_at
from sparsight.dynamics.learning import LayerLearning
from sparsight.dynamics.records import Record
from sparsight.dynamics.routes import Part, Route, clean
from sparsight.dynamics.samples import Places
from sparsight.nn.compressed import CompressedWeight
from sparsight.nn.masked import MaskedWeight


def sparsifier_of(optimizer: Optimizer) -> Sparsifier | None:
    """The Sparsifier that follows this optimizer, told by its hook."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Sparsifier):
            return owner
    return None


def compressed(sparsifier: Sparsifier | None) -> set[int]:
    """The ids of the parameters that hold existing weights only."""
    layers = [] if sparsifier is None else sparsifier.layers.values()
    return {id(x.weight.param) for x in layers if isinstance(x.weight, CompressedWeight)}


def layers_of(model: nn.Module, routes: Sequence[Route], sparsifier: Sparsifier | None) -> LayerLearning:
    """Sparse layers, and every other module that has parameters of its own and is no expert or router."""
    units: dict[tuple[str, str], tuple[Part, ...]] = {}
    places: dict[str, Places] = {}
    taken: set[int] = {id(p) for route in routes for p in route.router}
    taken |= {id(part.param) for route in routes for expert in route.parts for part in expert}
    sparse = {} if sparsifier is None else sparsifier.layers
    for name, layer in sparse.items():
        units["sparse", name] = (Part(layer.weight.param),)
        taken.add(id(layer.weight.param))
        if isinstance(layer.weight, MaskedWeight):
            places[name] = _places(layer)
    for name, module in model.named_modules():
        mine = [p for p in module.parameters(recurse=False) if id(p) not in taken and p.requires_grad]
        taken |= {id(p) for p in mine}
        if mine:
            units["dense", clean(name)] = tuple(Part(p) for p in mine)
    learning = LayerLearning(units, places)
    for name, layer in sparse.items():
        learning.rewired(name, layer.topology.nnz)
    return learning


def _places(layer: Layer) -> Places:
    def places(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions_at(layer.topology, numbers)

    return places


def describe(
    routes: Sequence[Route], sparsifier: Sparsifier | None, layers: LayerLearning
) -> list[dict[str, Any]]:
    """What is watched, for the store."""
    found: list[dict[str, Any]] = [
        {"name": r.name, "family": r.family, "experts": r.experts, "k": r.k, **r.about} for r in routes
    ]
    if sparsifier is not None:
        found += describe_connections(sparsifier)
    found += [{"name": name, "family": family} for family, name in layers.units if family == "dense"]
    return found


def describe_method(sparsifier: Sparsifier) -> dict[str, Any]:
    """The method's name and numbers."""
    method = sparsifier.method
    return {
        "name": method.name,
        "density": sparsifier.target_density,
        "steps": method.steps,
        "grows": method.grow is not None,
    }


def said(routes: Sequence[Route], sparsifier: Sparsifier | None, layers: LayerLearning) -> str:
    """What is watched, in words."""
    paths = sum(r.family == "moe" for r in routes)
    counts = {
        "expert layer": paths,
        "depth-routed block": len(routes) - paths,
        "sparse layer": 0 if sparsifier is None else len(sparsifier.layers),
        "dense layer": sum(family == "dense" for family, _ in layers.units),
    }
    found = [f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items() if count]
    return ", ".join(found) or "nothing"


def means(step: int, records: Sequence[Record]) -> list[Record]:
    """For each number of the layers that has no value for the whole model, the mean over layers."""
    whole = {record.name for record in records if not record.where}
    grouped: dict[str, list[float]] = {}
    for record in records:
        if record.where and isinstance(record.value, float) and record.name not in whole:
            grouped.setdefault(record.name, []).append(record.value)
    return [Record(step, name, "", sum(values) / len(values)) for name, values in grouped.items()]
