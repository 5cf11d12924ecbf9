"""Actions on the training itself: its pace, and going back to where it was well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsight.health.actions.core import Action, Done, RefusedError, Run, experts_of, positive


@dataclass(frozen=True)
class LearningRate:
    """Multiply the learning rate, whatever a scheduler makes of it."""

    times: float = 0.5
    where: str = ""
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        positive("LearningRate: times", self.times)
        if self.where:
            raise RefusedError(f"LearningRate: it is that of the whole model, got where='{self.where}'")
        before = run.pace.rate
        run.pace.set_rate(run.optimizer, before * self.times)
        return Done(
            f"learning rate times {run.pace.rate:.3g}", lambda: run.pace.set_rate(run.optimizer, before)
        )


@dataclass(frozen=True)
class ExpertRate:
    """Multiply the learning rate of experts: those that learn seldom may learn more when they do."""

    where: str
    experts: tuple[int, ...]
    times: float = 2.0
    most: float = 8.0
    setting: ClassVar[bool] = True

    def apply(self, run: Run) -> Done:
        positive("ExpertRate: times", self.times)
        routes = run.routed(self.where)
        if len(routes) != 1 or not routes[0].parts:
            raise RefusedError(
                f"ExpertRate: '{self.where}' is not one layer whose experts' parameters are known"
            )
        (route,) = routes
        pace, optimizer, undo = run.pace, run.optimizer, []
        for expert in experts_of(route, self.experts):
            undo.append((expert, pace.of(route.name, expert)))
            factor = min(pace.of(route.name, expert) * self.times, self.most)
            pace.set_expert(optimizer, route.name, expert, factor, route.parts[expert])

        def back() -> None:
            for expert, factor in undo:
                pace.set_expert(optimizer, route.name, expert, factor, route.parts[expert])

        rates = ", ".join(f"{expert}: {pace.of(route.name, expert):g}" for expert, _ in undo)
        return Done(f"{route.name}: learning rate of experts times {{{rates}}}", back)


@dataclass(frozen=True)
class Rewind:
    """Bring weights, optimizer state and topologies back to a kept checkpoint, at least `steps` old where
    there is one. The step count, learning rates and random numbers go on."""

    steps: int = 1
    where: str = ""
    setting: ClassVar[bool] = False

    def apply(self, run: Run) -> Done:
        if run.checkpoints is None or not run.checkpoints.kept:
            raise RefusedError("Rewind: no checkpoint is kept; ask for some with sp.manage(..., keep=2)")
        step = run.checkpoints.restore(run.step - self.steps)
        return Done(f"went back to the weights of step {step}; cannot be undone: what is gone was worse")


@dataclass(frozen=True)
class Every:
    """Do something now and again after each `steps` steps, `times` times in all."""

    action: Action
    steps: int = 500
    times: int = 2
    setting: ClassVar[bool] = False

    @property
    def where(self) -> str:
        """Where the action is done."""
        return self.action.where

    def apply(self, run: Run) -> Done:
        if self.steps < 1 or self.times < 1:
            raise RefusedError(
                f"Every: expected steps >= 1 and times >= 1, got {self.steps} and {self.times}"
            )
        undo: Callable[[], None] | None = None
        try:
            done = self.action.apply(run)
            message, undo = done.message, done.undo
        except RefusedError as reason:
            message = f"nothing to do this time: {reason}"
        later = None if self.times == 1 else (self.steps, replace(self, times=self.times - 1))
        return Done(message, undo, later)
