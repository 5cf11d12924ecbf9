"""A run's health in one line."""

from __future__ import annotations

from collections.abc import Iterable

from sparsight.health.findings import Finding, by_urgency
from sparsight.health.looking import named


def verdict(findings: Iterable[Finding]) -> str:
    """The state of a run in one line: for a progress bar, a page or a log.

    >>> verdict([])
    'healthy'
    >>> verdict([Finding("dead_experts", "act", "blocks.0", 300, 200, "…", {"experts": [3]})])
    'sick: dead experts in blocks.0 (since step 200)'
    """
    ordered = by_urgency(findings)
    serious = [f for f in ordered if f.severity != "info"]
    if not serious:
        return "healthy"
    head, word = serious[0], {"act": "sick", "warn": "watch"}[serious[0].severity]
    more = f", and {len(serious) - 1} more" if len(serious) > 1 else ""
    return f"{word}: {title(head.rule)} in {named(head.where)} (since step {head.onset}){more}"


def title(rule: str) -> str:
    """A rule's name as words.

    >>> title("dead_experts")
    'dead experts'
    """
    return rule.replace("_", " ")
