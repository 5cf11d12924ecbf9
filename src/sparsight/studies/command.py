"""`sparsight study`: run a study by its name and say what came out."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from sparsight.recipes.find import nearest
from sparsight.recipes.signature import knobs_of
from sparsight.studies import questions
from sparsight.studies.trial import Study, report, run

OURS: dict[str, Callable[..., Study]] = {
    "connections": questions.connections,
    "gradients": questions.gradients,
    "balance": questions.balance,
}

_FLAT = (tyro.conf.OmitArgPrefixes,)
_ABOUT = (
    "Put a published claim to the test: every arm with every seed, judged seed by seed. "
    "`sparsight study NAME --help` lists its knobs."
)


@dataclass(frozen=True)
class Options:
    """Of every study.

    Args:
        seeds: Runs of each arm.
        out: Folder of the runs, by default runs/study/NAME; what is finished there is not run again.
    """

    seeds: int = 3
    out: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """What follows `sparsight study`; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        commands = {name: _command(name, make) for name, make in OURS.items()}
        tyro.extras.subcommand_cli_from_dict(
            commands, args=arguments or ["--help"], prog="sparsight study", description=_ABOUT, config=_FLAT
        )
    name, *rest = arguments
    if name not in OURS:
        raise ValueError(f"there is no study '{name}'{nearest(name, OURS)} There are {', '.join(OURS)}")
    return int(tyro.cli(_command(name, OURS[name]), args=rest, prog=f"sparsight study {name}", config=_FLAT))


def _command(name: str, make: Callable[..., Study]) -> Callable[..., int]:
    """A function whose arguments are the study's knobs and the options of every study."""

    def command(*, knobs: Any, options: Any) -> int:
        return _start(make(**knobs), options)

    command.__doc__ = inspect.getdoc(make)
    command.__annotations__ = {
        "knobs": Annotated[dict[str, Any], tyro.conf.arg(constructor=knobs_of(make), name="")],
        "options": Annotated[Options, tyro.conf.arg(name="")],
        "return": int,
    }
    return command


def _start(study: Study, options: Options) -> int:
    out = options.out or Path("runs/study") / study.name
    results = run(study, options.seeds, out, also=questions.load_of)
    text = report(study, results)
    (out / "study.txt").write_text(text + "\n")
    print(text)
    print(f"\nevery run is in {out}; for their curves: sparsight compare {shlex.quote(str(out))}/*-[0-9]")
    return 0
