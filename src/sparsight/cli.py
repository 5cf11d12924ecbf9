"""The command line (extra `[app]`). Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal


def demo(*, out: Path | None = None, quick: bool = False) -> None:
    """Two minutes: a sparse network beside a dense one, experts with two gradients, a collapse healed.

    Args:
        out: Folder of the runs and of the report; by default runs/demo, with a number where that is taken.
        quick: A few steps of each, to see that it works; the numbers then say little.
    """
    from sparsight.recipes.demo import Sizes, demo
    from sparsight.recipes.find import free

    folder = out or free(Path("runs"), "demo")
    small = Sizes(image_steps=60, image_width=64, language_steps=12, language_width=32, healing_steps=120)
    report = demo(folder, small if quick else Sizes())
    print(f"the report: {report}\nthe live page: sparsight watch {folder}")


def train() -> None:
    """Train a recipe: images, a language model, a translator, ELECTRA, or one of your own."""
    from sparsight.recipes.command import main as command

    sys.exit(command(sys.argv[2:]))


def study() -> None:
    """Put a published claim to the test: connections, gradients or balance."""
    from sparsight.studies.command import main as command

    sys.exit(command(sys.argv[2:]))


def bench(
    *,
    out: Path = Path("runs/bench"),
    repeats: int = 11,
    sparsities: tuple[float, ...] = (0.80, 0.90, 0.95, 0.98, 0.99),
    threads: tuple[int, ...] = (),
    only: Literal["all", "layers", "moe"] = "all",
) -> None:
    """Measure layers and mixtures of experts against dense torch; print, store and draw the result.

    Args:
        out: Folder for the table (text and JSON) and the picture.
        repeats: Timings of each candidate, taken by turns.
        sparsities: Shares of the weights that are missing.
        threads: Numbers of threads; one and all of them by default.
        only: Sparse layers alone, or mixtures of experts alone; both by default.
    """
    import torch
    from rich.console import Console

    from sparsight.bench import table

    console = Console(stderr=True)
    counts = threads or tuple(dict.fromkeys((1, torch.get_num_threads())))
    with console.status("starting") as status:
        # A spinner shows nothing where there is no terminal, and this takes a while: say it line by line.
        say = status.update if console.is_terminal else console.print
        layers, mixtures = only != "moe", only != "layers"
        found = table.run(
            sparsities=sparsities if layers else (), thread_counts=counts, repeats=repeats, say=say
        )
        moe = table.run_moe(thread_counts=counts if mixtures else (), repeats=repeats, say=say)
        found = replace(found, moe=moe)
    print(table.render(found))
    for path in table.save(found, out):
        console.print(f"written: {path}")


def doctor(
    runs: tuple[Path, ...] = (),
    /,
    *,
    system: bool = False,
    json: bool = False,
    baseline: Path | None = None,
) -> None:
    """Say what is wrong with a run, since when, and what one can do; or what runs on this machine.

    Exits with 1 where something must be acted on, and with 2 where a folder holds no run.

    Args:
        runs: Folders of runs that sp.watch wrote.
        system: Python, torch, kernels, instruction sets and threads; also where no run is given.
        json: Print the findings as JSON.
        baseline: A run to compare with: was speed bought with quality?
    """
    if system or not runs:
        from sparsight.kernels.system import report

        print(report())
    if runs:
        from sparsight.health.doctor import examine

        sys.exit(examine(runs, baseline=baseline, as_data=json))


def watch(
    runs: Path = Path("runs"), /, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None
) -> None:
    """Serve a page that follows the runs of a folder while they train.

    Args:
        runs: A folder with runs in it, or one run.
        host: Address to listen on. Anything but this machine alone needs a token; one is made up and printed.
        port: 0 takes any that is free.
        token: What a browser has to bring along once; SPARSIGHT_TOKEN does the same.
    """
    from sparsight.report.serve import serve

    serve(runs, host=host, port=port, token=token)


def report(run: Path, /, *, out: Path | None = None) -> None:
    """Write one HTML file about a run: verdict, numbers, findings, charts. It opens without a network.

    Args:
        run: The folder of a run.
        out: Where to; report.html in the run's folder by default.
    """
    from sparsight.report.single import write_report

    print(f"written: {write_report(run, out)}")


def compare(runs: tuple[Path, ...], /, *, out: Path = Path("compare.html")) -> None:
    """Compare runs at equal steps, equal FLOPs and equal time; seeds of one setting count as one.

    Args:
        runs: The folders of two runs or more.
        out: Where the curves go.
    """
    from sparsight.report.compare import write_comparison

    print(write_comparison(runs, out))
    print(f"\nwritten: {out}")


def export(run: Path, /, *, to: Literal["csv", "jsonl"] = "csv", out: Path | None = None) -> None:
    """Write all records of a run as CSV or JSON lines.

    Args:
        run: The folder of a run.
        to: The format. CSV has a line for every number.
        out: Where to; a file in the run's folder by default.
    """
    from sparsight.report.export import export_run

    print(f"written: {export_run(run, to, out)}")


def version() -> None:
    """Print the version of Sparsight, torch and Python."""
    import platform
    from importlib.metadata import version as of

    print(f"sparsight {of('sparsight')}, torch {of('torch')}, Python {platform.python_version()}")


def main() -> None:
    """Entry point of `sparsight`."""
    try:
        import tyro
    except ImportError:
        sys.exit("the command line needs the extra: pip install 'sparsight[app]'")
    try:
        if sys.argv[1:2] == ["train"]:  # its options follow from the recipe that comes next
            train()
        if sys.argv[1:2] == ["study"]:
            study()
        tyro.extras.subcommand_cli_from_dict(
            {
                "demo": demo,
                "train": train,
                "watch": watch,
                "report": report,
                "compare": compare,
                "export": export,
                "bench": bench,
                "doctor": doctor,
                "study": study,
                "version": version,
            },
            prog="sparsight",
            description="Sparse training in PyTorch.",
        )
    except ValueError as error:
        print(f"sparsight: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written to
        print(f"sparsight: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
