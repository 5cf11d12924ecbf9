"""What a person sees of a run: a line that moves in a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from sparsight.recipes.training import Training

_PAUSE = 0.1  # seconds between two looks at the terminal: faster cannot be read


class Show(Protocol):
    """Where progress goes."""

    def begin(self, done: int, steps: int) -> None:
        """The run starts, or goes on."""

    def step(self, done: int, text: str) -> None:
        """A step is made."""

    def say(self, text: str) -> None:
        """Something worth a line of its own."""

    def end(self) -> None:
        """The run stops."""

    def wants(self, done: int) -> bool:
        """Whether the text of this step will be looked at: it is not made for nobody."""


class Bar:
    """A bar in a terminal, with loss, density or load, and the time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._console = console
        self._progress = Progress(
            TextColumn("step {task.completed:,}/{task.total:,}"),
            BarColumn(bar_width=12),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            auto_refresh=False,  # no second thread beside the kernels
            transient=True,
        )
        self._task: TaskID | None = None
        self._last = 0.0
        self._steps = 0

    def begin(self, done: int, steps: int) -> None:
        """See Show."""
        self._steps = steps
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=done)

    def wants(self, done: int) -> bool:
        """See Show."""
        return done == self._steps or time.monotonic() - self._last >= _PAUSE

    def step(self, done: int, text: str) -> None:
        """See Show."""
        assert self._task is not None
        self._last = time.monotonic()
        self._progress.update(self._task, completed=done, description=text, refresh=True)

    def say(self, text: str) -> None:
        """See Show."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """See Show."""
        self._progress.stop()


class Lines:
    """Ten plain lines a run, for logs and pipes."""

    def __init__(self) -> None:
        self._steps = 1

    def begin(self, done: int, steps: int) -> None:
        """See Show."""
        self._steps = steps

    def wants(self, done: int) -> bool:
        """See Show."""
        return done * 10 // self._steps > (done - 1) * 10 // self._steps

    def step(self, done: int, text: str) -> None:
        """See Show."""
        print(f"step {done}/{self._steps} {text}", flush=True)

    def say(self, text: str) -> None:
        """See Show."""
        print(text, flush=True)

    def end(self) -> None:
        """See Show."""


class Silence:
    """Nothing at all."""

    def begin(self, done: int, steps: int) -> None:
        """See Show."""

    def wants(self, done: int) -> bool:
        """See Show."""
        return False

    def step(self, done: int, text: str) -> None:
        """See Show."""

    def say(self, text: str) -> None:
        """See Show."""

    def end(self) -> None:
        """See Show."""


def show_for(quiet: bool) -> Show:
    """A bar where there is a terminal that can draw one, plain lines where there is none."""
    if quiet:
        return Silence()
    try:
        from rich.console import Console
    except ImportError:  # the library without its [app] extra
        return Lines()
    console = Console()
    return Bar(console) if console.is_terminal and not console.is_dumb_terminal else Lines()


def numbers(values: Mapping[str, float]) -> str:
    """`loss 0.1234 accuracy 0.9`, four digits each.

    >>> numbers({"loss": 0.123456, "BLEU": 21.04})
    'loss 0.1235 BLEU 21.04'
    """
    return " ".join(f"{name} {value:.4g}" for name, value in values.items())


def sparsity(training: Training) -> str:
    """The density of sparse weights, and the load of the busiest expert as a multiple of its fair share."""
    from sparsight.dst.sparsifier import Sparsifier
    from sparsight.moe.layer import MoE

    words = []
    for part in training.parts.values():
        if isinstance(part, Sparsifier):
            words.append(f"density {part.density:.3g}")
    busiest = 0.0
    for module in training.model.modules():
        if isinstance(module, MoE) and module.routing is not None:
            load = module.routing.load()
            busiest = max(busiest, float(load.max()) * len(load) / max(int(load.sum()), 1))
    if busiest:
        words.append(f"busiest expert {busiest:.1f}×")
    return " ".join(words)
