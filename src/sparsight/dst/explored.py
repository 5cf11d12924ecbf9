"""Which positions have ever existed: one bit each, for the in-time over-parameterisation rate (ITOP)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsight.kernels.index import positions_of, set_bits
from sparsight.topology import Topology


class Explored:
    """The union of all topologies a layer has had."""

    def __init__(self, topology: Topology) -> None:
        self.bits = torch.zeros((topology.size + 7) // 8, dtype=torch.uint8)
        self.add(topology)

    def add(self, topology: Topology) -> None:
        set_bits(positions_of(topology).cpu(), self.bits)

    @property
    def count(self) -> int:
        return int(np.bitwise_count(self.bits.numpy()).sum())

    def load(self, bits: Tensor) -> None:
        self.bits = bits.cpu().clone()
