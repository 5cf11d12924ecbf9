"""The obvious way, in torch: spread the values into a dense weight and multiply.

Slow twin of every native kernel, and what runs where the native ones were not built.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_weight(values: Tensor, crow: Tensor, col: Tensor, fan_in: int) -> Tensor:
    """The weight as a matrix, zero where nothing exists."""
    rows = crow.numel() - 1
    weight = values.new_zeros(rows, fan_in)
    weight[_row_of_each(crow, col), col.long()] = values
    return weight


def _row_of_each(crow: Tensor, col: Tensor) -> Tensor:
    rows = torch.arange(crow.numel() - 1, device=col.device)
    return rows.repeat_interleave(crow.diff(), output_size=col.numel())


def linear(x: Tensor, values: Tensor, bias: Tensor | None, crow: Tensor, col: Tensor) -> Tensor:
    """Y = X Wᵀ + b for X [batch, fan_in]."""
    y = x @ dense_weight(values, crow, col, x.shape[1]).T
    return y if bias is None else y + bias


def linear_backward(
    dy: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dX = dY W, dW at the existing positions alone, and db."""
    dx = dy @ dense_weight(values, crow, col, x.shape[1])
    dw = (dy.T @ x)[_row_of_each(crow, col), col.long()]
    return dx, dw, dy.sum(0)
