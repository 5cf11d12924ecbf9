"""SparseLinear: a linear layer whose parameter *is* the vector of its existing weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Parameter

from sparsight.kernels.layout import layout_of
from sparsight.kernels.ops import Geometry
from sparsight.nn.layer import SparseLayer
from sparsight.topology import Topology


class SparseLinear(SparseLayer):
    """Y = X Wᵀ + b on compressed storage: time, memory and optimizer state fall with density.

    >>> import torch
    >>> layer = SparseLinear.from_dense(nn.Linear(4, 2), Topology.from_mask(torch.eye(2, 4).bool()))
    >>> layer(torch.ones(3, 4)).shape, layer.values.shape
    (torch.Size([3, 2]), torch.Size([2]))
    """

    def __init__(self, topology: Topology, values: Tensor, bias: Tensor | None = None) -> None:
        if len(topology.shape) != 2:
            raise ValueError(f"SparseLinear needs a topology of two dimensions, got {topology.shape}")
        super().__init__(topology, values, bias)
        self.out_features, self.in_features = topology.shape

    @classmethod
    def from_dense(cls, layer: nn.Linear, topology: Topology) -> SparseLinear:
        """The existing weights of a dense layer; its bias is taken over, not copied."""
        values = layer.weight.detach().reshape(-1)[topology.positions()].clone()
        stored = Parameter(layout_of(topology).stored(values), layer.weight.requires_grad)
        return cls(topology, stored, layer.bias).train(layer.training)

    def to_dense(self) -> nn.Linear:
        """An ordinary layer with the same weights, zero where none existed; it takes over the bias."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = Parameter(self.weight.detach(), self.values.requires_grad)
        if self.bias is not None:
            layer.bias = self.bias
        return layer.train(self.training)

    @property
    def geometry(self) -> Geometry:
        return ()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"SparseLinear: expected inputs of width {self.in_features}, got shape {tuple(x.shape)}"
            )
        if x.dim() == 2:  # the usual case, spared two views
            return self._compute(x)
        y = self._compute(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, density={self.topology.density:.4g}"
        )
