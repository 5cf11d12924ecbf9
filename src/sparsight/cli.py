"""The command line (extra `[app]`). Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal


def demo(*, seeds: int = 3, steps: int = 1500, density: float = 0.1) -> None:
    """Train dense, RigL, SET and static networks on digits and compare them.

    Args:
        seeds: How many runs of each.
        steps: Optimizer steps of a run.
        density: Share of the weights that exist in the sparse runs.
    """
    from sparsight.recipes.digits import demo as digits_demo

    digits_demo(seeds=seeds, steps=steps, density=density)


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
        rows, memories = table.run(
            sparsities=sparsities if layers else (), thread_counts=counts, repeats=repeats, say=say
        )
        moe = table.run_moe(thread_counts=counts if mixtures else (), repeats=repeats, say=say)
    print(table.render(rows, memories, moe))
    for path in table.save(rows, memories, out, moe):
        console.print(f"written: {path}")


def doctor(*, system: bool = True) -> None:
    """Say what runs on this machine.

    Args:
        system: Python, torch, kernels, instruction sets and threads; so far the only thing it looks at.
    """
    if not system:
        raise ValueError("doctor: there is nothing but the system to look at so far")
    from sparsight.kernels.system import report

    print(report())


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
        tyro.extras.subcommand_cli_from_dict(
            {"demo": demo, "bench": bench, "doctor": doctor, "version": version},
            prog="sparsight",
            description="Sparse training in PyTorch.",
        )
    except ValueError as error:
        sys.exit(f"sparsight: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
