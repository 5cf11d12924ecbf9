"""`sparsight study`: run a study by its name and say what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from sparsight.recipes.find import nearest
from sparsight.studies import questions
from sparsight.studies.trial import Study, report, run

OURS: dict[str, Callable[..., Study]] = {
    "connections": questions.connections,
    "gradients": questions.gradients,
    "balance": questions.balance,
}


def main(arguments: Sequence[str]) -> int:
    """What follows `sparsight study`; returns the exit code."""
    if not arguments or arguments[0].startswith("-"):
        commands = {name: make for name, make in OURS.items()}
        tyro.extras.subcommand_cli_from_dict(
            commands,
            args=arguments or ["--help"],
            prog="sparsight study",
            description="Put a published claim to the test: every arm with every seed, judged seed by seed.",
        )
    name, *rest = arguments
    if name not in OURS:
        raise ValueError(f"there is no study '{name}'{nearest(name, OURS)} There are {', '.join(OURS)}")
    options, left = _options(name, rest)
    study = tyro.cli(OURS[name], args=left, prog=f"sparsight study {name}")
    seeds, out = options
    results = run(study, seeds, out, also=questions.load_of)
    text = report(study, results)
    (out / "study.txt").write_text(text + "\n")
    print(text)
    print(f"\nevery run is in {out}: sparsight compare {out}/*-0")
    return 0


def _options(name: str, words: Sequence[str]) -> tuple[tuple[int, Path], list[str]]:
    """The options of every study, apart from the knobs of this one."""

    def options(*, seeds: int = 3, out: Path = Path("runs/study") / name) -> tuple[int, Path]:
        """How the study is run.

        Args:
            seeds: Runs of each arm.
            out: Folder of the runs; what is finished there is not run again.
        """
        return seeds, out

    if "--help" in words or "-h" in words:
        return (0, Path()), list(words)
    found, left = tyro.cli(options, args=words, return_unknown_args=True)
    return found, left
