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
from sparsight.moe.products import Kit, back_product, kit_for
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


def plan(token: Tensor, expert: Tensor, tokens: int, experts: int) -> Plan:
    """Sort the assignments by expert, once."""
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=experts).tolist()
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


def _sum_by_token(rows: Tensor, plan: Plan, pool: Pool, kit: Kit, weight: Tensor | None = None) -> Tensor:
    """[T, d] each token's rows, weighted and added; zero where there are none. `weight` is by assignment."""
    if rows.shape[0] == 0:
        return rows.new_zeros(plan.tokens, rows.shape[1])
    weight = None if weight is None else weight.to(rows.dtype)
    if plan.bags is not None:
        scale = None if weight is None else weight[plan.order][plan.places]
        return functional.embedding_bag(plan.places, rows, plan.bags, mode="sum", per_sample_weights=scale)
    out = pool.empty((plan.tokens, rows.shape[1]), rows.dtype, rows.device)
    return kit.gather_sum(rows, plan.places, None if weight is None else weight.contiguous(), out)


class _Grouped(torch.autograd.Function):
    """x, weights and the matrices of the active experts → the combined output."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        form: Form,
        collect: Tensor | None,
        x: Tensor,
        weight: Tensor,
        expert_weight: Tensor | None,
        *matrices: Any,
    ) -> Tensor:
        kept = _scratch(plan, form, x, matrices)
        y = forward(plan, form, collect, x, weight, matrices, kept)
        ctx.save_for_backward(*kept, weight, expert_weight, *matrices)
        ctx.plan, ctx.form = plan, form
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpointed pass is computed again for it
        *kept, weight, expert_weight = saved[:6]
        matrices = saved[6:]
        _, _, _, wants_x, wants_weight, _, *wants = ctx.needs_input_grad
        through = weight if expert_weight is None else expert_weight
        d_x, d_weight, grads = backward(
            grad, ctx.plan, ctx.form, kept, weight, through, matrices, (wants_x, wants_weight, wants)
        )
        return (None, None, None, d_x, d_weight, None, *grads)


@dataclass(frozen=True)
class Form:
    """What kind of experts these are, and what computes them."""

    activation: Activation
    gated: bool
    kit: Kit
    pool: Pool


def _scratch(plan: Plan, form: Form, x: Tensor, matrices: Sequence[Any]) -> list[Tensor]:
    """Rows, before, middle, out: what the forward pass makes and the way back needs."""
    n, dim = plan.token.numel(), x.shape[1]
    hidden = matrices[2].shape[1] if n else 1
    shapes = [(n, dim), (n, 2 * hidden if form.gated else hidden), (n, hidden), (n, dim)]
    return form.pool.several(shapes, x.dtype, x.device)


def forward(
    plan: Plan,
    form: Form,
    collect: Tensor | None,
    x: Tensor,
    weight: Tensor,
    matrices: Sequence[Any],
    scratch: Sequence[Tensor],
) -> Tensor:
    """The combined output; `scratch` is filled on the way."""
    w_in, b_in, w_out, b_out = (matrices[i::4] for i in range(4))
    rows, before, middle, out = scratch
    kit, hidden = form.kit, middle.shape[1]
    torch.index_select(x, 0, plan.token, out=rows)
    for experts, places in plan.bands(_rows_in_cache(hidden)):
        counts, band = plan.counts[experts], before[places]
        kit.product(w_in[experts], counts, rows[places], band)
        _add_biases(b_in[experts], counts, band)
        if form.gated:
            kit.glu(form.activation, band, middle[places])
        else:
            form.activation.into(band, middle[places])
        kit.product(w_out[experts], counts, middle[places], out[places])
        _add_biases(b_out[experts], counts, out[places])
    if collect is not None:
        for e, part in zip(plan.active, out.split(plan.counts), strict=True):
            collect[e] += part.sum(0)
    return _sum_by_token(out, plan, form.pool, kit, weight)


Wants = tuple[bool, bool, Sequence[bool]]


def backward(
    grad: Tensor,
    plan: Plan,
    form: Form,
    kept: Sequence[Tensor],
    weight: Tensor,
    through: Tensor,
    matrices: Sequence[Any],
    wants: Wants,
    slots: tuple[list[Any], list[Any]] | None = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """The gradients of x, of the weights, and of each matrix; None where they are not wanted.

    `slots` are where those of the matrices in and out go, pooled memory unless given.
    """
    rows, before, middle, out = kept
    kit, pool = form.kit, form.pool
    wants_x, wants_weight, wanted = wants
    w_in, w_out = matrices[0::4], matrices[2::4]
    inside = wants_x or any(wanted[0::4]) or any(wanted[1::4])
    shapes = [tuple(t.shape) for t in (rows, rows, middle, before)]
    back, d_rows, d_middle, d_before = pool.several(shapes, rows.dtype, rows.device)
    dots = out.new_empty(out.shape[0]) if wants_weight else None
    kit.spread(grad.contiguous(), plan.token, through[plan.order].to(out.dtype), out, back, dots)
    d_weight = None
    if dots is not None:
        d_weight = torch.empty_like(weight)
        d_weight[plan.order] = dots.to(weight.dtype)
    d_in, d_out = slots or (_slots(w_in, wanted[0::4], pool), _slots(w_out, wanted[2::4], pool))
    for experts, places in plan.bands(_rows_in_cache(middle.shape[1])):
        counts, above, below = plan.counts[experts], back[places], d_before[places]
        if any(wanted[2::4]):
            kit.gradient(d_out[experts], counts, above, middle[places])
        if not inside:
            continue
        d_mid = back_product(w_out[experts], counts, above, d_middle[places])
        if form.gated:
            kit.glu_backward(form.activation, before[places], d_mid, below)
        else:
            form.activation.back(d_mid, before[places], below)
        if any(wanted[0::4]):
            kit.gradient(d_in[experts], counts, below, rows[places])
        if wants_x:
            back_product(w_in[experts], counts, below, d_rows[places])
    grads: list[Tensor | None] = [None] * len(matrices)
    grads[0::4], grads[2::4] = d_in, d_out
    for i, flow in ((1, d_before), (3, back)):
        parts = zip(flow.split(plan.counts), wanted[i::4], strict=True)
        grads[i::4] = [part.sum(0) if want else None for part, want in parts]
    d_x = _sum_by_token(d_rows, plan, pool, kit) if wants_x else None
    return d_x, d_weight, grads


def _rows_in_cache(hidden: int) -> int:
    return _BAND * torch.get_num_threads() // hidden


def _add_biases(biases: Sequence[Tensor | None], counts: Sequence[int], out: Tensor) -> None:
    for bias, part in zip(biases, out.split(counts), strict=True):
        if bias is not None:
            part.add_(bias)


def _slots(matrices: Sequence[Tensor], wanted: Sequence[bool], pool: Pool) -> list[Any]:
    """Where each matrix's gradient goes; None where nobody wants it."""
    shapes = [tuple(m.shape) for m, want in zip(matrices, wanted, strict=True) if want]
    made = iter(pool.several(shapes, matrices[0].dtype, matrices[0].device)) if shapes else iter(())
    return [next(made) if want else None for want in wanted]


def dispatch(
    x: Tensor,
    routing: Routing,
    experts: nn.ModuleList,
    pool: Pool,
    collect: Tensor | None = None,
    kit: Kit | None = None,
) -> Tensor:
    """y_t = Σ weight · expert(x_t) over the token's assignments; zero for a token that has none.

    `collect` [E, d], where given, receives the sum of each expert's outputs. An expert without a token takes
    no part in the graph, so its gradients stay None and the optimizer passes over it. `kit` is for tests:
    what computes the products, the fastest there is unless told otherwise.
    """
    plain = plain_form(experts)
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    if plain is None:
        return dispatch_any(x, routing, experts, collect)
    made = plan(routing.token, routing.expert, routing.tokens, routing.experts)
    matrices: list[Tensor | None] = []
    for e in made.active:
        for layer in plain.layers[e]:
            matrices += (layer.weight, layer.bias)
    if any(m is not None and m.dtype != x.dtype for m in matrices):
        matrices = [m if m is None else m.to(x.dtype) for m in matrices]
    with torch.autocast(kind, enabled=False):
        form = Form(plain.activation, plain.gated, kit or kit_for(x, matrices), pool)
        return _Grouped.apply(  # type: ignore[no-any-return]
            made, form, collect, x, routing.weight, _through(routing), *matrices
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
