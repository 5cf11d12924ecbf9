"""Diagnosis: all rules on a history, now or at every reading of its past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsight.dynamics.history import History
from sparsight.health.findings import Finding, by_urgency
from sparsight.health.rules import ALL, COMPARISONS, Comparison, Rule


def diagnose(history: History, rules: Sequence[Rule] = ALL) -> list[Finding]:
    """What the rules find in a history as it stands, most urgent first.

    >>> from sparsight.dynamics.history import collect
    >>> from sparsight.dynamics.records import Record
    >>> history = collect([Record(step, "log/loss", "", float("nan")) for step in (10, 20)])
    >>> print(diagnose(history)[0].message)
    the model: the loss is NaN since step 10.
    """
    with np.errstate(all="ignore"):  # runs with NaN and infinity are what rules are for
        return by_urgency(finding for rule in rules for finding in rule(history))


def compare_runs(
    history: History, baseline: History, rules: Sequence[Comparison] = COMPARISONS
) -> list[Finding]:
    """What the rules over two runs find in a run beside its baseline."""
    return by_urgency(finding for rule in rules for finding in rule(history, baseline))


@dataclass(frozen=True)
class Episode:
    """A finding over time: as it was found first, last and at its worst, and whether it is so at the end."""

    first: Finding
    last: Finding
    worst: Finding
    ongoing: bool


def replay(history: History, rules: Sequence[Rule] = ALL, *, looks: int = 200) -> list[Episode]:
    """Go through a history as it happened and tell when each finding was first made.

    A run of up to `looks` readings is judged at each of them. A longer one is judged at `looks` of them,
    evenly spaced, and for what is new at one of them the exact reading is searched for. What came and went
    between two looks can escape; what lasts does not.
    """
    with np.errstate(all="ignore"):
        return _replay(history, rules, _reading_steps(history), looks)


def _replay(history: History, rules: Sequence[Rule], steps: NDArray[np.int64], looks: int) -> list[Episode]:
    if not len(steps):
        return []
    places = np.unique(np.linspace(0, len(steps) - 1, min(looks, len(steps))).round().astype(int)).tolist()
    first: dict[tuple[str, str], Finding] = {}
    last: dict[tuple[str, str], Finding] = {}
    worst: dict[tuple[str, str], Finding] = {}
    before = -1
    current: set[tuple[str, str]] = set()
    for place in places:
        then = history.until(int(steps[place]))
        current = set()
        for rule in rules:
            for finding in rule(then):
                current.add(finding.key)
                last[finding.key] = finding
                worst[finding.key] = by_urgency((worst.get(finding.key, finding), finding))[0]
                if finding.key not in first:
                    first[finding.key] = _earliest(history, rule, finding, steps[before + 1 : place])
        before = place
    found = [Episode(first[key], last[key], worst[key], key in current) for key in first]
    order = {finding.key: place for place, finding in enumerate(by_urgency(e.worst for e in found))}
    return sorted(found, key=lambda episode: (not episode.ongoing, order[episode.first.key]))


def _earliest(history: History, rule: Rule, found: Finding, steps: NDArray[np.int64]) -> Finding:
    """The first of the readings between two looks at which a rule says so, by bisection."""
    low, high = 0, len(steps)
    while low < high:
        half = (low + high) // 2
        earlier = [f for f in rule(history.until(int(steps[half]))) if f.key == found.key]
        if earlier:
            found, high = earlier[0], half
        else:
            low = half + 1
    return found


def _reading_steps(history: History) -> NDArray[np.int64]:
    """Every step with a reading of any quantity but the user's own, which come at every step."""
    watched = [s.steps for (name, _), s in history.series.items() if not name.startswith("log/")]
    parts = watched or [s.steps for s in history.series.values()]
    # Series of one run share their steps; uniting a few hundred equal ones would cost seconds.
    kinds = {(len(p), int(p[0]), int(p[-1])): p for p in parts if len(p)}
    if not kinds:
        return np.empty(0, np.int64)
    return np.unique(np.concatenate([*kinds.values(), np.array([history.last_step], np.int64)]))
