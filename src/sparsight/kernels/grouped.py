"""Products and rows of a mixture of experts in C++: many small matrices, each with its own rows, in one call.

The functions of the same names in `moe/products.py` are their slow twins. Everything is checked here, once,
because tensors cross as addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsight.kernels.native import at, available, check, entry


def usable(like: Tensor) -> bool:
    """Whether there are kernels for tensors such as this one."""
    return available() and like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)


def product(weights: Sequence[Tensor], counts: Sequence[int], x: Tensor, out: Tensor) -> Tensor:
    """out = x·Wᵀ for `counts` rows of each matrix in turn."""
    inputs, outputs, rows = x.shape[1], out.shape[1], sum(counts)
    check("x", x, (rows, inputs), x)
    check("out", out, (rows, outputs), x)
    where = _addresses(weights, counts, (outputs, inputs), x)
    run = entry("grouped_product", x.dtype)
    run(where, counts, at(x), inputs, outputs, at(out), torch.get_num_threads())
    return out


def gradient(grads: Sequence[Tensor | None], counts: Sequence[int], dy: Tensor, x: Tensor) -> None:
    """dW = dyᵀ·x for `counts` rows of each matrix in turn; None where nobody wants it."""
    inputs, outputs, rows = x.shape[1], dy.shape[1], sum(counts)
    check("x", x, (rows, inputs), x)
    check("dy", dy, (rows, outputs), x)
    where = _addresses(grads, counts, (outputs, inputs), x)
    run = entry("grouped_gradient", x.dtype)
    run(where, counts, at(dy), at(x), inputs, outputs, torch.get_num_threads())


def glu(before: Tensor, out: Tensor) -> Tensor:
    """out = silu(gate) · up, for before = [gate | up]."""
    rows, hidden = out.shape
    check("before", before, (rows, 2 * hidden), before)
    check("out", out, (rows, hidden), before)
    entry("glu", before.dtype)(at(before), rows, hidden, at(out), torch.get_num_threads())
    return out


def glu_backward(before: Tensor, d_out: Tensor, d_before: Tensor) -> Tensor:
    """d_before = [d_gate | d_up] of `glu`."""
    rows, hidden = d_out.shape
    check("before", before, (rows, 2 * hidden), before)
    check("d_out", d_out, (rows, hidden), before)
    check("d_before", d_before, (rows, 2 * hidden), before)
    run = entry("glu_backward", before.dtype)
    run(at(before), at(d_out), rows, hidden, at(d_before), torch.get_num_threads())
    return d_before


def spread(
    grad: Tensor, token: Tensor, scale: Tensor, rows: Tensor, back: Tensor, dots: Tensor | None
) -> None:
    """back[i] = scale[i]·grad[token[i]] and, where given, dots[i] = ⟨grad[token[i]], rows[i]⟩."""
    count, width = rows.shape
    check("grad", grad, (grad.shape[0], width), rows)
    check("scale", scale, (count,), rows)
    check("rows", rows, (count, width), rows)
    check("back", back, (count, width), rows)
    if dots is not None:
        check("dots", dots, (count,), rows)
    _check_places(token, count, grad.shape[0])
    run = entry("spread", rows.dtype)
    threads = torch.get_num_threads()
    run(at(grad), at(token), at(scale), at(rows), count, width, at(back), at(dots), threads)


def gather_sum(rows: Tensor, places: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
    """out[t] = Σ_j weight[j, t]·rows[places[j, t]]; no weights: all 1."""
    k, tokens = places.shape
    width = rows.shape[1]
    check("rows", rows, (rows.shape[0], width), rows)
    check("out", out, (tokens, width), rows)
    if weight is not None:
        check("weight", weight, (k * tokens,), rows)
    _check_places(places, k * tokens, rows.shape[0])
    run = entry("gather_sum", rows.dtype)
    run(at(rows), at(places), at(weight), k, tokens, width, at(out), torch.get_num_threads())
    return out


def _check_places(index: Tensor, count: int, limit: int) -> None:
    """The values are the plan's own, made from a sort; that they fit is asserted, not searched for."""
    if index.dtype != torch.int64 or index.numel() != count or not index.is_contiguous() or limit < 1:
        raise ValueError(f"expected {count} contiguous int64 places, got {index.dtype} {tuple(index.shape)}")


def _addresses(
    tensors: Sequence[Tensor | None], counts: Sequence[int], shape: tuple[int, int], like: Tensor
) -> list[int]:
    if len(tensors) != len(counts):
        raise ValueError(f"expected a matrix for each of {len(counts)} counts, got {len(tensors)}")
    for tensor in tensors:
        if tensor is not None:
            check("matrix", tensor, shape, like)
    return [at(tensor) for tensor in tensors]
