"""The same operations as native.py in obvious torch: spread the values into a dense weight and compute.

The slow twin that the native kernels are tested against, and what runs where they were not built.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional, grad

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
Pair = tuple[int, int]


class Plan:
    """A topology, expanded: the row and column of every value."""

    bytes = 0

    def __init__(self, crow: Tensor, col: Tensor, shape: Pair, block: int = 1, *, taps: int = 1) -> None:
        self.outputs, self.inputs = shape
        self.block, self.taps = block, taps
        self.weights = col.numel() * block
        rows = torch.arange(crow.numel() - 1, device=col.device)
        rows = rows.repeat_interleave(crow.diff(), output_size=col.numel())
        self.row = (rows[:, None] * block + torch.arange(block, device=col.device)).flatten()
        self.col = col.long()[:, None].expand(-1, block).flatten()

    def dense(self, values: Tensor) -> Tensor:
        """The weight as a matrix, zero where nothing exists."""
        weight = values.new_zeros((self.outputs, self.inputs))
        weight[self.row, self.col] = values
        return weight


def linear(plan: Plan, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x Wᵀ (+ bias) for x [batch, inputs]."""
    return functional.linear(x, plan.dense(values), bias)


def linear_backward(
    plan: Plan, dy: Tensor, x: Tensor, values: Tensor, *, need_x: bool = True, need_bias: bool = True
) -> Grads:
    """(dx, dvalues, dbias) of linear; None where not needed."""
    dx = dy @ plan.dense(values) if need_x else None
    return dx, (dy.T @ x)[plan.row, plan.col], dy.sum(0) if need_bias else None


def conv2d(
    plan: Plan,
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """Convolution of x [batch, channels, height, width]; the plan's index is (out, channels · taps)."""
    weight = plan.dense(values).view(plan.outputs, x.shape[1], *kernel)
    return functional.conv2d(x, weight, bias, stride, padding, dilation)


def conv2d_backward(
    plan: Plan,
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    need_x: bool = True,
    need_bias: bool = True,
) -> Grads:
    """(dx, dvalues, dbias) of conv2d; None where not needed."""
    size = (plan.outputs, x.shape[1], *kernel)
    weight = plan.dense(values).view(size)
    dx = grad.conv2d_input(x.shape, weight, dy, stride, padding, dilation) if need_x else None
    dweight = grad.conv2d_weight(x, size, dy, stride, padding, dilation)
    dvalues = dweight.reshape(plan.outputs, plan.inputs)[plan.row, plan.col]
    return dx, dvalues, dy.sum((0, 2, 3)) if need_bias else None
