"""Drive a Training to its end: progress, records, checkpoints, Ctrl-C, and going on where it stopped."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import sparsight as sp
from sparsight.dynamics.store import FILE as STORE
from sparsight.recipes import checkpoint
from sparsight.recipes.checkpoint import Progress
from sparsight.recipes.judge import Judge
from sparsight.recipes.progress import Show, numbers, show_for, sparsity
from sparsight.recipes.training import Stateful, Training


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `stopped_by` is the signal that stopped it early, None where it came to its end."""

    step: int
    steps: int
    metrics: Mapping[str, float]
    seconds: float
    verdict: str = ""
    """Its health in one line; empty where nobody watched."""
    stopped_by: int | None = None


@dataclass
class _Stop:
    """Set by Ctrl-C; looked at between two steps, where everything fits together."""

    by: int | None = None
    handlers: dict[int, Any] = field(default_factory=dict)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self.by = number


def train(
    training: Training,
    run: str | Path,
    *,
    resume: bool = False,
    evaluations: int = 4,
    checkpoint_every: int = 0,
    watch_every: int = 10,
    act: bool = False,
    config: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train to the end, or until Ctrl-C; either way `run` then holds a checkpoint.

    `resume` takes up the checkpoint of a run that was made with the same recipe and knobs, and the result is
    that of a run that was never stopped, bit for bit. `evaluations` is how often quality is measured,
    evenly spaced, the last at the end. `checkpoint_every` saves every so many steps too, against a loss of
    power. `watch_every` is the number of steps between two readings of `sp.watch`, whose store goes into the
    run folder with `config` in it; 0 does not watch. What the rules find in it is said on the way; with `act`
    what they advise is done (`sp.manage`).
    """
    if evaluations < 1 or checkpoint_every < 0 or watch_every < 0:
        raise ValueError(
            "expected evaluations >= 1, checkpoint_every >= 0 and watch_every >= 0, got "
            f"evaluations={evaluations}, checkpoint_every={checkpoint_every}, watch_every={watch_every}"
        )
    run = Path(run)
    if not resume and (run / checkpoint.FILE).exists():
        raise ValueError(f"'{run}' holds a run already; resume it, or choose another folder")
    run.mkdir(parents=True, exist_ok=True)
    due = {round(training.steps * (n + 1) / evaluations) for n in range(evaluations)}
    with _watching(training, run, watch_every, config or {}) as watch, _signals() as stop:
        judge = None if watch is None else Judge(sp.manage(watch, act=act))
        followers: dict[str, Stateful] = (
            {} if judge is None else {"watch": judge.manager.watch, "manager": judge.manager}
        )
        progress = checkpoint.load(run, training, followers) if resume else Progress()
        show = show_for(quiet)
        show.begin(progress.step, training.steps)
        try:
            _loop(_Run(training, run, progress, due, checkpoint_every, show, stop, followers, judge))
        finally:
            show.end()
    said = "" if judge is None else judge.verdict
    return Outcome(progress.step, training.steps, progress.metrics, progress.seconds, said, stop.by)


@dataclass(frozen=True)
class _Run:
    """What the loop works with."""

    training: Training
    folder: Path
    progress: Progress
    due: set[int]
    checkpoint_every: int
    show: Show
    stop: _Stop
    followers: Mapping[str, Stateful]
    judge: Judge | None

    def log(self, numbers: Mapping[str, float]) -> None:
        if self.judge is not None:
            self.judge.manager.watch.log(**numbers)

    def save(self) -> None:
        checkpoint.save(self.folder, self.training, self.progress, self.followers)

    def look(self) -> None:
        if self.judge is not None:
            for sentence in self.judge.news():
                self.show.say(sentence)

    def line(self, measured: Mapping[str, float]) -> str:
        said = "" if self.judge is None else self.judge.verdict
        return " ".join(filter(None, (numbers(measured), sparsity(self.training), said)))


def _loop(run: _Run) -> None:
    training, progress, show = run.training, run.progress, run.show
    saved = progress.step
    training.model.train()
    while progress.step < training.steps and run.stop.by is None:
        begin = time.perf_counter()
        measured = training.step(progress.step)
        progress.step += 1
        progress.seconds += time.perf_counter() - begin
        run.log(measured)
        if show.wants(progress.step):
            show.step(progress.step, run.line(measured))
        if progress.step in run.due:
            progress.metrics = _evaluate(training)
            run.log(progress.metrics)
            if progress.metrics:
                show.say(f"step {progress.step}: {numbers(progress.metrics)}")
        run.look()
        if run.checkpoint_every and progress.step % run.checkpoint_every == 0:
            run.save()
            saved = progress.step
    if saved != progress.step:
        run.save()
    if run.judge is not None:
        run.judge.conclude()
        run.look()


@torch.no_grad()
def _evaluate(training: Training) -> dict[str, float]:
    """Quality, measured without leaving a trace: how often one looks must not change what one sees."""
    training.model.eval()
    with torch.random.fork_rng():
        metrics = {name: float(value) for name, value in training.evaluate().items()}
    training.model.train()
    return metrics


@contextmanager
def _watching(
    training: Training, run: Path, every: int, config: Mapping[str, Any]
) -> Iterator[sp.Watch | None]:
    """Every run writes its store, beside the checkpoint."""
    if not every:
        yield None
        return
    with warnings.catch_warnings():
        # Who trains a dense network to compare with knows that nothing in it is sparse.
        warnings.filterwarnings("ignore", "watch: nothing in this model is sparse", UserWarning)
        watch = sp.watch(
            training.model,
            training.optimizer,
            run,
            every=every,
            config=config,
            resume=(run / STORE).exists(),
        )
    training.losses.listener = watch.losses
    try:
        yield watch
    finally:
        training.losses.listener = None
        watch.close()


@contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        stop.handlers[number] = signal.signal(number, stop)
    try:
        yield stop
    finally:
        for handled, handler in stop.handlers.items():
            signal.signal(handled, handler)
