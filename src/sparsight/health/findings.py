"""What a rule finds in a history. Plain data, in the order in which a person should read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsight.dynamics.records import Event, Severity

SEVERITIES: tuple[Severity, ...] = ("act", "warn", "info")
"""Most urgent first: something must be done; it is worth a look; good to know."""


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found at one place.

    >>> found = Finding("dead_experts", "act", "blocks.0", 300, 200, "1 of 8 is dead.", {"experts": [3]})
    >>> found.key
    ('dead_experts', 'blocks.0')
    """

    rule: str
    severity: Severity
    where: str
    """The layer, or "" for the whole model."""
    step: int
    """When it was found: the last reading that the rule looked at."""
    onset: int
    """Since when it has been so, as far as the readings tell."""
    message: str
    """One sentence with its numbers."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The numbers it stands on, as JSON knows them: `experts` are indices of experts."""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(
                f"Finding of rule {self.rule!r}: severity must be one of {SEVERITIES}, got {self.severity!r}"
            )

    @property
    def key(self) -> tuple[str, str]:
        """Two findings with the same key are about the same thing."""
        return self.rule, self.where

    def as_event(self) -> Event:
        """The finding as the store keeps it; `data` has the onset beside the evidence."""
        data = {**self.evidence, "onset": self.onset}
        return Event(self.step, "finding", self.rule, self.severity, self.where, self.message, data)

    def as_json(self) -> dict[str, Any]:
        """A dictionary of plain values; what is not finite is None, as JSON has no word for it."""
        told: dict[str, Any] = _plain({**asdict(self), "evidence": dict(self.evidence)})
        return told


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def by_urgency(findings: Iterable[Finding]) -> list[Finding]:
    """Most urgent first; among equals the oldest, then by layer and rule."""
    rank = {severity: place for place, severity in enumerate(SEVERITIES)}
    return sorted(findings, key=lambda f: (rank[f.severity], f.onset, f.where, f.rule))
