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
from sparsight.nn.compressed import CompressedWeight
from sparsight.topology import Topology, matrix_shape

GRID = 32
GENERATIONS = 5


@dataclass
class Lineage:
    """What is remembered of one layer between its updates."""

    first: NDArray[np.int64]
    """A sample of the positions that existed at the beginning."""
    grown: deque[NDArray[np.int64]] = field(default_factory=lambda: deque(maxlen=GENERATIONS + 1))
    """Samples of the positions grown by the last updates, the latest first."""
    fresh_count: int = 0
    churn: float | None = None
    margin: float | None = None
    fresh: NDArray[np.int64] | None = None
    """Which of the existing weights the last update grew (a sample), until their gradient has been seen."""
    changed: bool = True
    explored: int = 0
    """How many positions have existed by the last update."""


class Connections:
    """Follows the updates of a Sparsifier."""

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        self.lineages = {
            name: Lineage(positions_at(layer.topology, offsets(layer.topology.nnz, 1)))
            for name, layer in sparsifier.layers.items()
        }
        self.handle = sparsifier.register_update_hook(self._updating)

    def _updating(self, layer: Layer, rewiring: Rewiring) -> None:
        lineage = self.lineages.get(layer.name)
        if lineage is None:
            return
        new = (rewiring.source < 0).nonzero().squeeze(1).cpu().numpy()
        lineage.churn = len(new) / max(rewiring.after.nnz, 1)
        lineage.margin = _margin(layer.weight.values().abs(), rewiring, len(new))
        lineage.fresh, lineage.fresh_count = new[offsets(len(new), 2)], len(new)
        lineage.grown.appendleft(positions_at(rewiring.after, lineage.fresh))
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
                lineage.explored = layer.explored.count
                lineage.changed = False
            if (ratio := _grad_ratio(layer, lineage)) is not None:
                found.append(Record(step, "sparse/grad_ratio", name, ratio))
            found.append(Record(step, "sparse/density", name, topology.density))
            found.append(Record(step, "sparse/itop_rate", name, lineage.explored / max(topology.size, 1)))
            total, size, seen = total + topology.nnz, size + topology.size, seen + lineage.explored
        method = self.sparsifier.method
        whole = {
            "density": total / max(size, 1),
            "itop_rate": seen / max(size, 1),
            "updates": float(self.sparsifier.updates),
            "drop_fraction": float(method.fraction(self.sparsifier.step)),
        }
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


def positions_at(topology: Topology, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The flat positions of some existing weights, given by their numbers in row-major order.

    >>> positions_at(Topology.full((2, 3)), np.array([0, 4]))
    array([0, 4])
    """
    _, fan_in = matrix_shape(topology.shape)
    crow, col = topology.crow.cpu().numpy(), topology.col.cpu().numpy()
    row = np.searchsorted(crow, numbers, side="right") - 1
    found: NDArray[np.int64] = row.astype(np.int64) * fan_in + col[numbers]
    return found


def _share_in(positions: Tensor, wanted: NDArray[np.int64]) -> float:
    """The share of `wanted` that is among `positions`, both sorted."""
    if not len(wanted):
        return float("nan")
    found = indices_in(positions, torch.from_numpy(np.unique(wanted)).to(positions.device))
    return float((found >= 0).float().mean())


def _margin(size: Tensor, rewiring: Rewiring, grown: int) -> float | None:
    """Mean magnitude of the dropped weights over that of the kept ones."""
    kept = rewiring.after.nnz - grown
    dropped = rewiring.before.nnz - kept
    if not kept or not dropped:
        return None
    # The source of a grown weight is −1, which finds the zero at the end. Sums in float64: what was dropped
    # is the small difference of two large ones.
    stay = float(torch.cat([size, size.new_zeros(1)])[rewiring.source].sum(dtype=torch.float64))
    return (float(size.sum(dtype=torch.float64)) - stay) / dropped / (stay / kept) if stay else None


def _grad_ratio(layer: Layer, lineage: Lineage) -> float | None:
    """Once after an update, as soon as there is a gradient: that of the grown weights over the others'."""
    if lineage.fresh is None or not len(lineage.fresh) or layer.weight.param.grad is None:
        return None
    grad = layer.weight.grad()
    assert grad is not None
    size = grad.abs()
    fresh, lineage.fresh = lineage.fresh, None
    grown = float(size[torch.from_numpy(fresh).to(size.device)].mean())
    others = size.numel() - lineage.fresh_count
    rest = float(size.sum(dtype=torch.float64)) - grown * lineage.fresh_count
    return grown / (rest / others) if others and rest > 0 else None


def grid_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a layer's small picture."""
    rows, fan_in = matrix_shape(shape)
    return min(rows, GRID), min(fan_in, GRID)


def density_map(topology: Topology) -> NDArray[np.float32]:
    """The density of the weights in a grid of at most 32 × 32 cells, row by row.

    >>> density_map(Topology.full((2, 2))).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    rows, fan_in = matrix_shape(topology.shape)
    high, wide = grid_of(topology.shape)
    crow, col = topology.crow.cpu().numpy(), topology.col.cpu().numpy()
    cell = np.arange(fan_in) * wide // fan_in
    # Row r lies in band r·high // rows, so band b begins at row ceil(b·rows / high).
    first = -(-np.arange(high + 1) * rows // high)
    bands = [np.bincount(cell[col[crow[first[b]] : crow[first[b + 1]]]], minlength=wide) for b in range(high)]
    area = np.outer(np.diff(first), np.bincount(cell, minlength=wide))
    result: NDArray[np.float32] = (np.stack(bands) / area).reshape(-1).astype(np.float32)
    return result


def describe(sparsifier: Sparsifier) -> list[dict[str, object]]:
    """What is known about the layers, for the store."""
    found: list[dict[str, object]] = []
    storage: Mapping[bool, str] = {True: "compressed", False: "masked"}
    for name, layer in sparsifier.layers.items():
        compressed = isinstance(layer.weight, CompressedWeight)
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
