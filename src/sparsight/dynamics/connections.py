"""The topologies of sparse layers: churn, survival, exploration, dead neurons, and a small picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsight.dst.layer import Layer
from sparsight.dst.rewire import Rewiring
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics.records import Record
from sparsight.dynamics.samples import offsets
from sparsight.kernels.index import indices_in
from sparsight.topology import Topology, matrix_shape

GRID = 32
GENERATIONS = 5


@dataclass
class Lineage:
    """What is remembered of one layer between its updates."""

    first: Tensor
    """A sample of the positions that existed at the beginning."""
    grown: deque[Tensor] = field(default_factory=lambda: deque(maxlen=GENERATIONS + 1))
    """Samples of the positions grown by the last updates, the latest first."""
    fresh_count: int = 0
    churn: float | None = None
    margin: float | None = None
    fresh: Tensor | None = None
    """Which of the existing weights the last update grew (a sample), until their gradient has been seen."""
    changed: bool = True


class Connections:
    """Follows the updates of a Sparsifier."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.lineages = {
            name: Lineage(_sampled(layer.topology.positions(), 1))
            for name, layer in sparsifier.layers.items()
        }
        self.handle = sparsifier.register_update_hook(self._updating)
        self.flops_ratio: float | None = None

    def _updating(self, layer: Layer, rewiring: Rewiring) -> None:
        lineage = self.lineages.get(layer.name)
        if lineage is None:
            return
        new = (rewiring.source < 0).nonzero().squeeze(1)
        kept = rewiring.source[rewiring.source >= 0]
        lineage.churn = new.numel() / max(rewiring.after.nnz, 1)
        lineage.margin = _margin(layer.weight.values().abs(), kept)
        picked = _sampled(new, 2)
        lineage.fresh, lineage.fresh_count = picked, new.numel()
        lineage.grown.appendleft(rewiring.after.positions()[picked])
        lineage.changed = True

    def changed(self) -> list[str]:
        """The layers that were rewired since the last reading."""
        return [name for name, lineage in self.lineages.items() if lineage.changed]

    def read(self, step: int) -> list[Record]:
        """The state of every layer; what only an update changes, only after one."""
        found = []
        total, size, seen = 0, 0, 0
        for name, lineage in self.lineages.items():
            layer = self.sparsifier.layers.get(name)
            if layer is None:
                continue
            topology = layer.topology
            if lineage.changed:
                found += [
                    Record(step, f"sparse/{key}", name, value)
                    for key, value in self._after_update(layer, lineage).items()
                ]
                lineage.changed = False
            if (ratio := _grad_ratio(layer, lineage)) is not None:
                found.append(Record(step, "sparse/grad_ratio", name, ratio))
            explored = layer.explored.count
            found.append(Record(step, "sparse/density", name, topology.density))
            found.append(Record(step, "sparse/itop_rate", name, explored / max(topology.size, 1)))
            total, size, seen = total + topology.nnz, size + topology.size, seen + explored
        method = self.sparsifier.method
        whole = {
            "density": total / max(size, 1),
            "itop_rate": seen / max(size, 1),
            "updates": float(self.sparsifier.updates),
            "drop_fraction": float(method.fraction(self.sparsifier.step)),
        }
        if self.flops_ratio is not None:
            whole["flops_ratio"] = self.flops_ratio
        return found + [Record(step, f"sparse/{key}", "", value) for key, value in whole.items()]

    def _after_update(self, layer: Layer, lineage: Lineage) -> dict[str, float | NDArray[np.float32]]:
        topology = layer.topology
        _, fan_in = matrix_shape(topology.shape)
        positions = topology.positions()
        read = torch.bincount(topology.col, minlength=fan_in)
        found: dict[str, float | NDArray[np.float32]] = {
            "dead_neurons": float((topology.crow.diff() == 0).float().mean()),
            "dead_inputs": float((read == 0).float().mean()),
            "overlap": _share_in(positions, lineage.first),
            "topology_map": density_map(topology),
        }
        if lineage.churn is not None:
            found["churn"] = lineage.churn
            ages = [_share_in(positions, grown) for grown in list(lineage.grown)[1:]]
            if ages:
                found["survival"] = np.array(ages, np.float32)
        if lineage.margin is not None:
            found["drop_margin"] = lineage.margin
        return found


def _sampled(positions: Tensor, salt: int) -> Tensor:
    return positions[offsets(positions.numel(), salt).long().to(positions.device)].clone()


def _share_in(positions: Tensor, wanted: Tensor) -> float:
    """The share of `wanted` that is among `positions`, both sorted."""
    if not wanted.numel():
        return float("nan")
    return float((indices_in(positions, wanted.unique()) >= 0).float().mean())


def _margin(size: Tensor, kept: Tensor) -> float | None:
    """Mean magnitude of the dropped weights over that of the kept ones."""
    if kept.numel() in (0, size.numel()):
        return None
    # In float64: the dropped ones are the small difference of two large sums.
    total, stay = float(size.double().sum()), float(size[kept].double().sum())
    dropped = (total - stay) / (size.numel() - kept.numel())
    return dropped / (stay / kept.numel()) if stay else None


def _grad_ratio(layer: Layer, lineage: Lineage) -> float | None:
    """Once after an update, as soon as there is a gradient: that of the grown weights over the others'."""
    grad = layer.weight.grad()
    if grad is None or lineage.fresh is None or not lineage.fresh.numel():
        return None
    size = grad.abs()
    fresh, lineage.fresh = lineage.fresh, None
    grown = float(size[fresh].mean())
    others = size.numel() - lineage.fresh_count
    rest = float(size.sum()) - grown * lineage.fresh_count
    return grown / (rest / others) if others and rest > 0 else None


def grid_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a layer's small picture."""
    rows, fan_in = matrix_shape(shape)
    return min(rows, GRID), min(fan_in, GRID)


def density_map(topology: Topology) -> NDArray[np.float32]:
    """The density of the weights in a grid of at most 32 × 32 cells, row by row.

    >>> density_map(Topology.full((2, 2), torch.device("cpu"))).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    rows, fan_in = matrix_shape(topology.shape)
    high, wide = grid_of(topology.shape)
    row = torch.repeat_interleave(torch.arange(rows, device=topology.col.device), topology.crow.diff())
    cell = (row * high // rows) * wide + topology.col.long() * wide // fan_in
    count = torch.bincount(cell, minlength=high * wide).cpu().numpy()
    cells_high = np.bincount(np.arange(rows) * high // rows, minlength=high)
    cells_wide = np.bincount(np.arange(fan_in) * wide // fan_in, minlength=wide)
    result: NDArray[np.float32] = (count / np.outer(cells_high, cells_wide).reshape(-1)).astype(np.float32)
    return result


def describe(sparsifier: Sparsifier) -> list[dict[str, object]]:
    """What is known about the layers, for the store."""
    found: list[dict[str, object]] = []
    storage: Mapping[bool, str] = {True: "compressed", False: "masked"}
    for name, layer in sparsifier.layers.items():
        compressed = layer.weight.param.shape != torch.Size(layer.topology.shape)
        found.append(
            {
                "name": name,
                "family": "sparse",
                "shape": list(layer.topology.shape),
                "storage": storage[compressed],
                "map": list(grid_of(layer.topology.shape)),
            }
        )
    return found
