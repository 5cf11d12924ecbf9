"""What dispatch is made of: products with each expert's matrices, gates, rows on their way there and back.

In plain torch here, for every device and dtype, and in C++ (`kernels/grouped.py`) for float32 and float64 on
a CPU. `kit_for` says which; the tests run both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.kernels import grouped
from sparsight.moe.activations import SILU, Activation


def product(weights: Sequence[Tensor], counts: Sequence[int], x: Tensor, out: Tensor) -> Tensor:
    """out = x·Wᵀ for `counts` rows of each matrix in turn."""
    for w, rows, to in zip(weights, x.split(counts), out.split(counts), strict=True):
        torch.mm(rows, w.t(), out=to)
    return out


def back_product(weights: Sequence[Tensor], counts: Sequence[int], dy: Tensor, out: Tensor) -> Tensor:
    """out = dy·W for `counts` rows of each matrix in turn. MKL is hard to beat at this one."""
    for w, rows, to in zip(weights, dy.split(counts), out.split(counts), strict=True):
        torch.mm(rows, w, out=to)
    return out


def gradient(grads: Sequence[Tensor | None], counts: Sequence[int], dy: Tensor, x: Tensor) -> None:
    """dW = dyᵀ·x for `counts` rows of each matrix in turn; None where nobody wants it."""
    for grad, above, rows in zip(grads, dy.t().split(counts, 1), x.split(counts), strict=True):
        if grad is not None:
            torch.mm(above, rows, out=grad)


def glu(act: Activation, before: Tensor, out: Tensor) -> Tensor:
    """out = act(gate) · up, for before = [gate | up]."""
    gate, up = before.chunk(2, 1)
    return act.into(gate, out).mul_(up)


def glu_backward(act: Activation, before: Tensor, d_out: Tensor, d_before: Tensor) -> None:
    """d_before = [d_gate | d_up] of `glu`. `d_out` is used up."""
    gate, up = before.chunk(2, 1)
    d_gate, d_up = d_before.chunk(2, 1)
    act.into(gate, d_up).mul_(d_out)
    act.back(d_out.mul_(up), gate, d_gate)


def spread(
    grad: Tensor, token: Tensor, scale: Tensor, rows: Tensor, back: Tensor, dots: Tensor | None
) -> None:
    """back[i] = scale[i]·grad[token[i]] and, where given, dots[i] = ⟨grad[token[i]], rows[i]⟩."""
    torch.index_select(grad, 0, token, out=back)
    if dots is not None:
        torch.sum(back * rows, 1, out=dots)
    back.mul_(scale[:, None])


def gather_sum(rows: Tensor, places: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
    """out[t] = Σ_j weight[j, t]·rows[places[j, t]]; no weights: all 1."""
    columns = None if weight is None else weight.view(*places.shape, 1)
    for j, place in enumerate(places):
        if j == 0:
            torch.index_select(rows, 0, place, out=out)
            if columns is not None:
                out.mul_(columns[0])
        elif columns is None:
            out.add_(rows.index_select(0, place))
        else:
            out.addcmul_(rows.index_select(0, place), columns[j])
    return out


_MANY = 96
"""Rows an expert has on average from which MKL is as fast at gradients, and asks for no packing of ours."""


def _native_gradient(grads: Sequence[Tensor | None], counts: Sequence[int], dy: Tensor, x: Tensor) -> None:
    few = dy.shape[0] < _MANY * len(counts)
    (grouped.gradient if few else gradient)(grads, counts, dy, x)


def _native_glu(act: Activation, before: Tensor, out: Tensor) -> Tensor:
    return grouped.glu(before, out) if act is SILU else glu(act, before, out)


def _native_glu_backward(act: Activation, before: Tensor, d_out: Tensor, d_before: Tensor) -> None:
    if act is SILU:
        grouped.glu_backward(before, d_out, d_before)
    else:
        glu_backward(act, before, d_out, d_before)


@dataclass(frozen=True)
class Kit:
    """One implementation of the functions above."""

    name: str
    product: Callable[[Sequence[Tensor], Sequence[int], Tensor, Tensor], Tensor]
    gradient: Callable[[Sequence[Tensor | None], Sequence[int], Tensor, Tensor], None]
    glu: Callable[[Activation, Tensor, Tensor], Tensor]
    glu_backward: Callable[[Activation, Tensor, Tensor, Tensor], None]
    spread: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
    gather_sum: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


TORCH = Kit("torch", product, gradient, glu, glu_backward, spread, gather_sum)
NATIVE = Kit(
    "native",
    grouped.product,
    _native_gradient,
    _native_glu,
    _native_glu_backward,
    grouped.spread,
    grouped.gather_sum,
)


def kit_for(like: Tensor, matrices: Sequence[Tensor | None]) -> Kit:
    """The fast one where it can be used.

    >>> kit_for(torch.zeros(2, 2, dtype=torch.bfloat16), []).name
    'torch'
    """
    fits = grouped.usable(like) and all(m is None or m.is_contiguous() for m in matrices)
    return NATIVE if fits else TORCH
