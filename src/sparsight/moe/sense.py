"""Which parts go together. Every combination that makes no sense is refused with a sentence that says why."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

from sparsight.moe.balancers import Balancer, LossFreeBias, SwitchLoss
from sparsight.moe.capacity import Capacity
from sparsight.moe.estimators import Estimator, GatingOnly, needs_of
from sparsight.moe.routers import Router


def check_sizes(dim: int, hidden: int, experts: int, k: int) -> None:
    """Sizes that make a layer."""
    for name, value in (("dim", dim), ("hidden", hidden), ("experts", experts), ("k", k)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"MoE: {name} must be an integer >= 1, got {value!r}")
    if k > experts:
        raise ValueError(f"MoE: k={k} experts a token cannot be chosen from experts={experts}")


def check_parts(
    router: Router,
    estimator: Estimator | None,
    balance: Sequence[Balancer],
    capacity: Capacity | None,
    k: int,
    causal: bool | None,
) -> None:
    """Refuse what cannot work together."""
    if not isinstance(router, Router):
        raise ValueError(f"MoE: router must be one such as sp.routers.softmax(), got {router!r}")
    if estimator is not None and not _can_be_called(estimator):
        raise ValueError(f"MoE: estimator must be one such as sp.SparseMixer(), got {estimator!r}")
    for part in balance:
        if isinstance(part, type) or not hasattr(part, "loss"):
            raise ValueError(f"MoE: balance must hold balancers such as sp.SwitchLoss(), got {part!r}")
    for reason in (
        *_router_reasons(router, estimator, capacity, k),
        *_estimator_reasons(router, estimator, capacity, k),
        *_balance_reasons(router, estimator, balance),
    ):
        raise ValueError(f"MoE: {reason}")
    if not router.causal and causal is not False:
        warnings.warn(
            f"the router '{router.name}' lets a token's route depend on later tokens, so a causal model "
            "trains on what it cannot see at inference. Pass causal=False if this model is not causal",
            UserWarning,
            stacklevel=4,
        )


def _can_be_called(estimator: object) -> bool:
    """Whether it takes what an estimator is given; a factory that was not called does not."""
    if not callable(estimator):
        return False
    try:
        inspect.signature(estimator).bind(None, 1, score=None, bias=None, training=True)
    except TypeError:
        return False
    return True


def _router_reasons(
    router: Router, estimator: Estimator | None, capacity: Capacity | None, k: int
) -> list[str]:
    reasons = []
    if router.only_k is not None and k != router.only_k:
        reasons.append(f"the router '{router.name}' chooses {router.only_k} experts a token, got k={k}")
    if router.select is not None and estimator is not None:
        reasons.append(
            f"the router '{router.name}' decides by itself who goes where and with what weight, which leaves "
            f"nothing to {_name(estimator)}; use one or the other"
        )
    if router.even and capacity is not None:
        reasons.append(
            f"the router '{router.name}' fills all experts equally, so a capacity would never drop anything "
            "or undo what it assigned; leave capacity=None"
        )
    return reasons


def _estimator_reasons(
    router: Router, estimator: Estimator | None, capacity: Capacity | None, k: int
) -> list[str]:
    needs, name, reasons = needs_of(estimator), _name(estimator), []
    if needs.top1 and k != 1:
        reasons.append(f"{name} is defined for one expert a token, got k={k}")
    if needs.samples and router.score.name != "softmax":
        reasons.append(
            f"{name} draws experts from a distribution, and {router.score.name} scores are not one; "
            "use a softmax or cosine router"
        )
    if needs.dense and capacity is not None:
        reasons.append(f"{name} runs every expert on every token, so a capacity has nothing to limit")
    if isinstance(estimator, GatingOnly) and estimator.normalise and k == 1:
        reasons.append(
            "the weight of a single expert, normalised, is always 1: the router would learn nothing"
        )
    return reasons


def _balance_reasons(router: Router, estimator: Estimator | None, balance: Sequence[Balancer]) -> list[str]:
    reasons = []
    biased = any(isinstance(b, LossFreeBias) for b in balance)
    if router.fixed and balance:
        reasons.append(f"the router '{router.name}' is fixed, so nothing can balance it")
    if router.even and (biased or any(isinstance(b, SwitchLoss) for b in balance)):
        reasons.append(
            f"the router '{router.name}' gives all experts the same load, so neither a Switch loss nor a "
            "bias has anything to balance"
        )
    elif biased and router.select is not None:
        reasons.append(
            f"a loss-free bias moves a top-k selection, and the router '{router.name}' does not "
            "select that way"
        )
    if biased and needs_of(estimator).samples:
        reasons.append(
            f"a loss-free bias moves a top-k selection, and {_name(estimator)} draws from the probabilities"
        )
    if router.name == "relu" and any(isinstance(b, SwitchLoss) for b in balance):
        reasons.append(
            "the relu router has its own balanced penalty; a Switch loss would count the load twice"
        )
    return reasons


def _name(part: object) -> str:
    return getattr(part, "__name__", type(part).__name__)
