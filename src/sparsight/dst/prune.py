"""Sparse after training, for comparison: pruning with fine-tuning, and lottery tickets.

Both drive a training function that the user already has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from sparsight.dst import initial
from sparsight.dst.distributions import Distribution
from sparsight.dst.method import InitialScores, Method
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dst.sparsify import sparsify

Scope = Literal["layer", "global"]


def prune(
    model: nn.Module,
    density: float,
    fine_tune: Callable[[Sparsifier], None] | None = None,
    *,
    rounds: int = 1,
    score: InitialScores = initial.magnitude,
    scope: Scope = "global",
    distribution: Distribution | Mapping[str, float] | None = None,
    include: Sequence[str] | None = None,
    keep_dense: Sequence[str] = (),
) -> Sparsifier:
    """Prune a trained model to `density`, in one shot or over several `rounds`, fine-tuning after each.

    `fine_tune(sparse)` trains `sparse.model`; it may attach an optimizer to `sparse`, which is detached
    when it returns. Each round keeps the same share of what is left.

    >>> model = nn.Linear(10, 10)
    >>> sparse = prune(model, 0.2)
    >>> int((model.weight != 0).sum())
    20
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    sparse: Sparsifier | None = None
    for done in range(1, rounds + 1):
        now = density if done == rounds else density ** (done / rounds)
        gone = {} if sparse is None else _missing(sparse)
        if sparse is not None:
            sparse.densify()
        sparse = sparsify(
            model,
            method=Method("pruned", initial=_among(score, gone), initial_scope=scope),
            density=now,
            storage="masked",
            distribution=distribution,
            include=include,
            keep_dense=keep_dense,
        )
        if fine_tune is not None:
            fine_tune(sparse)
            sparse.detach()
    assert sparse is not None
    return sparse


def lottery_ticket(
    model: nn.Module,
    train: Callable[[Sparsifier | None, int, int | None], None],
    density: float,
    *,
    rate: float = 0.2,
    rewind: int = 0,
    scope: Scope = "global",
    include: Sequence[str] | None = None,
    keep_dense: Sequence[str] = (),
) -> Sparsifier:
    """Iterative magnitude pruning with rewinding (Frankle & Carbin, 2019; Frankle et al., 2020).

    Train, remove `rate` of what remains by magnitude, put the survivors back to their values at step
    `rewind`, and repeat until `density`; then train the ticket. `train(sparse, start, stop)` trains the
    model from step `start` to `stop` (None: to the end) with an optimizer of its own; `sparse` is None
    while the model is still dense.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate must lie in (0, 1), got {rate}")
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    if rewind:
        train(None, 0, rewind)
    origin = {name: value.clone() for name, value in model.state_dict().items()}
    train(None, rewind, None)
    sparse: Sparsifier | None = None
    now = 1.0
    while now > density:
        now = max(now * (1 - rate), density)
        gone = {} if sparse is None else _missing(sparse)
        if sparse is not None:
            sparse.densify()
        sparse = sparsify(
            model,
            method=Method("ticket", initial=_among(initial.magnitude, gone), initial_scope=scope),
            density=now,
            storage="masked",
            include=include,
            keep_dense=keep_dense,
        )
        model.load_state_dict(origin)
        sparse.enforce()
        train(sparse, rewind, None)
        sparse.detach()
    if sparse is None:
        sparse = sparsify(
            model,
            method=Method("ticket"),
            density=1.0,
            storage="masked",
            include=include,
            keep_dense=keep_dense,
        )
    return sparse


def _missing(sparse: Sparsifier) -> dict[str, Tensor]:
    return {name: ~topology.mask().flatten() for name, topology in sparse.topologies.items()}


def _among(score: InitialScores, gone: Mapping[str, Tensor]) -> InitialScores:
    """Scores among what is left: a weight that is gone never comes back."""

    def scored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        scores = score(weights)
        return {
            name: value.masked_fill(gone[name], -torch.inf) if name in gone else value
            for name, value in scores.items()
        }

    return scored
