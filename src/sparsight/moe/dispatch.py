"""Dispatch: tokens to their experts and back, by one sort and one product per expert and matrix.

`dispatch` is what the layer calls. Plain MLP and GLU experts run through one autograd Function on pooled
buffers; any other module runs through `dispatch_any`, which is also the slow twin that the tests compare
with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparsight.moe.activations import Activation
from sparsight.moe.experts import fast_form
from sparsight.moe.pool import Pool
from sparsight.moe.routing import Routing


@dataclass(frozen=True)
class Plan:
    """The assignments in the order of their experts, and the way back to the tokens."""

    order: Tensor
    """[N] which assignment sits at each place."""
    token: Tensor
    """[N] the token at each place."""
    active: list[int]
    """Experts that got a token."""
    counts: list[int]
    """How many places each active expert has."""
    places: Tensor
    """[N] the places, token by token."""
    bags: Tensor
    """[T] where each token's places begin in `places`."""
    tokens: int


def plan(routing: Routing) -> Plan:
    """Sort the assignments by expert, once."""
    order = routing.expert.argsort(stable=True)
    token = routing.token[order]
    counts = torch.bincount(routing.expert, minlength=routing.experts).tolist()
    active = [e for e, count in enumerate(counts) if count]
    places = token.argsort(stable=True)
    per_token = torch.bincount(token, minlength=routing.tokens)
    bags = per_token.cumsum(0) - per_token
    return Plan(order, token, active, [counts[e] for e in active], places, bags, routing.tokens)


def _gather(x: Tensor, index: Tensor, pool: Pool) -> Tensor:
    out = pool.empty((index.numel(), x.shape[1]), x.dtype, x.device)
    return torch.index_select(x, 0, index, out=out)


def _sum_by_token(rows: Tensor, plan: Plan, weight: Tensor | None = None) -> Tensor:
    """[T, d] each token's rows, weighted and added; zero for a token without any."""
    if rows.shape[0] == 0:
        return rows.new_zeros(plan.tokens, rows.shape[1])
    scale = None if weight is None else weight[plan.places].to(rows.dtype)
    return functional.embedding_bag(plan.places, rows, plan.bags, mode="sum", per_sample_weights=scale)


class _Grouped(torch.autograd.Function):
    """x, weights and the matrices of the active experts → the combined output."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        pool: Pool,
        act: Activation,
        gated: bool,
        collect: Tensor | None,
        x: Tensor,
        weight: Tensor,
        expert_weight: Tensor | None,
        *matrices: Any,
    ) -> Tensor:
        w_in, b_in, w_out, b_out = (matrices[i::4] for i in range(4))
        n, device, dtype = plan.token.numel(), x.device, x.dtype
        hidden = w_out[0].shape[1] if n else 1
        width = 2 * hidden if gated else hidden
        rows = _gather(x, plan.token, pool)
        before = pool.empty((n, width), dtype, device)
        lifted = pool.empty((n, hidden), dtype, device) if gated else None
        middle = pool.empty((n, hidden), dtype, device)
        out = pool.empty((n, x.shape[1]), dtype, device)
        start = 0
        for i, count in enumerate(plan.counts):
            here = slice(start, start + count)
            start += count
            pre = _product(rows[here], w_in[i], b_in[i], before[here])
            if lifted is not None:
                up = act.into(pre[:, :hidden], lifted[here])
                torch.mul(up, pre[:, hidden:], out=middle[here])
            else:
                act.into(pre, middle[here])
            _product(middle[here], w_out[i], b_out[i], out[here])
            if collect is not None:
                collect[plan.active[i]] += out[here].sum(0)
        ordered = weight[plan.order]
        ctx.save_for_backward(rows, before, lifted, middle, out, ordered, expert_weight, *matrices)
        ctx.plan, ctx.pool, ctx.act, ctx.gated, ctx.hidden = plan, pool, act, gated, hidden
        return _sum_by_token(out, plan, ordered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, before, lifted, middle, out, ordered, expert_weight, *matrices = ctx.saved_tensors
        w_in, w_out = matrices[0::4], matrices[2::4]
        plan, pool, act, hidden = ctx.plan, ctx.pool, ctx.act, ctx.hidden
        wants_x, wants_weight = ctx.needs_input_grad[5], ctx.needs_input_grad[6]
        wants = [ctx.needs_input_grad[8 + i :: 4] for i in range(4)]
        back = _gather(grad.contiguous(), plan.token, pool)
        d_weight = None
        if wants_weight:
            d_weight = torch.empty_like(ordered)
            d_weight[plan.order] = torch.linalg.vecdot(back, out).to(ordered.dtype)
        through = ordered if expert_weight is None else expert_weight[plan.order]
        back.mul_(through.to(back.dtype)[:, None])
        d_middle = pool.empty(tuple(middle.shape), middle.dtype, middle.device)
        d_before = pool.empty(tuple(before.shape), before.dtype, before.device)
        d_rows = pool.empty(tuple(rows.shape), rows.dtype, rows.device) if wants_x else None
        grads: list[Tensor | None] = [None] * len(matrices)
        start = 0
        for i, count in enumerate(plan.counts):
            here = slice(start, start + count)
            start += count
            above = back[here]
            if wants[2][i]:
                grads[4 * i + 2] = _outer(above, middle[here], pool)
            if wants[3][i]:
                grads[4 * i + 3] = above.sum(0)
            if not (wants_x or wants[0][i] or wants[1][i]):
                continue
            inner = torch.mm(above, w_out[i], out=d_middle[here])
            below, pre = d_before[here], before[here]
            if lifted is not None:
                torch.mul(inner, lifted[here], out=below[:, hidden:])
                inner.mul_(pre[:, hidden:])
                act.back(inner, pre[:, :hidden], below[:, :hidden])
            else:
                act.back(inner, pre, below)
            if wants[0][i]:
                grads[4 * i] = _outer(below, rows[here], pool)
            if wants[1][i]:
                grads[4 * i + 1] = below.sum(0)
            if d_rows is not None:
                torch.mm(below, w_in[i], out=d_rows[here])
        d_x = None if d_rows is None else _sum_by_token(d_rows, plan)
        return (None, None, None, None, None, d_x, d_weight, None, *grads)


def _product(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def _outer(left: Tensor, right: Tensor, pool: Pool) -> Tensor:
    out = pool.empty((left.shape[1], right.shape[1]), left.dtype, left.device)
    return torch.mm(left.t(), right, out=out)


def dispatch(
    x: Tensor, routing: Routing, experts: nn.ModuleList, pool: Pool, collect: Tensor | None = None
) -> Tensor:
    """y_t = Σ weight · expert(x_t) over the token's assignments; zero for a token that has none.

    `collect` [E, d], where given, receives the sum of each expert's outputs. An expert without a token takes
    no part in the graph, so its gradients stay None and the optimizer passes over it.
    """
    plain = fast_form(experts)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if plain is None:
        return dispatch_any(x, routing, experts, collect)
    act, gated = plain
    made = plan(routing)
    matrices: list[Tensor | None] = []
    for e in made.active:
        first, last = experts[e].parts()  # type: ignore[operator]
        for tensor in (first.weight, first.bias, last.weight, last.bias):
            matrices.append(tensor if tensor is None else tensor.to(x.dtype))
    with torch.autocast(kind, enabled=False):
        return _Grouped.apply(  # type: ignore[no-any-return]
            made, pool, act, gated, collect, x, routing.weight, _through(routing), *matrices
        )


def _through(routing: Routing) -> Tensor | None:
    return None if routing.expert_weight is None else routing.expert_weight.detach()


def dispatch_any(
    x: Tensor, routing: Routing, experts: nn.ModuleList, collect: Tensor | None = None
) -> Tensor:
    """The same for experts of any kind, by ordinary autograd."""
    y = x.new_zeros(routing.tokens, x.shape[1])
    through = _through(routing)
    for e in range(routing.experts):
        mine = (routing.expert == e).nonzero().squeeze(1)
        if mine.numel() == 0:
            continue
        token = routing.token[mine]
        out = experts[e](x.index_select(0, token))
        if collect is not None:
            collect[e] += out.detach().sum(0)
        weight = routing.weight[mine].to(out.dtype)[:, None]
        part = weight * out
        if through is not None:
            # The output weighs `weight`, but what flows back into the expert weighs `through`.
            back = through[mine].to(out.dtype)[:, None]
            part = weight * out.detach() + back * (out - out.detach())
        y = y.index_add(0, token, part.to(y.dtype))
    return y
