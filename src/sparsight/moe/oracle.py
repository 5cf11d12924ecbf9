"""The exact oracle: what an estimator's router gradient is on average, with no sampling at all.

For one token, N experts with outputs E_i and any function f of the layer's output, enumerate every expert
that can be drawn and every node, and compare with autograd of the exact expectation Σ p_i f(p_i E_i).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


class Enumerable(Protocol):
    """An estimator that can list what it may do: (probability, gates [E]) with gates as trained through."""

    def outcomes(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]: ...


def exact_gradient(f: Function, logits: Tensor, outputs: Tensor, prob: Function | None = None) -> Tensor:
    """∂/∂z of Σ p_i f(p_i E_i), by autograd. `prob` maps logits to p, a softmax unless told otherwise.

    >>> z, E = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    >>> exact_gradient(torch.sum, z, E).tolist()
    [0.0, 0.0]
    """
    z = logits.detach().requires_grad_()
    p = z.softmax(-1) if prob is None else prob(z)
    live = [i for i in range(p.numel()) if p[i] > 0]
    value = torch.stack([p[i] * f(p[i] * outputs[i]) for i in live]).sum()
    return torch.autograd.grad(value, z)[0]


def expected_gradient(estimator: Enumerable, f: Function, logits: Tensor, outputs: Tensor) -> Tensor:
    """What the estimator's gradient is on average: Σ over outcomes of probability · ∂f(Σ gate_i E_i)/∂z."""
    z = logits.detach().requires_grad_()
    total = torch.zeros_like(z)
    for likely, gates in estimator.outcomes(z):
        if likely > 0:
            (grad,) = torch.autograd.grad(f(gates @ outputs), z, retain_graph=True)
            total = total + likely * grad
    return total


def bias(estimator: Enumerable, f: Function, logits: Tensor, outputs: Tensor) -> Tensor:
    """Expected minus exact gradient, with the estimator's own (masked, tempered) distribution as p.

    >>> import sparsight as sp
    >>> z = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    >>> E = torch.tensor([[1.0], [2.0], [-1.0]], dtype=torch.float64)
    >>> bool(bias(sp.midpoint, lambda y: (y**2).sum(), z, E).abs().max() < 1e-12)
    True
    """
    prob = getattr(estimator, "distribution", None)
    return expected_gradient(estimator, f, logits, outputs) - exact_gradient(f, logits, outputs, prob)


def relative_bias(estimator: Enumerable, f: Function, logits: Tensor, outputs: Tensor) -> float:
    """|bias| / |exact gradient|."""
    exact = exact_gradient(f, logits, outputs, getattr(estimator, "distribution", None))
    return float((expected_gradient(estimator, f, logits, outputs) - exact).norm() / exact.norm())
