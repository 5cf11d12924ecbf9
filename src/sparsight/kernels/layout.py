"""In which order a compressed weight keeps its values, and the plan that goes with it.

Row-major, as `topology.positions()` lists them; but where the topology comes in blocks of 4 or 8 neighbouring
rows that share their columns, the values of a block lie together, which is what makes its kernel fast. The
order depends on the topology alone, so that a checkpoint means the same everywhere.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.kernels import native, reference
from sparsight.topology import Topology

AnyPlan = native.Plan | reference.Plan


@dataclass(frozen=True, eq=False)
class Layout:
    """A topology as the kernels see it."""

    topology: Topology
    plan: AnyPlan
    order: Tensor | None
    """For each stored value, its index among `topology.positions()`; None where they are the same."""

    def stored(self, by_position: Tensor) -> Tensor:
        """From the order of the positions to the order of storage."""
        return by_position if self.order is None else by_position[self.order]

    def by_position(self, stored: Tensor) -> Tensor:
        """From the order of storage to the order of the positions."""
        if self.order is None:
            return stored
        out = torch.empty_like(stored)
        out[self.order] = stored
        return out


def layout_of(topology: Topology, stride: tuple[int, int] = (1, 1)) -> Layout:
    """The layout of a topology, with a native plan where there are native kernels.

    The stride is that of a convolution: its plan depends on it, the order of the values does not.

    >>> layout_of(Topology.full((8, 3))).plan.block
    8
    """
    block = next((rows for rows in (8, 4) if _is_blocked(topology, rows)), 1)
    crow, col = topology.crow, topology.col
    order = None
    if block > 1:
        lengths = crow.diff()[::block].long()
        starts = crow[:-1:block].long()
        entry = torch.arange(col.numel() // block)
        group = torch.arange(lengths.numel()).repeat_interleave(lengths)
        crow = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
        within = entry - crow[group]
        first = starts[group] + within  # the value of the block's first row
        order = (first[:, None] + lengths[group][:, None] * torch.arange(block)).flatten()
        col = topology.col[first].contiguous()
    taps = topology.fan_in // topology.shape[1] if len(topology.shape) > 2 else 1
    shape = (topology.rows, topology.fan_in)
    kind: native.Kind = "linear"
    if len(topology.shape) > 2:
        kind = "direct" if block == 1 and stride == (1, 1) else "unfolded"
    return Layout(topology, _make_plan(crow, col, shape, block, taps, kind), order)


def _make_plan(
    crow: Tensor, col: Tensor, shape: tuple[int, int], block: int, taps: int, kind: native.Kind
) -> AnyPlan:
    if native.available():
        return native.Plan(crow, col, shape, block, kind=kind, taps=taps)
    warnings.warn(
        "the native kernels are not there, so compressed layers compute in plain torch, slowly "
        f"({native.why_unavailable()}); see `sparsight doctor --system`",
        RuntimeWarning,
        stacklevel=2,
    )
    return reference.Plan(crow, col, shape, block, taps=taps)


def _is_blocked(topology: Topology, block: int) -> bool:
    """Whether every group of `block` rows has the same columns."""
    if topology.rows % block or topology.nnz == 0:
        return False
    lengths = topology.crow.diff().view(-1, block)
    if not bool((lengths == lengths[:, :1]).all()):
        return False
    crow = topology.crow.long()
    row = topology.row_of_each()
    within = torch.arange(topology.nnz) - crow[row]
    return torch.equal(topology.col[crow[row // block * block] + within], topology.col)
