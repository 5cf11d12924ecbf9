"""Which positions have ever existed: one bit each, for the in-time over-parameterisation rate (ITOP)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsight.topology import Topology


class Explored:
    """The union of all topologies a layer has had."""

    def __init__(self, topology: Topology) -> None:
        self.size = topology.size
        self.bits = np.zeros((self.size + 7) // 8, dtype=np.uint8)
        self.add(topology)

    def add(self, topology: Topology) -> None:
        positions = topology.positions().cpu().numpy()
        if positions.size == 0:
            return
        byte = positions >> 3
        bit = np.left_shift(np.uint8(1), (positions & 7).astype(np.uint8))
        starts = np.flatnonzero(np.diff(byte, prepend=-1))
        self.bits[byte[starts]] |= np.bitwise_or.reduceat(bit, starts)

    @property
    def count(self) -> int:
        return int(np.bitwise_count(self.bits).sum())

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.bits.copy())

    def load(self, bits: Tensor) -> None:
        self.bits = bits.cpu().numpy().copy()
