"""Histories made by hand: for each rule one in which it must speak and a twin in which it must not.

A new rule is a row here, a line in `ALL`, a sentence in `ADVICE` and a row in docs/health.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsight.dynamics.history import History, collect
from sparsight.dynamics.records import Record

LAYER = "blocks.0.mlp"
READINGS = 40
EVEN = [100.0] * 8
Value = float | list[float]


def moe(**about: Any) -> dict[str, Any]:
    return {"layers": [{"name": LAYER, "family": "moe", "experts": 8, "k": 1, "router": "softmax", **about}]}


def sparse(
    method: str = "rigl", steps: int | None = 400, shape: tuple[int, int] = (64, 64)
) -> dict[str, Any]:
    layers = [{"name": LAYER, "family": "sparse", "shape": list(shape)}]
    return {
        "layers": layers,
        "method": {"name": method, "steps": steps, "grows": method not in ("static", "gmp")},
    }


def history(
    meta: dict[str, Any] | None = None, readings: int = READINGS, **series: Callable[[int], Value]
) -> History:
    """Readings every 10 steps. A keyword is family__quantity, with a third _ for the whole model; its value
    is a function of the step."""
    records = []
    for key, value in series.items():
        family, _, quantity = key.partition("__")
        where = "" if quantity.startswith("_") or family in ("log", "run") else LAYER
        for step in range(10, 10 * readings + 1, 10):
            told = value(step)
            told = np.array(told, np.float32) if isinstance(told, list) else told
            records.append(Record(step, f"{family}/{quantity.lstrip('_')}", where, told))
    return collect(records, meta)


def always(value: Value) -> Callable[[int], Value]:
    return lambda step: value


def after(step: int, value: Value, before: Value) -> Callable[[int], Value]:
    return lambda now: value if now > step else before


def among(expert: int, value: float, others: float) -> list[float]:
    """Eight experts, one of them different."""
    return [value if e == expert else others for e in range(8)]


def leader(now: int) -> list[float]:
    """Expert 0 takes ever more from the others, the more it has."""
    share = min(0.9, 0.15 * 1.02 ** ((now - 200) / 2)) if now > 200 else 0.15
    rest = np.linspace(1.2, 0.8, 7) / 7 * (1 - share)
    return [1000 * share, *(1000 * rest).tolist()]


def loss(now: int) -> float:
    """A healthy loss: falls, with a little noise."""
    return 0.5 + 1.5 * float(np.exp(-now / 150)) + 0.02 * float(np.sin(7.0 * now))


def shifted(clean: float, noise: float) -> History:
    return collect([Record(400, "stress/quality", "", clean), Record(400, "stress/quality", "noise", noise)])


def pruned(recovers: bool) -> History:
    return history(
        sparse("gmp"),
        sparse__density=after(250, 0.05, 1.0),
        sparse___density=after(250, 0.05, 1.0),
        log__loss=lambda now: loss(now) * (2.0 if now > 250 and not recovers else 1.0),
    )


WITH_LOAD = {"moe__tokens_per_expert": always(EVEN)}

CASES: dict[str, tuple[History, History]] = {
    "expert_collapse": (
        history(moe(), moe__effective_experts=after(200, 1.4, 7.5), moe__tokens_per_expert=always(EVEN)),
        history(moe(), moe__effective_experts=after(200, 5.0, 7.5), moe__tokens_per_expert=always(EVEN)),
    ),
    "collapse_onset": (
        history(moe(), moe__effective_experts=lambda now: 7.5 - 0.03 * max(0, now - 280), **WITH_LOAD),
        history(moe(), moe__effective_experts=lambda now: 7.5 - 2.0 * (now % 50 == 0), **WITH_LOAD),
    ),
    "dead_experts": (
        history(moe(), moe__idle_steps=lambda now: among(3, max(0.0, now - 200), 0.0), **WITH_LOAD),
        history(moe(), moe__idle_steps=lambda now: among(3, now % 90, 0.0), **WITH_LOAD),
    ),
    "overload": (
        history(moe(), moe__max_vio=after(200, 5.0, 0.3), moe__tokens_per_expert=always(among(2, 600, 50))),
        history(moe(), moe__max_vio=always(1.5), **WITH_LOAD),
    ),
    "dominance": (
        history(moe(), readings=32, moe__tokens_per_expert=leader),
        history(moe(), moe__tokens_per_expert=lambda now: among(now // 10 % 8, 150, 90)),
    ),
    "drop_rate": (
        history(moe(capacity=0.5), moe__drop_rate=after(200, 0.5, 0.02), **WITH_LOAD),
        history(moe(capacity=1.25), moe__drop_rate=always(0.05), **WITH_LOAD),
    ),
    "gate_saturation": (
        history(moe(), moe__gate_saturation=after(200, 0.97, 0.1), **WITH_LOAD),
        history(moe(), moe__gate_saturation=always(0.5), **WITH_LOAD),
    ),
    "singletons": (
        history(moe(), moe__singleton_frac=after(200, 0.999, 0.3), **WITH_LOAD),
        history(moe(), moe__singleton_frac=always(0.85), **WITH_LOAD),
    ),
    "router_not_learning": (
        history(moe(), moe__router_grad_norm=after(200, 0.0, 0.1), moe__grad_norm=always([0.2] * 8)),
        history(moe(router="hash", fixed=True), moe__router_grad_norm=always(0.0)),
    ),
    "entropy_crash": (
        history(moe(), moe__router_entropy=after(360, 0.2, 0.9), **WITH_LOAD),
        history(moe(), moe__router_entropy=lambda now: 0.9 - 0.0015 * now, **WITH_LOAD),
    ),
    "experts_alike": (
        history(moe(), moe__similarity=always(0.99), moe__output_similarity=always(0.99), **WITH_LOAD),
        history(moe(), moe__similarity=lambda now: 1 - now / 4000, **WITH_LOAD),
    ),
    "path_behind": (
        history(moe(), moe__expert_loss=lambda now: among(4, 3.0, loss(now)), **WITH_LOAD),
        history(moe(), moe__expert_loss=lambda now: among(4, 3 * loss(now), loss(now)), **WITH_LOAD),
    ),
    "non_finite_gradient": (
        history(moe(), moe__grad_norm=after(200, among(3, float("nan"), 0.2), [0.2] * 8)),
        history(moe(), moe__grad_norm=always(among(3, 0.0, 0.2))),
    ),
    "exploding_gradient": (
        history(moe(), moe__grad_norm=after(300, among(3, 80.0, 0.2), [0.2] * 8), **WITH_LOAD),
        history(moe(), moe__grad_norm=after(300, [80.0] * 8, [0.2] * 8), **WITH_LOAD),
    ),
    "starved_parameters": (
        history(
            moe(),
            moe__update_freq=always(among(5, 0.02, 1.0)),
            moe__idle_steps=always([3.0] * 8),
            **WITH_LOAD,
        ),
        history(
            moe(), moe__update_freq=always(among(5, 0.4, 1.0)), moe__idle_steps=always([3.0] * 8), **WITH_LOAD
        ),
    ),
    "capacity_without_competence": (
        history(moe(), moe__grad_norm=always(among(1, 1e-6, 0.2)), **WITH_LOAD),
        history(moe(), moe__grad_norm=always(among(1, 0.02, 0.2)), **WITH_LOAD),
    ),
    "frozen_topology": (
        history(
            sparse(steps=1000),
            sparse___updates=lambda now: min(now, 50) // 10,
            sparse___drop_fraction=lambda now: 0.3 * (now < 50),
        ),
        history(sparse("static"), sparse___updates=always(0.0), sparse___drop_fraction=always(0.0)),
    ),
    "short_lived_growth": (
        history(sparse(), sparse__survival=always([0.02, 0.01])),
        history(sparse(), sparse__survival=always([0.6, 0.4])),
    ),
    "low_exploration": (
        history(sparse(), sparse___itop_rate=always(0.101), sparse___density=always(0.1)),
        history(sparse(), sparse___itop_rate=lambda now: 0.1 + now / 2000, sparse___density=always(0.1)),
    ),
    "dead_neurons": (
        history(sparse(), sparse__dead_neurons=after(200, 0.6, 0.05)),
        history(sparse("srigl"), sparse__dead_neurons=always(0.4)),
    ),
    "over_sparsified": (
        history(sparse(steps=2000), sparse__density=always(0.001)),
        history(sparse(steps=2000), sparse__density=always(0.05)),
    ),
    "pruned_too_fast": (pruned(recovers=False), pruned(recovers=True)),
    "loss_not_finite": (
        history(log__loss=lambda now: float("nan") if now > 200 else loss(now)),
        history(log__loss=lambda now: float("nan") if now == 200 else loss(now)),
    ),
    "loss_diverging": (
        history(log__loss=lambda now: loss(now) * (1 if now <= 300 else 1.3 ** ((now - 300) / 10))),
        history(log__loss=loss),
    ),
    "not_learning": (
        history(log__loss=lambda now: 2.08 + 0.01 * float(np.sin(now))),
        history(log__loss=loss),
    ),
    "falls_under_shift": (shifted(0.9, 0.4), shifted(0.9, 0.85)),
}
