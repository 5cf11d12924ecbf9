"""y·ω, a learned scale of a layer's output, on recycled memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsight.moe.pool import Pool


def _product(a: Tensor, b: Tensor, pool: Pool) -> Tensor:
    return torch.mul(a, b, out=pool.empty(tuple(a.shape), a.dtype, a.device))


class _Stretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, omega: Tensor, pool: Pool) -> Tensor:
        ctx.save_for_backward(y, omega)
        ctx.pool = pool
        return _product(y, omega, pool)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, omega = ctx.saved_tensors
        return _product(grad, omega, ctx.pool), _product(grad, y, ctx.pool).sum(0), None


def stretch(y: Tensor, omega: Tensor, pool: Pool) -> Tensor:
    """[T, d] · [d].

    >>> stretch(torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0]), Pool()).tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    if torch.compiler.is_compiling():  # the compiler minds its own memory
        return y * omega.to(y.dtype)
    return _Stretch.apply(y, omega.to(y.dtype), pool)  # type: ignore[no-any-return]
