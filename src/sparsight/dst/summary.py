"""The table that `Sparsifier.summary()` prints. Plain text: the core depends on torch and numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparsight.dst.flops import Flops

if TYPE_CHECKING:
    from sparsight.dst.sparsifier import Sparsifier


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first to the left, the others to the right.

    >>> print(text_table(["layer", "n"], [["fc1", "10"]]))
    layer   n
    ─────  ──
    fc1    10
    """
    lines = [list(head), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def show(line: Sequence[str]) -> str:
        first = line[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([show(head), rule, *[show(row).rstrip() for row in rows]])


def big(number: float) -> str:
    """A large number in three digits.

    >>> big(1234), big(25_600_000), big(12)
    ('1.23k', '25.6M', '12')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def summary_table(sparse: Sparsifier, flops: Flops) -> str:
    """One row a layer, and two lines on the whole."""
    rows = [
        [
            name,
            "×".join(map(str, layer.topology.shape)),
            f"{layer.topology.nnz:,} / {layer.topology.size:,}",
            f"{layer.topology.density:.4f}",
            big(flops.layers[name]),
            layer.weight.storage + ("" if layer.trains else ", frozen"),
            layer.why,
        ]
        for name, layer in sparse.layers.items()
    ]
    step = "unknown" if math.isnan(flops.step_ratio) else f"{flops.step_ratio:.3f}"
    table = text_table(["layer", "shape", "weights", "density", "FLOPs", "storage", "because"], rows)
    return (
        f"{table}\n"
        f"{sparse.method.name}: density {sparse.density:.4f} of the sparse layers, step {sparse.step}, "
        f"{sparse.updates} updates\n"
        f"whole model: forward {flops.forward_ratio:.3f} and training step {step} of the dense FLOPs"
    )
