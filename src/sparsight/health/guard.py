"""A look at every step's gradients, for runs that keep checkpoints: a NaN must be met before it spreads."""

from __future__ import annotations

import torch

from sparsight.dynamics.routes import Part
from sparsight.dynamics.watch import Watch
from sparsight.health.actions.core import several_processes
from sparsight.health.findings import Finding


@torch.no_grad()
def bad_gradient(watch: Watch) -> Finding | None:
    """The first place whose gradient is NaN or infinite in the step just taken, on any process."""
    grads = [p.grad for group in watch.optimizer.param_groups for p in group["params"] if p.grad is not None]
    dense = [grad for grad in grads if not grad.is_sparse]
    bad = False
    if dense:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(dense)])
        bad = not bool(torch.isfinite(norms).all())
    if several_processes():
        flag = torch.tensor(int(bad), device=dense[0].device if dense else None)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        bad = bool(flag)
    if not bad:
        return None
    where, experts = _place(watch)
    whose = f"of expert {experts[0]} " if experts else ""
    return Finding(
        "non_finite_gradient",
        "act",
        where,
        watch.step,
        watch.step,
        f"{where or 'the model'}: the gradient {whose}is NaN or infinite in step {watch.step}.",
        {"experts": experts, "quantity": "gradient"},
    )


def _place(watch: Watch) -> tuple[str, list[int]]:
    for route in watch.routes:
        for expert, parts in enumerate(route.parts):
            if any(_bad(part) for part in parts):
                return route.name, [expert]
        if any(_bad(Part(p)) for p in route.router):
            return route.name, []
    for (_, where), parts in watch._layers.units.items():
        if any(_bad(part) for part in parts):
            return where, []
    return "", []


def _bad(part: Part) -> bool:
    grad = part.param.grad
    if grad is None or grad.is_sparse:
        return False
    return not bool(torch.isfinite(part.cut(grad)).all())
