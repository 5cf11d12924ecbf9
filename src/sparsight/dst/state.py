"""A Sparsifier's state as a flat dict of tensors, so that safetensors can hold it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsight.topology import Topology

if TYPE_CHECKING:
    from sparsight.dst.layer import Layer
    from sparsight.dst.sparsifier import Sparsifier

_COUNTERS = ("step", "updates", "seed")


def _pack_layer(layer: Layer) -> dict[str, Tensor]:
    weight = layer.weight
    packed = {
        "shape": torch.tensor(weight.topology.shape),
        "crow": weight.topology.crow.clone(),
        "col": weight.topology.col.clone(),
        "target": torch.tensor(layer.target),
        "explored": layer.explored.bits.clone(),
    }
    if weight.reserve is not None and weight.backward is not None:
        packed["reserve"] = weight.reserve.clone()
        packed["backward_crow"] = weight.backward.crow.clone()
        packed["backward_col"] = weight.backward.col.clone()
    if layer.momentum is not None:
        packed["momentum"] = layer.momentum.mean.clone()
        if layer.momentum.square is not None:
            packed["momentum_square"] = layer.momentum.square.clone()
    return packed


def pack(sparse: Sparsifier) -> dict[str, Tensor]:
    """Everything that a resumed run needs and that model and optimizer do not save."""
    counters = {"step": sparse.step, "updates": sparse.updates, "seed": sparse.seed}
    packed = {name: torch.tensor(value, dtype=torch.int64) for name, value in counters.items()}
    for name, layer in sparse.layers.items():
        packed |= {f"{name}.{key}": value for key, value in _pack_layer(layer).items()}
    return packed


def _first_difference(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    for key in own:
        if key not in saved:
            return f"'{key}' is missing from the saved state"
        if key.endswith(".shape") and saved[key].tolist() != own[key].tolist():
            return (
                f"'{key}' is {tuple(saved[key].tolist())} in the saved state "
                f"and {tuple(own[key].tolist())} here"
            )
    for key in saved:
        if key not in own:
            return f"the saved state has '{key}', which this model or method does not"
    return None


def unpack(sparse: Sparsifier, saved: Mapping[str, Tensor]) -> None:
    """Check everything, build everything, and only then change anything."""
    if difference := _first_difference(saved, pack(sparse)):
        raise ValueError(f"this state_dict does not fit the Sparsifier: {difference}")
    topologies, backwards = {}, {}
    for name, layer in sparse.layers.items():
        shape, device = layer.topology.shape, layer.weight.param.device

        def read(key: str, shape: tuple[int, ...] = shape, name: str = name) -> Topology:
            crow, col = saved[f"{name}.{key}crow"], saved[f"{name}.{key}col"]
            return Topology(shape, crow.clone(), col.clone())

        topologies[name] = read("").to(device)
        if layer.weight.reserve is not None:
            backwards[name] = read("backward_").to(device)
    for name, layer in sparse.layers.items():
        weight = layer.weight
        if name in backwards:
            layer.latent.choose(topologies[name], backwards[name])
            layer.latent.reserve = saved[f"{name}.reserve"].clone().to(weight.param)
            weight.zero_missing()
        else:
            weight.assign(topologies[name])
        layer.target = int(saved[f"{name}.target"])
        layer.explored.load(saved[f"{name}.explored"])
        if layer.momentum is not None:
            layer.momentum.mean.copy_(saved[f"{name}.momentum"])
            if layer.momentum.square is not None:
                layer.momentum.square.copy_(saved[f"{name}.momentum_square"])
    sparse.step, sparse.updates, sparse.seed = (int(saved[key]) for key in _COUNTERS)
