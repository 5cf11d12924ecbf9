"""What the rules say about a run: now, for the page; as it happened, for a report. As events, to be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsight.dynamics.history import History
from sparsight.dynamics.reading import load_run, store_of
from sparsight.dynamics.records import Event
from sparsight.dynamics.sampling import recent
from sparsight.health.diagnose import diagnose, replay
from sparsight.health.findings import Finding
from sparsight.health.verdict import verdict

LARGEST = 64_000_000
"""Bytes of a store beyond which a report judges the end of a run and does not go through all of it."""


@dataclass(frozen=True)
class Judgement:
    """The worst there is (fine, warn or act), in a line, and what was found."""

    level: str
    verdict: str
    events: tuple[Event, ...] = ()


def judge_now(run: Path) -> Judgement:
    """What the rules find in the run as it stands. `step` of each event is when it set in."""
    found = diagnose(recent(run))
    return _judged(found, [_at_onset(finding) for finding in found])


def judge_all(run: Path) -> Judgement:
    """What the rules would have found while the run went on, and how it stands at the end."""
    if store_of(run).stat().st_size > LARGEST:
        return judge_now(run)
    episodes = replay(load_run(run))
    now = [e.last for e in episodes if e.ongoing]
    return _judged(now, [e.first.as_event() for e in episodes])


def _judged(now: Sequence[Finding], events: Sequence[Event]) -> Judgement:
    levels = {finding.severity for finding in now}
    level = next((name for name in ("act", "warn") if name in levels), "fine")
    return Judgement(level, verdict(now), tuple(events))


def _at_onset(finding: Finding) -> Event:
    event = finding.as_event()
    return Event(
        finding.onset, event.kind, event.rule, event.severity, event.where, event.message, event.data
    )


def with_findings(history: History, found: Sequence[Event]) -> History:
    """With what the rules found beside what was recorded; what was recorded is not said twice."""
    known = {(e.rule, e.where) for e in history.events if e.kind == "finding"}
    new = [e for e in found if (e.rule, e.where) not in known]
    return History(history.series, history.meta, (*history.events, *new))
