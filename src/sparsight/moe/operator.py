"""Dispatch as an operator, for torch.compile: the sort and the products are one node of the graph.

Everything inside is what eager dispatch runs. Sizes that depend on the data stay inside: dropped assignments
are told by a mask, and every expert takes part, so that one without tokens gets a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsight.kernels.handles import resolve
from sparsight.moe.activations import by_name
from sparsight.moe.dispatch import Form, Plan, backward, forward, plan
from sparsight.moe.experts import Plain
from sparsight.moe.pool import carve, room_for
from sparsight.moe.products import kit_for
from sparsight.moe.routing import Routing


def traced_dispatch(
    x: Tensor, routing: Routing, kept: Tensor | None, plain: Plain, pool: Tensor, where: str
) -> Tensor:
    """What `dispatch` does for plain experts, in a form that torch.compile can put into a graph.

    `kept` [N] is False for assignments that were dropped; `pool` is the handle of the layer's Pool.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    matrices = [layer.weight.to(dtype) for pair in plain.layers for layer in pair]
    if plain.layers[0][0].bias is not None:
        matrices += [layer.bias.to(dtype) for pair in plain.layers for layer in pair]
    through = None if routing.expert_weight is None else routing.expert_weight.detach()
    with torch.autocast(kind, enabled=False):
        y, _ = torch.ops.sparsight.experts(
            x.to(dtype),
            routing.weight,
            through,
            routing.token,
            routing.expert,
            kept,
            routing.logit.detach(),
            matrices,
            pool,
            plain.activation.name,
            plain.gated,
            where,
        )
    return y  # type: ignore[no-any-return]


def check_finite(logits: Tensor, where: str) -> None:
    """Say how many tokens have logits that are NaN or infinite."""
    # The sum is one cheap pass; only where it is off is it worth looking which tokens are to blame.
    if torch.isfinite(logits.sum()):
        return
    bad = int((~torch.isfinite(logits)).any(-1).sum())
    if bad:
        raise ValueError(
            f"{where}: the router's logits of {bad} of {logits.shape[0]} tokens are NaN or infinite"
        )


def _shapes(n: int, dim: int, hidden: int, gated: bool) -> list[tuple[int, int]]:
    return [(n, dim), (n, 2 * hidden if gated else hidden), (n, hidden), (n, dim)]


def _plan(token: Tensor, expert: Tensor, kept: Tensor | None, tokens: int, experts: int) -> tuple[Plan, Any]:
    """The plan of the kept assignments, and which they are."""
    index = slice(None) if kept is None else kept.nonzero().squeeze(1)
    return plan(token[index], expert[index], tokens, experts), index


def _by_expert(matrices: Sequence[Tensor], made: Plan, experts: int) -> list[Tensor | None]:
    """in, its bias, out, its bias for each active expert, as dispatch has them."""
    found: list[Tensor | None] = []
    biased = len(matrices) == 4 * experts
    for e in made.active:
        for i in (2 * e, 2 * e + 1):
            found += (matrices[i], matrices[2 * experts + i] if biased else None)
    return found


@torch.library.custom_op("sparsight::experts", mutates_args=())
def _experts(
    x: Tensor,
    weight: Tensor,
    through: Tensor | None,
    token: Tensor,
    expert: Tensor,
    kept: Tensor | None,
    logits: Tensor,
    matrices: Sequence[Tensor],
    pool: Tensor,
    activation: str,
    gated: bool,
    where: str,
) -> tuple[Tensor, Tensor]:
    check_finite(logits, where)
    tokens, experts = logits.shape
    made, index = _plan(token, expert, kept, tokens, experts)
    mine = _by_expert(matrices, made, experts)
    (scratch,) = resolve(pool)
    form = Form(by_name(activation), gated, kit_for(x, mine), scratch)
    shapes = _shapes(token.numel(), x.shape[1], matrices[1].shape[1], gated)
    memory = scratch.empty((room_for(shapes),), x.dtype, x.device)
    used = [part[: made.token.numel()] for part in carve(memory, shapes)]
    return forward(made, form, None, x, weight[index], mine, used), memory


@_experts.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    through: Tensor | None,
    token: Tensor,
    expert: Tensor,
    kept: Tensor | None,
    logits: Tensor,
    matrices: Sequence[Tensor],
    pool: Tensor,
    activation: str,
    gated: bool,
    where: str,
) -> tuple[Tensor, Tensor]:
    shapes = _shapes(token.shape[0], x.shape[1], matrices[1].shape[1], gated)
    return x.new_empty(x.shape), x.new_empty(room_for(shapes))


@torch.library.custom_op("sparsight::experts_backward", mutates_args=())
def _experts_backward(
    grad: Tensor,
    memory: Tensor,
    weight: Tensor,
    through: Tensor | None,
    token: Tensor,
    expert: Tensor,
    kept: Tensor | None,
    matrices: Sequence[Tensor],
    pool: Tensor,
    activation: str,
    gated: bool,
) -> list[Tensor]:
    experts = len(matrices) // (4 if _biased(matrices) else 2)
    made, index = _plan(token, expert, kept, grad.shape[0], experts)
    mine = _by_expert(matrices, made, experts)
    (scratch,) = resolve(pool)
    form = Form(by_name(activation), gated, kit_for(grad, mine), scratch)
    shapes = _shapes(token.numel(), grad.shape[1], matrices[1].shape[1], gated)
    used = [part[: made.token.numel()] for part in carve(memory, shapes)]
    back = weight[index] if through is None else through[index]
    # An operator's results may not share memory, so each gradient has its own.
    busy = set(made.active)
    grads = [
        torch.empty_like(m) if i // 2 % experts in busy else torch.zeros_like(m)
        for i, m in enumerate(matrices)
    ]
    slots = [grads[2 * e] for e in made.active], [grads[2 * e + 1] for e in made.active]
    wants = (True, True, [m is not None for m in mine])
    d_x, d_weight, found = backward(grad, made, form, used, weight[index], back, mine, wants, slots)
    assert d_x is not None
    assert d_weight is not None
    whole = torch.zeros_like(weight)
    whole[index] = d_weight
    if _biased(matrices):
        for e, up, down in zip(made.active, found[1::4], found[3::4], strict=True):
            assert up is not None
            assert down is not None
            grads[2 * (experts + e)], grads[2 * (experts + e) + 1] = up, down
    return [d_x, whole, *grads]


def _biased(matrices: Sequence[Tensor]) -> bool:
    return matrices[-1].dim() == 1


@_experts_backward.register_fake
def _(
    grad: Tensor,
    memory: Tensor,
    weight: Tensor,
    through: Tensor | None,
    token: Tensor,
    expert: Tensor,
    kept: Tensor | None,
    matrices: Sequence[Tensor],
    pool: Tensor,
    activation: str,
    gated: bool,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (grad, weight, *matrices)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, weight, through, token, expert, kept, _, matrices, pool, ctx.activation, ctx.gated, _ = inputs
    ctx.save_for_backward(output[1], weight, through, token, expert, kept, pool, *matrices)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    memory, weight, through, token, expert, kept, pool, *matrices = ctx.saved_tensors
    d_x, d_weight, *grads = torch.ops.sparsight.experts_backward(
        grad.contiguous(),
        memory,
        weight,
        through,
        token,
        expert,
        kept,
        matrices,
        pool,
        ctx.activation,
        ctx.gated,
    )
    return d_x, d_weight, None, None, None, None, None, grads, None, None, None, None


_experts.register_autograd(_differentiate, setup_context=_save)
