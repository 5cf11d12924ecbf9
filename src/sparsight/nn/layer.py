"""What sparse layers have in common: values on a topology, a layout for the kernels, copies, checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sparsight.kernels.handles import handle
from sparsight.kernels.layout import layout_of
from sparsight.kernels.ops import Geometry, SparseFunction
from sparsight.kernels.taps import Tap
from sparsight.topology import Topology

_TYPES = (torch.float32, torch.float64)


class SparseLayer(nn.Module, ABC):
    """A layer whose parameter `values` is the vector of its existing weights; CPU, float32 or float64.

    `values` lies in the order of `layout` (row-major but for row blocks); gradients and optimizer state have
    its length. The topology is part of the state_dict.
    """

    crow: Tensor
    col: Tensor

    def __init__(self, topology: Topology, values: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if values.shape != (topology.nnz,):
            raise ValueError(
                f"{type(self).__name__}: the topology has {topology.nnz} weights, got values of shape "
                f"{tuple(values.shape)}"
            )
        self.values = _as_parameter(values)
        self.bias = None if bias is None else _as_parameter(bias)
        self._handles = torch.zeros(2, dtype=torch.int64)
        self._tap: Tap | None = None
        self._take(topology)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """Kernel, stride, padding and dilation of a convolution; empty for a linear layer."""

    @property
    def topology(self) -> Topology:
        """Which weights exist."""
        return self.layout.topology

    @topology.setter
    def topology(self, topology: Topology) -> None:
        self._take(topology)

    @property
    def weight(self) -> Tensor:
        """The weight as a dense tensor, made anew at each call: to look at, writing to it changes nothing."""
        topology = self.topology
        flat = self.values.new_zeros(topology.size)
        flat[topology.positions()] = self.layout.by_position(self.values)
        return flat.view(topology.shape)

    @property
    def tap(self) -> Tap | None:
        """Who collects what a dense gradient needs; None on all steps but those."""
        return self._tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        if tap is not self._tap:
            self._tap = tap
            self._handles[1] = handle(tap)

    def index_bytes(self) -> int:
        """Bytes of the topology and of what the kernels derive from it."""
        order = 0 if self.layout.order is None else 8 * self.layout.order.numel()
        return 4 * (self.crow.numel() + self.col.numel()) + self.layout.plan.bytes + order

    def _compute(self, x: Tensor) -> Tensor:
        """The operation on inputs whose shape the layer has checked."""
        values, bias = self.values, self.bias
        if not (x.is_cpu and values.is_cpu and x.dtype == values.dtype and x.dtype in _TYPES):
            x = self._admitted(x)
        y: Tensor
        if torch.compiler.is_compiling():
            flat = [number for pair in self.geometry for number in pair]
            y = torch.ops.sparsight.apply(x, values, bias, self._handles, self.crow.shape[0] - 1, flat)
        else:
            y = SparseFunction.apply(x.contiguous(), values, bias, self.layout.plan, self._tap, self.geometry)
        return y

    def _admitted(self, x: Tensor) -> Tensor:
        """Inputs that are not of the usual kind: converted, or refused with the reason."""
        values, name = self.values, type(self).__name__
        if not (x.is_cpu and values.is_cpu):
            raise ValueError(
                f"{name} computes on the CPU, got inputs on {x.device} and weights on {values.device}; "
                "use sparsify(..., storage='masked') on other devices"
            )
        if values.dtype not in _TYPES:
            raise ValueError(
                f"{name} computes in float32 or float64, its weights are {values.dtype}; "
                "use sparsify(..., storage='masked') for other types"
            )
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: expected inputs of {values.dtype}, got {x.dtype}")
        return x.to(values.dtype)  # autocast hands us 16 bits; the kernels compute in 32

    def _take(self, topology: Topology) -> None:
        _, stride, *_ = self.geometry or ((1, 1), (1, 1))
        self.layout = layout_of(topology, stride)
        self.register_buffer("crow", topology.crow)
        self.register_buffer("col", topology.col)
        self._handles[0] = handle(self.layout.plan)

    def __getstate__(self) -> dict[str, Any]:
        # The layout is derived, and whoever collects goes on with the original.
        return {**self.__dict__, "layout": self.topology, "_tap": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        topology = self.__dict__.pop("layout")
        self._handles = torch.zeros(2, dtype=torch.int64)
        self._take(topology)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A saved topology may hold another number of weights: check it, then make room for it."""
        keys = [prefix + name for name in ("values", "crow", "col")]
        if all(key in state_dict for key in keys):
            values, crow, col = (state_dict[key] for key in keys)
            topology = Topology(self.topology.shape, crow.clone(), col.clone())
            if values.shape != (topology.nnz,):
                raise ValueError(
                    f"'{keys[0]}' has shape {tuple(values.shape)}, its topology {topology.nnz} weights"
                )
            resize(self.values, topology.nnz)
            self.topology = topology
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def resize(values: Tensor, length: int) -> None:
    """Give a parameter another length without making another parameter of it."""
    if values.numel() != length:
        dtype = values.dtype
        values.grad = None
        # A living graph keeps torch's node for this parameter, with its old length; a change of type is
        # what makes torch forget it.
        values.data = torch.empty(0, dtype=torch.float16)
        values.data = torch.zeros(length, dtype=dtype)


def _as_parameter(tensor: Tensor) -> Parameter:
    return tensor if isinstance(tensor, Parameter) else Parameter(tensor)
