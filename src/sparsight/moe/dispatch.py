"""Dispatch: tokens to their experts and back, by one sort and one product per expert and matrix.

`dispatch` is what the layer calls. Plain MLP and GLU experts run through one autograd Function on pooled
buffers; any other module runs through `dispatch_any`, which is also the slow twin that the tests compare
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparsight.moe.activations import Activation
from sparsight.moe.experts import plain_form
from sparsight.moe.pool import Pool
from sparsight.moe.routing import Routing

_BAND = 1 << 17
"""Elements of a hidden layer that fit a core's cache with what is made of them."""


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
    """[k, T] where every token has k places; else [N], token by token."""
    bags: Tensor | None
    """[T] where each token's places begin in `places`, unless every token has k."""
    tokens: int

    def bands(self, rows: int) -> list[tuple[slice, slice]]:
        """(experts, places) of neighbours that together have about `rows` places.

        What is done element by element is done for a band at once: often enough to stay in the cache,
        seldom enough that many small experts do not pay for many small calls.
        """
        made, first, start, end = [], 0, 0, 0
        for i, count in enumerate(self.counts):
            end += count
            if end - start >= rows or i + 1 == len(self.counts):
                made.append((slice(first, i + 1), slice(start, end)))
                first, start = i + 1, end
        return made


def plan(routing: Routing) -> Plan:
    """Sort the assignments by expert, once."""
    token, tokens = routing.token, routing.tokens
    order = routing.expert.argsort(stable=True)
    counts = torch.bincount(routing.expert, minlength=routing.experts).tolist()
    active = [e for e, count in enumerate(counts) if count]
    served = [counts[e] for e in active]
    sorted_token = token[order]
    k = token.numel() // tokens
    everyone = torch.arange(tokens, device=token.device)
    if k and k * tokens == token.numel() and bool((token.view(k, tokens) == everyone).all()):
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel(), device=order.device)
        return Plan(order, sorted_token, active, served, places.view(k, tokens), None, tokens)
    per_token = torch.bincount(token, minlength=tokens)
    places, bags = sorted_token.argsort(stable=True), per_token.cumsum(0) - per_token
    return Plan(order, sorted_token, active, served, places, bags, tokens)


def _gather(x: Tensor, index: Tensor, pool: Pool) -> Tensor:
    out = pool.empty((index.numel(), x.shape[1]), x.dtype, x.device)
    return torch.index_select(x, 0, index, out=out)


def _sum_by_token(rows: Tensor, plan: Plan, pool: Pool, weight: Tensor | None = None) -> Tensor:
    """[T, d] each token's rows, weighted and added; zero where there are none. `weight` is by assignment."""
    if rows.shape[0] == 0:
        return rows.new_zeros(plan.tokens, rows.shape[1])
    weight = None if weight is None else weight.to(rows.dtype)
    if plan.bags is not None:
        scale = None if weight is None else weight[plan.order][plan.places]
        return functional.embedding_bag(plan.places, rows, plan.bags, mode="sum", per_sample_weights=scale)
    total = _gather(rows, plan.places[0], pool)
    columns = None if weight is None else weight.view(*plan.places.shape, 1)
    if columns is not None:
        total.mul_(columns[0])
    for j in range(1, plan.places.shape[0]):
        more = _gather(rows, plan.places[j], pool)
        total = total.add_(more) if columns is None else total.addcmul_(more, columns[j])
    return total


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
        n, dim = plan.token.numel(), x.shape[1]
        hidden = w_out[0].shape[1] if n else 1
        width = 2 * hidden if gated else hidden
        shapes = [(n, dim), (n, width), (n, hidden), (n, dim), (n if gated else 0, hidden)]
        rows, before, middle, out, lifted = pool.several(shapes, x.dtype, x.device)
        torch.index_select(x, 0, plan.token, out=rows)
        row, pre, mid, end = (t.split(plan.counts) for t in (rows, before, middle, out))
        for experts, places in plan.bands(_BAND // hidden):
            for i in range(experts.start, experts.stop):
                _product(row[i], w_in[i], b_in[i], pre[i])
            band = before[places]
            if gated:
                up = act.into(band[:, :hidden], lifted[places])
                torch.mul(up, band[:, hidden:], out=middle[places])
            else:
                act.into(band, middle[places])
            for i in range(experts.start, experts.stop):
                _product(mid[i], w_out[i], b_out[i], end[i])
        if collect is not None:
            for e, part in zip(plan.active, end, strict=True):
                collect[e] += part.sum(0)
        ctx.save_for_backward(rows, before, lifted, middle, out, weight, expert_weight, *matrices)
        ctx.plan, ctx.pool, ctx.act, ctx.gated, ctx.hidden = plan, pool, act, gated, hidden
        return _sum_by_token(out, plan, pool, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, before, lifted, middle, out, weight, expert_weight, *matrices = ctx.saved_tensors
        plan, pool, act, gated, hidden = ctx.plan, ctx.pool, ctx.act, ctx.gated, ctx.hidden
        w_in, w_out = matrices[0::4], matrices[2::4]
        wants_x, wants_weight = ctx.needs_input_grad[5], ctx.needs_input_grad[6]
        wants = [ctx.needs_input_grad[8 + i :: 4] for i in range(4)]
        inside = wants_x or any(wants[0]) or any(wants[1])
        shapes = [tuple(t.shape) for t in (rows, rows, middle, before)]
        back, d_rows, d_middle, d_before = pool.several(shapes, rows.dtype, rows.device)
        torch.index_select(grad.contiguous(), 0, plan.token, out=back)
        d_weight = None
        if wants_weight:
            # d_rows is not needed yet, so it holds the products whose sums these are.
            d_weight = torch.empty_like(weight)
            d_weight[plan.order] = torch.mul(back, out, out=d_rows).sum(1).to(weight.dtype)
        through = weight if expert_weight is None else expert_weight
        back.mul_(through[plan.order].to(back.dtype)[:, None])
        above, row, mid, inner, below, d_row = (
            t.split(plan.counts) for t in (back, rows, middle, d_middle, d_before, d_rows)
        )
        # Transposed once and cut along the columns, which are the same views with fewer calls.
        above_t, below_t = back.t().split(plan.counts, 1), d_before.t().split(plan.counts, 1)
        d_in, d_out = _slots(w_in, wants[0], pool), _slots(w_out, wants[2], pool)
        for experts, places in plan.bands(_BAND // hidden):
            span = range(experts.start, experts.stop)
            for i in span:
                if wants[2][i]:
                    torch.mm(above_t[i], mid[i], out=d_out[i])
                if inside:
                    torch.mm(above[i], w_out[i], out=inner[i])
            if not inside:
                continue
            band, d_band, d_mid = before[places], d_before[places], d_middle[places]
            if gated:
                torch.mul(d_mid, lifted[places], out=d_band[:, hidden:])
                d_mid.mul_(band[:, hidden:])
                act.back(d_mid, band[:, :hidden], d_band[:, :hidden])
            else:
                act.back(d_mid, band, d_band)
            for i in span:
                if wants[0][i]:
                    torch.mm(below_t[i], row[i], out=d_in[i])
                if wants_x:
                    torch.mm(below[i], w_in[i], out=d_row[i])
        grads: list[Tensor | None] = [None] * len(matrices)
        grads[0::4], grads[2::4] = d_in, d_out
        grads[1::4] = [b.sum(0) if want else None for b, want in zip(below, wants[1], strict=True)]
        grads[3::4] = [a.sum(0) if want else None for a, want in zip(above, wants[3], strict=True)]
        d_x = _sum_by_token(d_rows, plan, pool) if wants_x else None
        return (None, None, None, None, None, d_x, d_weight, None, *grads)


def _slots(matrices: Sequence[Tensor], wanted: Sequence[bool], pool: Pool) -> list[Any]:
    """Where each matrix's gradient goes; None where nobody wants it."""
    shapes = [tuple(m.shape) for m, want in zip(matrices, wanted, strict=True) if want]
    made = iter(pool.several(shapes, matrices[0].dtype, matrices[0].device)) if shapes else iter(())
    return [next(made) if want else None for want in wanted]


def _product(x: Tensor, w: Tensor, b: Tensor | None, out: Tensor) -> Tensor:
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def dispatch(
    x: Tensor, routing: Routing, experts: nn.ModuleList, pool: Pool, collect: Tensor | None = None
) -> Tensor:
    """y_t = Σ weight · expert(x_t) over the token's assignments; zero for a token that has none.

    `collect` [E, d], where given, receives the sum of each expert's outputs. An expert without a token takes
    no part in the graph, so its gradients stay None and the optimizer passes over it.
    """
    plain = plain_form(experts)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if plain is None:
        return dispatch_any(x, routing, experts, collect)
    made = plan(routing)
    matrices: list[Tensor | None] = []
    for e in made.active:
        for layer in plain.layers[e]:
            matrices += (layer.weight, layer.bias)
    if any(m is not None and m.dtype != x.dtype for m in matrices):
        matrices = [m if m is None else m.to(x.dtype) for m in matrices]
    with torch.autocast(kind, enabled=False):
        return _Grouped.apply(  # type: ignore[no-any-return]
            made,
            pool,
            plain.activation,
            plain.gated,
            collect,
            x,
            routing.weight,
            _through(routing),
            *matrices,
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
