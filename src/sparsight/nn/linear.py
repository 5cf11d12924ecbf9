"""SparseLinear: a linear layer whose parameter *is* the vector of its existing weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sparsight.kernels.handles import handle
from sparsight.kernels.linear import SparseLinearFunction
from sparsight.kernels.native import make_plan
from sparsight.kernels.reference import dense_weight
from sparsight.kernels.taps import Tap
from sparsight.topology import Topology


class SparseLinear(nn.Module):
    """Y = X Wᵀ + b on compressed storage: time, memory and optimizer state fall with density.

    The parameter `values` holds the existing weights in the order of `topology.positions()`; gradients
    and optimizer state have its length. CPU, float32 or float64.

    >>> layer = SparseLinear.from_dense(nn.Linear(4, 2), Topology.from_mask(torch.eye(2, 4).bool()))
    >>> layer(torch.ones(3, 4)).shape, layer.values.shape
    (torch.Size([3, 2]), torch.Size([2]))
    """

    crow: Tensor
    col: Tensor

    def __init__(self, topology: Topology, values: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        if len(topology.shape) != 2:
            raise ValueError(f"SparseLinear needs a topology of two dimensions, got {topology.shape}")
        if values.shape != (topology.nnz,):
            raise ValueError(
                f"SparseLinear: the topology has {topology.nnz} weights, got values of shape "
                f"{tuple(values.shape)}"
            )
        self.out_features, self.in_features = topology.shape
        self.values = _as_parameter(values)
        self.bias = None if bias is None else _as_parameter(bias)
        self.register_buffer("crow", topology.crow)
        self.register_buffer("col", topology.col)
        self._topology = topology
        self._handles = torch.zeros(2, dtype=torch.int64)
        self._tap: Tap | None = None
        self._replan()

    @classmethod
    def from_dense(cls, layer: nn.Linear, topology: Topology) -> SparseLinear:
        """The existing weights of a dense layer; its bias is taken over, not copied."""
        values = layer.weight.detach().reshape(-1)[topology.positions()].clone()
        sparse = cls(topology, Parameter(values, layer.weight.requires_grad), layer.bias)
        return sparse.train(layer.training)

    def to_dense(self) -> nn.Linear:
        """An ordinary layer with the same weights, zero where none existed; it takes over the bias."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = Parameter(self.weight.detach(), self.values.requires_grad)
        if self.bias is not None:
            layer.bias = self.bias
        return layer.train(self.training)

    @property
    def topology(self) -> Topology:
        """Which weights exist."""
        return self._topology

    @topology.setter
    def topology(self, topology: Topology) -> None:
        self._topology = topology
        self.crow, self.col = topology.crow, topology.col
        self._replan()

    @property
    def weight(self) -> Tensor:
        """The weight as a dense matrix, made anew at each call."""
        return dense_weight(self.values, self.crow, self.col, self.in_features)

    @property
    def tap(self) -> Tap | None:
        """Who collects what a dense gradient needs; None on all steps but those."""
        return self._tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        if tap is not self._tap:
            self._tap = tap
            self._handles[1] = handle(tap)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"SparseLinear: expected inputs of width {self.in_features}, got shape {tuple(x.shape)}"
            )
        if x.device.type != "cpu" or self.values.device.type != "cpu":
            raise ValueError(
                f"SparseLinear computes on the CPU, got inputs on {x.device} and weights on "
                f"{self.values.device}; use sparsify(..., storage='masked') on other devices"
            )
        if x.dtype != self.values.dtype:
            x = x.to(self.values.dtype)  # autocast hands us 16 bits; the kernels compute in 32
        flat = x.reshape(-1, self.in_features)
        y: Tensor
        if torch.compiler.is_compiling():
            y = torch.ops.sparsight.linear(flat, self.values, self.bias, self.crow, self.col, self._handles)
        else:
            y = SparseLinearFunction.apply(
                flat.contiguous(), self.values, self.bias, self.crow, self.col, self._plan, self._tap
            )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, density={self._topology.density:.4g}"
        )

    def _replan(self) -> None:
        self._plan = make_plan(self.crow, self.col, (self.out_features, self.in_features))
        self._handles[0] = handle(self._plan)

    def __getstate__(self) -> dict[str, Any]:
        # A plan is rebuilt where it is needed, and whoever collects goes on with the original.
        return {**self.__dict__, "_plan": None, "_tap": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handles = torch.zeros(2, dtype=torch.int64)
        self._replan()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """A saved topology may hold another number of weights: check it, then make room for it."""
        keys = [prefix + name for name in ("values", "crow", "col")]
        if all(key in state_dict for key in keys):
            values, crow, col = (state_dict[key] for key in keys)
            topology = Topology((self.out_features, self.in_features), crow.clone(), col.clone())
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
