"""Drive a Training to its end: progress, records, checkpoints, Ctrl-C, and going on where it stopped."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sparsight.recipes import checkpoint
from sparsight.recipes.checkpoint import Progress
from sparsight.recipes.progress import Show, numbers, show_for, sparsity
from sparsight.recipes.training import Training


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `stopped_by` is the signal that stopped it early, None where it came to its end."""

    step: int
    steps: int
    metrics: Mapping[str, float]
    seconds: float
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
    quiet: bool = False,
) -> Outcome:
    """Train to the end, or until Ctrl-C; either way `run` then holds a checkpoint.

    `resume` takes up the checkpoint of a run that was made with the same recipe and knobs, and the result is
    that of a run that was never stopped, bit for bit. `evaluations` is how often quality is measured,
    evenly spaced, the last at the end. `checkpoint_every` saves every so many steps too, against a loss of
    power.
    """
    if evaluations < 1 or checkpoint_every < 0:
        raise ValueError(
            "expected evaluations >= 1 and checkpoint_every >= 0, "
            f"got evaluations={evaluations}, checkpoint_every={checkpoint_every}"
        )
    run = Path(run)
    if not resume and (run / checkpoint.FILE).exists():
        raise ValueError(f"'{run}' holds a run already; resume it, or choose another folder")
    run.mkdir(parents=True, exist_ok=True)
    progress = checkpoint.load(run, training) if resume else Progress()
    due = {round(training.steps * (n + 1) / evaluations) for n in range(evaluations)}
    show = show_for(quiet)
    with _signals() as stop:
        show.begin(progress.step, training.steps)
        try:
            _loop(training, run, progress, due, checkpoint_every, show, stop)
        finally:
            show.end()
    return Outcome(progress.step, training.steps, progress.metrics, progress.seconds, stop.by)


def _loop(
    training: Training,
    run: Path,
    progress: Progress,
    due: set[int],
    checkpoint_every: int,
    show: Show,
    stop: _Stop,
) -> None:
    saved = progress.step
    training.model.train()
    while progress.step < training.steps and stop.by is None:
        begin = time.perf_counter()
        measured = training.step(progress.step)
        progress.step += 1
        progress.seconds += time.perf_counter() - begin
        if show.wants(progress.step):
            show.step(progress.step, f"{numbers(measured)} {sparsity(training)}".rstrip())
        if progress.step in due:
            progress.metrics = _evaluate(training)
            if progress.metrics:
                show.say(f"step {progress.step}: {numbers(progress.metrics)}")
        if checkpoint_every and progress.step % checkpoint_every == 0:
            checkpoint.save(run, training, progress)
            saved = progress.step
    if saved != progress.step:
        checkpoint.save(run, training, progress)


@torch.no_grad()
def _evaluate(training: Training) -> dict[str, float]:
    """Quality, measured without leaving a trace: how often one looks must not change what one sees."""
    training.model.eval()
    with torch.random.fork_rng():
        metrics = {name: float(value) for name, value in training.evaluate().items()}
    training.model.train()
    return metrics


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
