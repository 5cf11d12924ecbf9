"""`sparsight train`: a recipe's signature becomes options, its run a folder that can be taken up again."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

from sparsight.recipes import find, stored
from sparsight.recipes.find import Recipe
from sparsight.recipes.signature import knobs_of
from sparsight.recipes.stored import Stored
from sparsight.recipes.training import Training

_FLAT = (tyro.conf.OmitArgPrefixes,)  # --density, not --knobs.weights.density

_ABOUT = (
    "Train a recipe. `sparsight train RECIPE --help` lists its knobs. Your own recipe is a function in a "
    "file: `sparsight train path/to/mine.py:function`. `sparsight train --resume RUN` goes on where a run "
    "stopped."
)


@dataclass(frozen=True)
class Options:
    """Of the run itself.

    Args:
        run: Folder of the run; by default runs/RECIPE, with a number where that is taken.
        evaluations: How often quality is measured, evenly spaced, the last time at the end.
        checkpoint_every: Steps between checkpoints on the way; 0 saves at the end and on Ctrl-C alone.
        watch_every: Steps between two readings of the training's dynamics; 0 does not watch.
        act: Do what the rules advise where something is wrong; without it they only say so.
        threads: Threads of torch; 0 leaves the choice to it.
        quiet: Print the result alone.
    """

    run: Path | None = None
    evaluations: int = 4
    checkpoint_every: int = 0
    watch_every: int = 10
    act: bool = False
    threads: int = 0
    quiet: bool = False


def main(arguments: Sequence[str]) -> int:
    """What follows `sparsight train`; returns the exit code."""
    if any(word.split("=")[0] == "--resume" for word in arguments):
        return int(tyro.cli(_resume, args=arguments, prog="sparsight train"))
    if not arguments or arguments[0].startswith("-"):
        ours = {name: _command(name, recipe) for name, recipe in find.ours().items()}
        tyro.extras.subcommand_cli_from_dict(
            ours, args=arguments or ["--help"], prog="sparsight train", description=_ABOUT, config=_FLAT
        )
    name, *rest = arguments
    recipe = find.find(name)
    return int(tyro.cli(_command(name, recipe), args=rest, prog=f"sparsight train {name}", config=_FLAT))


def _command(name: str, recipe: Recipe) -> Callable[..., int]:
    """A function whose arguments are the recipe's knobs and the options of a run: what tyro reads."""

    def command(*, knobs: Any, options: Any) -> int:
        return _start(name, recipe, knobs, options)

    command.__doc__ = inspect.getdoc(recipe)
    command.__annotations__ = {
        "knobs": Annotated[dict[str, Any], tyro.conf.arg(constructor=knobs_of(recipe), name="")],
        "options": Annotated[Options, tyro.conf.arg(name="")],
        "return": int,
    }
    return command


def _start(name: str, recipe: Recipe, knobs: Mapping[str, Any], options: Options) -> int:
    from sparsight.recipes import checkpoint

    run = options.run or _free(Path("runs"), recipe.__name__)
    if (run / stored.FILE).exists() or (run / checkpoint.FILE).exists():
        raise ValueError(
            f"'{run}' holds a run already: `sparsight train --resume {shlex.quote(str(run))}` goes on with "
            "it, another --run begins anew"
        )
    kept = {key: value for key, value in dataclasses.asdict(options).items() if key not in ("run", "quiet")}
    versions = {package: version(package) for package in ("sparsight", "torch")}
    _use_threads(options.threads)
    training = _make(name, recipe, knobs)
    about = Stored(find.reference(name), knobs, kept, versions)
    stored.write(run, about)
    return _drive(about, training, run, options, resume=False)


def _resume(*, resume: Path, quiet: bool = False) -> int:
    """Go on with a run that was stopped, as if it had not been.

    Args:
        resume: Folder of the run.
        quiet: Print the result alone.
    """
    about = stored.read(resume)
    recipe = find.find(about.recipe)
    options = Options(quiet=quiet, **about.options)
    _use_threads(options.threads)
    training = _make(about.recipe, recipe, stored.knobs_of(recipe, about))
    return _drive(about, training, resume, options, resume=True)


def _use_threads(count: int) -> None:
    if count < 0:
        raise ValueError(f"threads must be a number >= 0, got {count}")
    if count:
        import torch

        torch.set_num_threads(count)


def _make(name: str, recipe: Recipe, knobs: Mapping[str, Any]) -> Training:
    training = recipe(**knobs)
    if not isinstance(training, Training):
        raise ValueError(f"the recipe '{name}' must return a Training, got {type(training).__name__}")
    return training


def _drive(about: Stored, training: Training, run: Path, options: Options, *, resume: bool) -> int:
    from sparsight.recipes.progress import numbers
    from sparsight.recipes.run import train

    outcome = train(
        training,
        run,
        resume=resume,
        evaluations=options.evaluations,
        checkpoint_every=options.checkpoint_every,
        watch_every=options.watch_every,
        act=options.act,
        config={"recipe": about.recipe, "quality": training.main, **stored.flat(about.knobs)},
        quiet=options.quiet,
    )
    if outcome.stopped_by is not None and outcome.step < outcome.steps:
        print(f"stopped after step {outcome.step} of {outcome.steps}; everything is saved. Go on with")
        print(f"  sparsight train --resume {shlex.quote(str(run))}")
        return 128 + outcome.stopped_by
    name = about.recipe.rpartition(":")[2]
    result = numbers(outcome.metrics) or "done"
    print(
        f"{name}: {result} after {outcome.steps} steps, {outcome.seconds:.1f} s of training, "
        f"{outcome.verdict + ', ' if outcome.verdict else ''}in {run}"
    )
    if outcome.verdict not in ("", "healthy"):
        print(f"`sparsight doctor {shlex.quote(str(run))}` says more")
    return 0 if outcome.stopped_by is None else 128 + signal.Signals(outcome.stopped_by)


def _free(folder: Path, name: str) -> Path:
    """runs/image, or runs/image-2 where that is taken."""
    run, number = folder / name, 1
    while run.exists():
        number += 1
        run = folder / f"{name}-{number}"
    return run
