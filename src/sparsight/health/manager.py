"""The manager of a run: judges it while it goes on, advises, and acts where it may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from sparsight.dynamics import subject
from sparsight.dynamics.records import Event, Severity
from sparsight.dynamics.watch import Watch
from sparsight.health.actions import Action, Done, Every, RefusedError, Run, as_data, from_data, kind_of
from sparsight.health.actions.core import several_processes
from sparsight.health.actions.pace import Pace
from sparsight.health.checkpoints import Checkpoints
from sparsight.health.diagnose import diagnose
from sparsight.health.findings import SEVERITIES, Finding
from sparsight.health.guard import bad_gradient
from sparsight.health.looking import named
from sparsight.health.policies import Policy
from sparsight.health.recent import Recent
from sparsight.health.rules import Rule
from sparsight.health.verdict import title, verdict
from sparsight.moe.layer import MoE

_GONE_AFTER = 2
"""Judgements without a finding after which it counts as resolved: one may be a lucky batch."""


@dataclass(frozen=True)
class Limits:
    """What a manager may do."""

    act: bool
    every: int
    budget: int
    cooldown: int
    on: Severity
    keep_every: int
    seed: int


@dataclass
class Applied:
    """An action that was done, and who asked for it."""

    step: int
    action: Action
    done: Done
    cause: str


class Manager:
    """Made by `manage`."""

    def __init__(
        self,
        watch: Watch,
        policy: Policy,
        limits: Limits,
        rules: tuple[Rule, ...],
        checkpoints: Checkpoints | None,
    ) -> None:
        self.watch, self.policy, self.limits, self.rules = watch, policy, limits, rules
        self.checkpoints = checkpoints
        self.open: dict[tuple[str, str], Finding] = {}
        """What is wrong at present."""
        self.done: list[Applied] = []
        """What was done and not undone, in order."""
        self.spent = 0
        self.recent = Recent()
        self._pace = Pace(watch.sparsifier)
        self._absent: dict[tuple[str, str], int] = {}
        self._last: dict[tuple[str, str], int] = {}
        self._later: list[tuple[int, Action, str]] = []
        self._settings: list[tuple[int, Action]] = []
        self._judged = self._seen = watch.step
        self._judgements = 0
        self._told_budget = False
        watch.sinks.append(self.recent)
        self._handle: Any = watch.optimizer.register_step_post_hook(self._after_step)
        self._describe()

    def __repr__(self) -> str:
        mode = f"acting, {self.spent} of {self.limits.budget} actions" if self.limits.act else "advising"
        return f"Manager({mode}, {verdict(self.open.values())})"

    # -- following the run -----------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self.watch.step
        if step == self._seen:
            return  # a step that was skipped
        self._seen = step
        due = [entry for entry in self._later if entry[0] <= step]
        for entry in due:
            self._later.remove(entry)
            self._try(entry[1], entry[2])
        if self.checkpoints is not None and (found := bad_gradient(self.watch)) is not None:
            self._answer([(found, list(self.policy(found)))], urgent=True)
        if step % self.watch.every == 0 and step - self._judged >= self.limits.every:
            self.judge()
        if self.checkpoints is not None and step % self.limits.keep_every == 0 and not self._sick():
            self.checkpoints.keep(step)

    def _sick(self) -> bool:
        return any(finding.severity == "act" for finding in self.open.values())

    @property
    def judged(self) -> int:
        """The step of the last judgement; 0 before the first."""
        return self._judged if self._judgements else 0

    def judge(self, *, act: bool = True) -> list[Finding]:
        """Judge the run now, on what has been read so far; returns the findings. `act=False` only records."""
        self._judged = self.watch.step
        self._judgements += 1
        told: list[tuple[Finding, list[Action]]] = []
        if not several_processes() or torch.distributed.get_rank() == 0:
            findings = diagnose(self.recent.history(self._meta), self.rules)
            told = [(finding, list(self.policy(finding)) if act else []) for finding in findings]
        told = _from_the_first(told)
        self._answer(told)
        present = {finding.key for finding, _ in told}
        for key in [key for key in self.open if key not in present]:
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= _GONE_AFTER:
                self._resolve(key)
        return [finding for finding, _ in told]

    def _answer(self, told: list[tuple[Finding, list[Action]]], urgent: bool = False) -> None:
        for finding, actions in told:
            known = self.open.get(finding.key)
            worse = known is not None and _rank(finding.severity) < _rank(known.severity)
            new = known is None or worse
            self.open[finding.key] = finding
            self._absent.pop(finding.key, None)
            if new:
                self.watch.event(finding.as_event())
            may = self.limits.act and _rank(finding.severity) <= _rank(self.limits.on)
            for action in actions:
                if may:
                    self._within_limits(action, finding.rule, urgent)
                elif new:
                    self._record(action, finding.rule, f"would do: {_sentence(action)}", "advised")

    def _resolve(self, key: tuple[str, str]) -> None:
        finding = self.open.pop(key)
        self._absent.pop(key, None)
        message = (
            f"{named(finding.where)}: {title(finding.rule)} is over, after it began at step {finding.onset}"
        )
        self.watch.event(
            Event(self.watch.step, "note", finding.rule, "info", finding.where, message, {"resolved": True})
        )

    # -- acting ----------------------------------------------------------------------------------

    def _within_limits(self, action: Action, cause: str, urgent: bool) -> None:
        key, step = (kind_of(action), action.where), self.watch.step
        last = self._last.get(key)
        if last is not None and step - last < self.limits.cooldown and not urgent:
            return
        if self.spent >= self.limits.budget:
            if not self._told_budget:
                self._told_budget = True
                self.watch.note(f"the budget of {self.limits.budget} actions is spent; nothing more is done")
            return
        self._last[key] = step
        if self._try(action, cause):
            self.spent += 1

    def _try(self, action: Action, cause: str) -> bool:
        try:
            self.apply(action, cause=cause)
        except RefusedError as reason:
            self._record(action, cause, f"not done: {reason}", "refused")
            return False
        return True

    def apply(self, action: Action, *, cause: str = "by hand") -> Done:
        """Do something now, whatever the limits say, and record it. A refusal is raised."""
        before = {} if self.watch.sparsifier is None else self.watch.sparsifier.topologies
        done = action.apply(self.run())
        self.done.append(Applied(self.watch.step, action, done, cause))
        inner = action.action if isinstance(action, Every) else action
        if inner.setting:
            self._settings.append((self.watch.step, inner))
        if done.later is not None:
            self._later.append((self.watch.step + done.later[0], done.later[1], cause))
        self._record(action, cause, done.message, "done", undo=done.undo is not None)
        self._changed(before)
        return done

    def undo(self) -> Action:
        """Take the last action back; returns it."""
        if not self.done:
            raise ValueError("undo: nothing has been done")
        last = self.done[-1]
        if last.done.undo is None:
            raise ValueError(f"undo: {last.done.message}")
        before = {} if self.watch.sparsifier is None else self.watch.sparsifier.topologies
        last.done.undo()
        self.done.pop()
        inner = last.action.action if isinstance(last.action, Every) else last.action
        if (last.step, inner) in self._settings:
            self._settings.remove((last.step, inner))
        if last.done.later is not None:
            self._later = [entry for entry in self._later if entry[1] != last.done.later[1]]
        self._record(last.action, last.cause, f"undone: {last.done.message}", "undone")
        self._changed(before)
        return last.action

    def run(self) -> Run:
        """What actions may change and know, as it is now."""
        watch = self.watch
        return Run(
            watch.model,
            watch.optimizer,
            tuple(watch.routes),
            watch.sparsifier,
            watch.step,
            self.limits.seed,
            self.recent.latest("moe/tokens_per_expert"),
            self._pace,
            self.checkpoints,
        )

    def _record(self, action: Action, cause: str, message: str, mode: str, **more: Any) -> None:
        data = {**as_data(action), "mode": mode, **more}
        self.watch.event(Event(self.watch.step, "action", cause, "info", action.where, message, data))

    def _changed(self, before: Mapping[str, Any]) -> None:
        """Tell the watch which topologies are not what they were, and the rules what layers are now."""
        connections, sparsifier = self.watch.connections, self.watch.sparsifier
        if connections is not None and sparsifier is not None:
            for name, topology in sparsifier.topologies.items():
                if before.get(name) is not topology and name in connections.lineages:
                    connections.lineages[name].changed = True
        self._describe()

    def _describe(self) -> None:
        watch = self.watch
        now = {r.name: r.module.k for r in watch.routes if isinstance(r.module, MoE)}
        layers = subject.describe(watch.routes, watch.sparsifier, watch._layers)
        method = None if watch.sparsifier is None else subject.describe_method(watch.sparsifier)
        told = [{**layer, "k": now.get(layer["name"], layer.get("k"))} for layer in layers]
        self._meta: dict[str, Any] = {"layers": told, "method": method, "every": watch.every}

    # -- ending and going on ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as JSON does: findings, what was spent, changed settings."""
        return {
            "judged": self._judged,
            "spent": self.spent,
            "open": [finding.as_json() for finding in self.open.values()],
            "last": [[*key, step] for key, step in self._last.items()],
            "later": [[step, as_data(action), cause] for step, action, cause in self._later],
            "settings": [[step, as_data(action)] for step, action in self._settings],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on after a resume, once model, optimizer, Sparsifier and watch have their states: settings that
        no checkpoint holds are set again. What was done before cannot be undone any more."""
        settings = [(int(step), from_data(data)) for step, data in saved["settings"]]
        for step, action in settings:
            action.apply(replace(self.run(), step=step, restoring=True))
        self._settings, self.done = settings, []
        self._judged, self.spent, self._seen = int(saved["judged"]), int(saved["spent"]), self.watch.step
        self.open = {finding.key: finding for finding in (Finding(**entry) for entry in saved["open"])}
        self._last = {(kind, where): int(step) for kind, where, step in saved["last"]}
        self._later = [(int(step), from_data(data), cause) for step, data, cause in saved["later"]]
        self._describe()

    def close(self) -> None:
        """Stop judging. What was done stays done."""
        self._handle.remove()
        if self.recent in self.watch.sinks:
            self.watch.sinks.remove(self.recent)


def _rank(severity: Severity) -> int:
    return SEVERITIES.index(severity)


def _sentence(action: Action) -> str:
    told = {k: v for k, v in as_data(action).items() if k not in ("kind", "where") and v is not None}
    return f"{kind_of(action)}({', '.join(f'{k}={v}' for k, v in told.items())})"


def _from_the_first(told: list[tuple[Finding, list[Action]]]) -> list[tuple[Finding, list[Action]]]:
    """What the first process decided: each has its own losses, and all must do the same."""
    if not several_processes():
        return told
    box = [told]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
