"""What is known about a run besides its numbers: versions, seed, code, machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

import torch


def about_run() -> dict[str, Any]:
    """Versions, seed, the commit of the working folder, and the machine.

    >>> sorted(about_run()["versions"])
    ['numpy', 'python', 'sparsight', 'torch']
    """
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sparsight", "torch", "numpy")},
        },
        "seed": torch.initial_seed(),
        "git": _commit(),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "command": " ".join(sys.argv),
        "started": time.time(),
    }


def _commit() -> str | None:
    """The commit that is checked out, with a + where files differ from it; None outside a repository."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None if told.returncode == 0 else None
