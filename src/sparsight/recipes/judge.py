"""A look at a run's records now and then while it goes on: is it well, and if not, since when and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import sparsight as sp


@dataclass
class Judge:
    """Applies the rules to what `sp.watch` has written so far; records each finding, tells each rule once."""

    watch: sp.Watch
    verdict: str = ""
    """The last look in one line; empty before the first."""
    told: set[tuple[str, str]] = field(default_factory=set)

    def look(self) -> list[str]:
        """What is new since the last look, in sentences; it goes onto the run's timeline as well.

        One sentence a rule: where a whole network is sick, the first layer says it for all.
        """
        if self.watch.store is None:  # another process than the first
            return []
        self.watch.store.flush()
        findings = sp.diagnose(sp.load_run(self.watch.store.folder))
        self.verdict = sp.verdict(findings)
        new = [f for f in findings if f.severity != "info" and f.key not in self.told]
        sentences = []
        for finding in new:
            if finding.rule not in {rule for rule, _ in self.told}:
                sentences.append(f"step {finding.step}: {finding.message}")
            self.told.add(finding.key)
            self.watch.event(finding.as_event())
        return sentences
