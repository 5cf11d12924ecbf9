"""What watching costs: step time with `sp.watch(every=10)` over step time without, and the memory it holds.

Run `python benchmarks/watch.py` with nothing else running. Two trainings, each three times in one process:
alone, watched, watched and managed, ten steps of each by turns, so that a slow moment meets all of them.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import sparsight as sp
from sparsight.dst.summary import text_table
from sparsight.recipes.knobs import Paths
from sparsight.recipes.language import language

EVERY, TURNS = 10, 30

Loop = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], float]]


def rigl_mlp() -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.Adam(model.parameters())
    sp.sparsify(model, optimizer, density=0.1, method=sp.rigl(steps=100_000))
    x, y = torch.randn(128, 784), torch.randint(10, (128,))

    def step(i: int) -> float:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return model, optimizer, step


def moe_language() -> Loop:
    training = language(characters=200_000, steps=10_000, paths=Paths(experts=8))
    return training.model, training.optimizer, lambda i: training.step(i)["loss"]


def measure(make: Callable[[], Loop], turns: int) -> list[str]:
    """Step time alone in ms, and the ratios watched / alone, managed / alone."""
    loops = [make() for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched, managed = (
            sp.watch(*loop[:2], Path(folder) / name, every=EVERY)
            for loop, name in zip(loops[1:], ("watched", "managed"), strict=True)
        )
        sp.manage(managed)
        watches = (None, watched, managed)
        times: list[list[float]] = [[], [], []]
        for turn in range(turns + 2):
            for which, (_, _, step) in enumerate(loops):
                watch = watches[which]
                begin = time.perf_counter()
                for i in range(EVERY):
                    loss = step(turn * EVERY + i)
                    if watch is not None:
                        watch.log(loss=loss)
                if turn >= 2:  # the first turns warm up
                    times[which].append(time.perf_counter() - begin)
        watched.close()
        managed.close()
    ratios = [statistics.median(b / a for a, b in zip(times[0], t, strict=True)) for t in times[1:]]
    return [f"{1000 * statistics.median(times[0]) / EVERY:.2f}", *(f"{ratio:.3f}" for ratio in ratios)]


def memory(make: Callable[[], Loop]) -> list[str]:
    """What a watch holds in kB, and as a share of the weights and of all that training holds."""
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer, step = make()
        with sp.watch(model, optimizer, Path(folder) / "first", every=EVERY):
            for i in range(2 * EVERY):
                step(i)  # whatever is loaded or made once is not held by a watch
        gc.collect()
        tracemalloc.start()
        watch = sp.watch(model, optimizer, Path(folder) / "second", every=EVERY)
        for i in range(2 * EVERY):
            step(i)
        assert watch.store is not None
        watch.store.flush()  # records on their way to the disk are not held for long
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        watch.close()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    slots = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    training = 2 * weights + sum(t.numel() * t.element_size() for t in slots)
    return [f"{held / 1000:.0f}", f"{100 * held / weights:.1f} %", f"{100 * held / training:.1f} %"]


def main() -> None:
    rows = []
    for name, make, turns in (("RigL MLP, 90 %", rigl_mlp, 60), ("MoE language model", moe_language, TURNS)):
        rows.append([name, *measure(make, turns), *memory(make)])
    head = ["", "ms a step", "watched", "and managed", "kB held", "of the weights", "of training"]
    print(text_table(head, rows))


if __name__ == "__main__":
    main()
