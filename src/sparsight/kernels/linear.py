"""The sparse linear operation as autograd and torch.compile see it.

Eager code goes through one autograd Function, which costs a few microseconds; compiled code through an
operator registered with the dispatcher, so that the layer does not break the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsight.kernels import native, reference
from sparsight.kernels.handles import resolve
from sparsight.kernels.taps import Tap

Grads = tuple[Tensor, Tensor, Tensor]


def forward(
    x: Tensor, values: Tensor, bias: Tensor | None, crow: Tensor, col: Tensor, plan: native.Plan | None
) -> Tensor:
    """Y = X Wᵀ + b by the native kernel where there is a plan for it, else by the reference."""
    if plan is not None:
        return native.linear(plan, x, values, bias)
    with torch.autocast("cpu", enabled=False):  # in the type of the values, whatever surrounds us
        return reference.linear(x, values, bias, crow, col)


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    crow: Tensor,
    col: Tensor,
    plan: native.Plan | None,
    tap: Tap | None,
) -> Grads:
    """dX, dW at the existing positions, db; and what a dense gradient needs, into the tap."""
    if tap is not None:
        tap.collect(x, dy)
    if plan is not None:
        return native.linear_backward(plan, dy, x, values)
    return reference.linear_backward(dy, x, values, crow, col)


class SparseLinearFunction(torch.autograd.Function):
    """Eager mode: no dispatcher between Python and the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        crow: Tensor,
        col: Tensor,
        plan: native.Plan | None,
        tap: Tap | None,
    ) -> Tensor:
        ctx.save_for_backward(x, values, crow, col)
        ctx.plan, ctx.tap = plan, tap
        return forward(x, values, bias, crow, col, plan)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, values, crow, col = ctx.saved_tensors
        dx, dvalues, dbias = backward(dy.contiguous(), x, values, crow, col, ctx.plan, ctx.tap)
        return dx, dvalues, dbias if ctx.needs_input_grad[2] else None, None, None, None, None


# -- the same as an operator, for torch.compile: plan and tap come as a tensor of handles ----------------


@torch.library.custom_op("sparsight::linear", mutates_args=())
def _linear(
    x: Tensor, values: Tensor, bias: Tensor | None, crow: Tensor, col: Tensor, handles: Tensor
) -> Tensor:
    plan, _ = resolve(handles)
    return forward(x.contiguous(), values, bias, crow, col, plan)


@_linear.register_fake
def _(x: Tensor, values: Tensor, bias: Tensor | None, crow: Tensor, col: Tensor, handles: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], crow.shape[0] - 1)


@torch.library.custom_op("sparsight::linear_backward", mutates_args=())
def _linear_backward(
    dy: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, handles: Tensor
) -> Grads:
    plan, tap = resolve(handles)
    return backward(dy.contiguous(), x.contiguous(), values, crow, col, plan, tap)


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, values: Tensor, crow: Tensor, col: Tensor, handles: Tensor) -> Grads:
    return x.new_empty(x.shape), torch.empty_like(values), dy.new_empty(dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, bias, crow, col, handles = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, values, crow, col, handles)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dvalues, dbias = torch.ops.sparsight.linear_backward(dy, *ctx.saved_tensors)
    return dx, dvalues, dbias if ctx.has_bias else None, None, None, None


_linear.register_autograd(_differentiate, setup_context=_save)
