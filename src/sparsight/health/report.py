"""What `sparsight doctor RUN` says: a page for a person, or the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsight.dynamics.history import History
from sparsight.health.advice import advice_for
from sparsight.health.diagnose import Episode
from sparsight.health.findings import SEVERITIES, Finding
from sparsight.health.verdict import title, verdict

_HEADS = {"act": "Act on this", "warn": "Worth a look", "info": "Good to know"}


def now(episodes: Sequence[Episode]) -> list[Finding]:
    """What is so at the end of the run."""
    return [episode.last for episode in episodes if episode.ongoing]


def must_act(episodes: Sequence[Episode]) -> bool:
    """Whether something is so at the end that must be acted on."""
    return any(finding.severity == "act" for finding in now(episodes))


def as_text(run: str, history: History, episodes: Sequence[Episode]) -> str:
    """Findings by severity, each with its sentence, its time and what one can do; then what has passed."""
    if not history.series:
        return f"{run}: no readings yet"
    lines = [f"{run}: {verdict(now(episodes))}", f"  {_about(history)}"]
    for severity in SEVERITIES:
        group = [e for e in episodes if e.ongoing and e.last.severity == severity]
        lines += ["", _HEADS[severity]] if group else []
        for episode in group:
            lines += _entry(episode)
    passed = [e for e in episodes if not e.ongoing]
    lines += ["", "Over by the end"] if passed else []
    lines += [
        f"  {e.worst.severity:<4} {e.last.message} Found at step {e.first.step}, last at {e.last.step}."
        for e in passed
    ]
    return "\n".join(lines)


def _entry(episode: Episode) -> list[str]:
    first, last = episode.first, episode.last
    lines = [
        f"  {title(last.rule)}, since step {min(first.onset, last.onset)}, found at step {first.step}",
        f"    {last.message}",
    ]
    advice = advice_for(last.rule)
    return [*lines, f"    → {advice}"] if advice else lines


def _about(history: History) -> str:
    parts = [f"{history.last_step} steps"]
    layers = history.meta.get("layers")
    families = [entry.get("family") for entry in layers] if isinstance(layers, list) else []
    for family, word in (
        ("moe", "expert"),
        ("depth", "depth-routed"),
        ("sparse", "sparse"),
        ("dense", "dense"),
    ):
        if count := families.count(family):
            parts.append(f"{count} {word} layer{'s' if count > 1 else ''}")
    return ", ".join(parts)


def as_json(run: str, history: History, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "run": run,
        "steps": history.last_step,
        "verdict": verdict(now(episodes)),
        "act": must_act(episodes),
        "findings": [
            {
                **episode.last.as_json(),
                "onset": min(episode.first.onset, episode.last.onset),
                "found": episode.first.step,
                "ongoing": episode.ongoing,
                "advice": advice_for(episode.last.rule),
            }
            for episode in episodes
        ],
    }
