"""The operations as autograd and torch.compile see them.

Eager code goes through one autograd Function, which costs a few microseconds; compiled code through an
operator registered with the dispatcher, so that the layer does not break the graph. Plan and tap reach the
operator as a tensor of handles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsight.kernels import native, reference
from sparsight.kernels.handles import resolve
from sparsight.kernels.layout import AnyPlan
from sparsight.kernels.taps import Tap

Geometry = tuple[tuple[int, int], ...]
"""Kernel, stride, padding and dilation of a convolution; empty for a linear layer."""


def forward(x: Tensor, values: Tensor, bias: Tensor | None, plan: AnyPlan, geometry: Geometry) -> Tensor:
    """Y = X Wᵀ + b, or the convolution, by the kernels that made the plan."""
    if isinstance(plan, native.Plan):
        if geometry:
            return native.conv2d(plan, x, values, bias, *geometry)
        return native.linear(plan, x, values, bias)
    with torch.autocast("cpu", enabled=False):  # in the type of the values, whatever surrounds us
        if geometry:
            return reference.conv2d(plan, x, values, bias, *geometry)
        return reference.linear(plan, x, values, bias)


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    plan: AnyPlan,
    tap: Tap | None,
    geometry: Geometry,
    *,
    need_x: bool = True,
    need_bias: bool = True,
) -> native.Grads:
    """dX, dW at the existing positions, db; and what a dense gradient needs, into the tap."""
    if tap is not None:
        tap.collect(x, dy)
    if isinstance(plan, native.Plan):
        if geometry:
            return native.conv2d_backward(plan, dy, x, values, *geometry, need_x=need_x, need_bias=need_bias)
        return native.linear_backward(plan, dy, x, values, need_x=need_x, need_bias=need_bias)
    with torch.autocast("cpu", enabled=False):
        if geometry:
            return reference.conv2d_backward(
                plan, dy, x, values, *geometry, need_x=need_x, need_bias=need_bias
            )
        return reference.linear_backward(plan, dy, x, values, need_x=need_x, need_bias=need_bias)


class SparseFunction(torch.autograd.Function):
    """Eager mode: no dispatcher between Python and the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        plan: AnyPlan,
        tap: Tap | None,
        geometry: Geometry,
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.plan, ctx.tap, ctx.geometry = plan, tap, geometry
        return forward(x, values, bias, plan, geometry)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # The guard against differentiating twice costs microseconds; only create_graph=True needs it.
        return _guarded(ctx, dy) if torch.is_grad_enabled() else _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values = ctx.saved_tensors
    need_x, _, need_bias, *_ = ctx.needs_input_grad
    grads = backward(
        dy.contiguous(), x, values, ctx.plan, ctx.tap, ctx.geometry, need_x=need_x, need_bias=need_bias
    )
    return *grads, None, None, None


_guarded = torch.autograd.function.once_differentiable(_gradients)


# -- the same as an operator, for torch.compile ----------------------------------------------------------


def _pairs(geometry: list[int]) -> Geometry:
    return tuple((geometry[i], geometry[i + 1]) for i in range(0, len(geometry), 2))


@torch.library.custom_op("sparsight::apply", mutates_args=())
def _apply(
    x: Tensor, values: Tensor, bias: Tensor | None, handles: Tensor, outputs: int, geometry: list[int]
) -> Tensor:
    plan, _ = resolve(handles)
    return forward(x.contiguous(), values, bias, plan, _pairs(geometry))


@_apply.register_fake
def _(
    x: Tensor, values: Tensor, bias: Tensor | None, handles: Tensor, outputs: int, geometry: list[int]
) -> Tensor:
    if not geometry:
        return x.new_empty(x.shape[0], outputs)
    kernel, stride, padding, dilation = _pairs(geometry)
    size = [
        (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    return x.new_empty(x.shape[0], outputs, *size)


@torch.library.custom_op("sparsight::apply_backward", mutates_args=())
def _apply_backward(
    dy: Tensor, x: Tensor, values: Tensor, handles: Tensor, geometry: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    plan, tap = resolve(handles)
    dx, dvalues, dbias = backward(dy.contiguous(), x.contiguous(), values, plan, tap, _pairs(geometry))
    assert dx is not None
    assert dvalues is not None
    assert dbias is not None
    return dx, dvalues, dbias


@_apply_backward.register_fake
def _(
    dy: Tensor, x: Tensor, values: Tensor, handles: Tensor, geometry: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(values), dy.new_empty(dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, bias, handles, _, geometry = inputs
    ctx.has_bias, ctx.geometry = bias is not None, geometry
    ctx.save_for_backward(x, values, handles)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, values, handles = ctx.saved_tensors
    dx, dvalues, dbias = torch.ops.sparsight.apply_backward(dy, x, values, handles, ctx.geometry)
    return dx, dvalues, dbias if ctx.has_bias else None, None, None, None


_apply.register_autograd(_differentiate, setup_context=_save)
