"""SparseConv2d: a convolution on compressed storage."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Parameter

from sparsight.kernels.layout import layout_of
from sparsight.kernels.ops import Geometry
from sparsight.nn.layer import SparseLayer
from sparsight.topology import Topology

Pair = tuple[int, int]


def padding_of(layer: nn.Conv2d) -> Pair | None:
    """The zeros on each side as two numbers; None where both sides differ or are not zeros."""
    if layer.padding_mode != "zeros":
        return None
    if layer.padding == "valid":
        return (0, 0)
    if layer.padding == "same":
        spans = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(span % 2 for span in spans) else (spans[0] // 2, spans[1] // 2)
    return int(layer.padding[0]), int(layer.padding[1])


class SparseConv2d(SparseLayer):
    """A 2-d convolution on its existing weights: any stride, padding and dilation, groups = 1.

    >>> import torch
    >>> dense = nn.Conv2d(2, 3, 3, padding=1)
    >>> layer = SparseConv2d.from_dense(dense, Topology.from_mask(torch.rand(3, 2, 3, 3) < 0.5))
    >>> layer(torch.ones(1, 2, 5, 5)).shape
    torch.Size([1, 3, 5, 5])
    """

    def __init__(
        self,
        topology: Topology,
        values: Tensor,
        bias: Tensor | None = None,
        *,
        stride: Pair = (1, 1),
        padding: Pair = (0, 0),
        dilation: Pair = (1, 1),
    ) -> None:
        if len(topology.shape) != 4:
            raise ValueError(f"SparseConv2d needs a topology of four dimensions, got {topology.shape}")
        # Before the plan is made, which depends on the stride.
        self.out_channels, self.in_channels, rows, columns = topology.shape
        self.kernel_size = (rows, columns)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        super().__init__(topology, values, bias)

    @classmethod
    def from_dense(cls, layer: nn.Conv2d, topology: Topology) -> SparseConv2d:
        """The existing weights of a dense layer; its bias is taken over, not copied."""
        values = layer.weight.detach().reshape(-1)[topology.positions()].clone()
        stored = Parameter(layout_of(topology).stored(values), layer.weight.requires_grad)
        return cls.like(layer, topology, stored)

    @classmethod
    def like(cls, layer: nn.Conv2d, topology: Topology, values: Parameter) -> SparseConv2d:
        """A sparse layer with the geometry and bias of a dense one."""
        padding = padding_of(layer)
        if layer.groups != 1 or padding is None:
            raise ValueError(
                "SparseConv2d needs groups=1 and symmetric zero padding, got "
                f"groups={layer.groups}, padding={layer.padding!r} ({layer.padding_mode})"
            )
        stride, dilation = (layer.stride[0], layer.stride[1]), (layer.dilation[0], layer.dilation[1])
        sparse = cls(topology, values, layer.bias, stride=stride, padding=padding, dilation=dilation)
        return sparse.train(layer.training)

    def to_dense(self) -> nn.Conv2d:
        """An ordinary layer with the same weights, zero where none existed; it takes over the bias."""
        layer = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            bias=self.bias is not None,
            device="meta",
        )
        layer.weight = Parameter(self.weight.detach(), self.values.requires_grad)
        if self.bias is not None:
            layer.bias = self.bias
        return layer.train(self.training)

    @property
    def geometry(self) -> Geometry:
        return (self.kernel_size, self.stride, self.padding, self.dilation)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ValueError(
                f"SparseConv2d: expected inputs [..., {self.in_channels}, height, width], "
                f"got shape {tuple(x.shape)}"
            )
        y = self._compute(x if x.dim() == 4 else x[None])
        return y if x.dim() == 4 else y[0]

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"bias={self.bias is not None}, density={self.topology.density:.4g}"
        )
