"""Geometric means of linear layers alone, forward + backward: a minute where `sparsight bench` takes twenty.

Run `python benchmarks/quick_layers.py` with nothing else running. The same shapes, timing and dense baseline,
without masked layers, torch CSR, convolutions and training steps.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from sparsight.bench.layers import LINEAR, ODD, LinearShape, both_ways, sparsified
from sparsight.bench.measure import by_turns, ratio, threads
from sparsight.dst.summary import text_table

BLOCKS = {"compressed": None, "blocks 8×1": (8, 1)}


def measure(shape: LinearShape, sparsity: float, repeats: int = 11) -> dict[str, float]:
    """How many times faster than dense."""
    torch.manual_seed(0)
    dense = nn.Linear(shape.inputs, shape.outputs)
    x = torch.randn(shape.batch, shape.inputs)
    calls = {"dense": both_ways(dense, x)}
    for name, block in BLOCKS.items():
        if block is None or shape.outputs % block[0] == 0:
            calls[name] = both_ways(sparsified(dense, "compressed", sparsity, block), x)
    times = by_turns(calls, repeats=repeats)
    return {name: ratio(times["dense"], times[name]).median for name in calls if name != "dense"}


def main() -> None:
    rows = []
    odd = []
    for count in dict.fromkeys((1, torch.get_num_threads())):
        with threads(count):
            for sparsity in (0.8, 0.9, 0.95, 0.99):
                found = [measure(shape, sparsity) for shape in LINEAR if shape != ODD]
                means = [f"{statistics.geometric_mean(f[name] for f in found):.2f}" for name in BLOCKS]
                rows.append([f"{100 * sparsity:g} %", str(count), *means])
            odd.append(f"{ODD}, {count} thread(s), 80 %: {measure(ODD, 0.8)['compressed']:.2f}")
    print(text_table(["sparsity", "threads", *BLOCKS], rows))
    print("\n".join(odd))


if __name__ == "__main__":
    main()
