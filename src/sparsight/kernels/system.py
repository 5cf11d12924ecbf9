"""What the kernels find on this machine, in words."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from sparsight.kernels import native


def openmp_runtimes() -> list[str]:
    """The OpenMP libraries in this process; more than one means two pools of threads."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(Path(p).name for p in paths if any(s in p for s in ("libgomp", "libomp", "libiomp")))


def report() -> str:
    """A line a fact."""
    lines = [
        f"Python   {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch    {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
    ]
    if native.available():
        offered = [name for name in native.INSTRUCTION_SETS if native.isa_available(name)]
        lines += [
            f"kernels  native, running {native.isa()}; this machine has {', '.join(offered)}",
            f"OpenMP   {', '.join(openmp_runtimes()) or 'unknown'} (shared with torch when it is one)",
        ]
    else:
        lines += [f"kernels  torch reference only: {native.why_unavailable()}"]
    return "\n".join(lines)
