"""The tables of docs/performance.md, from the numbers that `sparsight bench` stored:

python benchmarks/performance_tables.py [benchmarks/results/bench.json]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from sparsight.bench.layers import CONV, LINEAR, ODD

GOALS = {0.8: "2.2", 0.9: "4.5", 0.95: "8", 0.99: "18"}
BLOCK_GOALS = {0.9: "6.5", 0.95: "11"}
BOTH, STEP = "forward+backward", "training step (Adam, RigL)"
Row = dict[str, Any]


def table(head: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def median(row: Row, candidate: str) -> float:
    return float(row["ratios"][candidate]["median"])


def sparsities(rows: list[Row]) -> list[float]:
    return sorted({row["sparsity"] for row in rows})


def threads(rows: list[Row]) -> list[int]:
    return sorted({row["threads"] for row in rows})


def means(rows: list[Row]) -> str:
    """Geometric means over the regular linear shapes, beside the goals."""
    regular = {str(shape) for shape in LINEAR if shape != ODD}
    body = []
    for count in threads(rows):
        for sparsity in sparsities(rows):
            group = [
                row
                for row in rows
                if row["what"] == BOTH
                and row["shape"] in regular
                and (row["threads"], row["sparsity"]) == (count, sparsity)
            ]

            def mean(candidate: str, group: list[Row] = group) -> str:
                logs = [math.log(median(row, candidate)) for row in group]
                return f"{math.exp(sum(logs) / len(logs)):.2f}"

            body.append(
                [
                    str(count),
                    percent(sparsity),
                    mean("compressed"),
                    GOALS.get(sparsity, ""),
                    mean("block 4×1"),
                    mean("block 8×1"),
                    BLOCK_GOALS.get(sparsity, ""),
                    mean("masked"),
                    mean("torch CSR"),
                ]
            )
    head = "threads,sparsity,compressed,goal,blocks 4×1,blocks 8×1,goal,masked,torch CSR"
    return table(head.split(","), body)


def by_shape(rows: list[Row], shapes: list[str]) -> str:
    """The compressed layer alone: a line a shape and number of threads, a column a sparsity."""
    found = {(row["shape"], row["threads"], row["sparsity"]): row for row in rows if row["what"] == BOTH}
    columns = sparsities(rows)
    body = [
        [shape, str(count), *(f"{median(found[shape, count, s], 'compressed'):.2f}" for s in columns)]
        for shape in shapes
        for count in threads(rows)
    ]
    return table(["shape", "threads", *map(percent, columns)], body)


def steps(rows: list[Row], updates: list[dict[str, float]]) -> str:
    """A whole training step, and what the updates take of a run."""
    shares = {(entry["threads"], entry["sparsity"]): entry["share"] for entry in updates}
    body = []
    for row in sorted(
        (row for row in rows if row["what"] == STEP), key=lambda row: (row["threads"], row["sparsity"])
    ):
        body.append(
            [
                str(row["threads"]),
                percent(row["sparsity"]),
                f"{median(row, 'compressed'):.2f}",
                f"{median(row, 'compressed, no updates'):.2f}",
                f"{100 * shares[row['threads'], row['sparsity']]:.1f} %",
                f"{median(row, 'masked'):.2f}",
            ]
        )
    return table(["threads", "sparsity", "with RigL", "without updates", "share of updates", "masked"], body)


def memory(entries: list[dict[str, float]]) -> str:
    """Weights, gradients, optimizer state and topology as a share of dense."""
    body = [[percent(entry["sparsity"]), f"{entry['sparse'] / entry['dense']:.3f}"] for entry in entries]
    return table(["sparsity", "memory / dense"], body)


def main(path: Path) -> None:
    content = json.loads(path.read_text())
    rows = content["rows"]
    print(f"Measured on: {content['machine']}\n")
    print(f"Linear layers, forward + backward, geometric mean:\n\n{means(rows)}\n")
    print(f"By shape, unstructured:\n\n{by_shape(rows, list(map(str, LINEAR)))}\n")
    print(f"Convolution, forward + backward:\n\n{by_shape(rows, list(map(str, CONV)))}\n")
    print(f"A whole training step:\n\n{steps(rows, content['updates'])}\n")
    print(f"Memory:\n\n{memory(content['memory'])}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/bench.json"))
