"""What the manager of a run has to say while it goes on, in sentences and in one line."""

from __future__ import annotations

from dataclasses import dataclass, field

import sparsight as sp


@dataclass
class Judge:
    """Tells each rule once: where a whole network is sick, the first layer says it for all."""

    manager: sp.Manager
    told: set[str] = field(default_factory=set)
    done: int = 0

    @property
    def verdict(self) -> str:
        """The health of the run in one line; empty before it has been judged."""
        return sp.verdict(self.manager.open.values()) if self.manager.judged else ""

    def news(self) -> list[str]:
        """What was found and done since the last look."""
        sentences = []
        for finding in self.manager.open.values():
            if finding.severity != "info" and finding.rule not in self.told:
                self.told.add(finding.rule)
                sentences.append(f"step {finding.step}: {finding.message}")
        for applied in self.manager.done[self.done :]:
            sentences.append(f"step {applied.step}: done: {applied.done.message}")
        self.done = len(self.manager.done)
        return sentences

    def conclude(self) -> None:
        """Judge the run as it ends; too late to act."""
        if self.manager.judged != self.manager.watch.step:
            self.manager.judge(act=False)
