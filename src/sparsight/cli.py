"""The command line (extra `[app]`). Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys


def demo(*, seeds: int = 3, steps: int = 1500, density: float = 0.1) -> None:
    """Train dense, RigL, SET and static networks on digits and compare them.

    Args:
        seeds: How many runs of each.
        steps: Optimizer steps of a run.
        density: Share of the weights that exist in the sparse runs.
    """
    from sparsight.recipes.digits import demo as digits_demo

    digits_demo(seeds=seeds, steps=steps, density=density)


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
            {"demo": demo, "version": version},
            prog="sparsight",
            description="Sparse training in PyTorch.",
        )
    except ValueError as error:
        sys.exit(f"sparsight: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
