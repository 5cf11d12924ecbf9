"""Policies: from a finding to what should be done about it. Any function Finding → actions is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsight.health.actions import (
    Action,
    Balance,
    CapacityFactor,
    CoolRouter,
    Density,
    ExpertRate,
    LearningRate,
    Noise,
    Regrow,
    Reinitialise,
    Revive,
    Rewind,
    Search,
    WidenMask,
)
from sparsight.health.findings import Finding

Policy = Callable[[Finding], Sequence[Action]]

_LEAST = 0.01
"""Switch's own coefficient: what a layer should have if it has less."""
_STRONG = 0.05
"""For a layer that has collapsed: against that, a hundredth is soon too weak."""


def default(finding: Finding) -> list[Action]:
    """What the literature and common sense say, in the order in which to try it.

    >>> default(Finding("dead_experts", "act", "moe", 300, 200, "…", {"experts": [3]}))[0]
    Revive(where='moe', experts=(3,), source=None, noise=0.05, tilt=0.1)
    """
    answer = _ANSWERS.get(finding.rule)
    return [] if answer is None else answer(finding)


def only(*rules: str, policy: Policy = default) -> Policy:
    """A policy that answers the findings of these rules and leaves the others alone.

    >>> only("dead_experts")(Finding("gate_saturation", "act", "moe", 300, 200, "…"))
    []
    """

    def answer(finding: Finding) -> Sequence[Action]:
        return policy(finding) if finding.rule in rules else []

    return answer


def nothing(finding: Finding) -> list[Action]:
    """Look on."""
    return []


def _collapse(finding: Finding) -> list[Action]:
    shares = finding.evidence.get("shares", [])
    idle = tuple(e for e, share in enumerate(shares) if share < 0.1 / len(shares))
    found: list[Action] = [Balance(finding.where, 4.0, _STRONG)]
    return found + ([Revive(finding.where, idle)] if idle else [])


def _dead(finding: Finding) -> list[Action]:
    # The balance too: an expert that died for lack of it would die again.
    return [Revive(finding.where, _experts(finding)), Balance(finding.where, 2.0, _LEAST)]


def _balance(finding: Finding) -> list[Action]:
    return [Balance(finding.where, 2.0, _LEAST)]


def _dropping(finding: Finding) -> list[Action]:
    return [Balance(finding.where, 2.0, _LEAST), CapacityFactor(finding.where, 1.5)]


def _cool(finding: Finding) -> list[Action]:
    return [CoolRouter(finding.where)]


def _widen(finding: Finding) -> list[Action]:
    return [WidenMask(finding.where)]


def _shake(finding: Finding) -> list[Action]:
    return [Noise(finding.where, 0.1)]


def _starved(finding: Finding) -> list[Action]:
    experts = _experts(finding)
    return [ExpertRate(finding.where, experts, 2.0)] if experts else []


def _begin_anew(finding: Finding) -> list[Action]:
    experts = _experts(finding)
    return [Reinitialise(finding.where, experts)] if experts else []


def _explosion(finding: Finding) -> list[Action]:
    experts = _experts(finding)
    return [ExpertRate(finding.where, experts, 0.25)] if experts else [LearningRate(0.5)]


def _go_back(finding: Finding) -> list[Action]:
    return [Rewind()]


def _diverging(finding: Finding) -> list[Action]:
    return [Rewind(max(1, finding.step - finding.onset)), LearningRate(0.5)]


def _search(finding: Finding) -> list[Action]:
    steps = finding.evidence.get("steps")
    if not steps:
        return [Search(fraction=0.3)]
    # Three quarters of the training, as RigL has it; later than that, half of what is left.
    progress = min(1.0, finding.step / steps)
    return [Search(fraction=0.3, end=round(max(0.75, (1 + progress) / 2), 4))]


def _calmer(finding: Finding) -> list[Action]:
    return [Search(fraction=0.1)]


def _regrow(finding: Finding) -> list[Action]:
    return [Regrow(finding.where)]


def _denser(finding: Finding) -> list[Action]:
    # Four inputs an output: below that a random layer loses a part of its paths by chance alone.
    each = float(finding.evidence.get("weights_an_output", 2.0))
    return [Density(finding.where, round(min(64.0, max(2.0, 4.0 / max(each, 1e-3))), 3))]


def _some_back(finding: Finding) -> list[Action]:
    return [Density("", 1.5)]


def _experts(finding: Finding) -> tuple[int, ...]:
    return tuple(finding.evidence.get("experts", ()))


_ANSWERS: dict[str, Callable[[Finding], list[Action]]] = {
    "expert_collapse": _collapse,
    "collapse_onset": _balance,
    "dead_experts": _dead,
    "overload": _balance,
    "dominance": _balance,
    "drop_rate": _dropping,
    "gate_saturation": _cool,
    "entropy_crash": _cool,
    "router_not_learning": _cool,
    "singletons": _widen,
    "experts_alike": _shake,
    "starved_parameters": _starved,
    "capacity_without_competence": _begin_anew,
    "exploding_gradient": _explosion,
    "non_finite_gradient": _go_back,
    "loss_not_finite": _go_back,
    "loss_diverging": _diverging,
    "frozen_topology": _search,
    "low_exploration": _search,
    "short_lived_growth": _calmer,
    "dead_neurons": _regrow,
    "over_sparsified": _denser,
    "pruned_too_fast": _some_back,
}
