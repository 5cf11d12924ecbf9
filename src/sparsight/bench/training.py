"""A whole training step of an MLP, updates included, and what its weights take in memory."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

import sparsight as sp
from sparsight.bench.layers import Row
from sparsight.bench.measure import by_turns, ratio
from sparsight.nn.compressed import CompressedWeight

SIZES = (784, 1024, 1024, 10)
BATCH = 128


class _Run:
    """A model, its optimizer and one batch; `step` is zero_grad, forward, backward, Adam step."""

    def __init__(
        self, sparsity: float | None, storage: str = "compressed", every: int = 100, steps: int = 10**9
    ) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(SIZES):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.sparse = None
        if sparsity is not None:
            self.sparse = sp.sparsify(
                self.model,
                self.optimizer,
                density=1 - sparsity,
                method=sp.rigl(steps=steps, every=every) if every else sp.static(),
                storage=storage,  # type: ignore[arg-type]
            )
        self.x, self.y = torch.randn(BATCH, SIZES[0]), torch.randint(SIZES[-1], (BATCH,))

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def period(self) -> None:
        """A hundred steps: one RigL update among them."""
        for _ in range(100):
            self.step()


def step_row(sparsity: float, threads: int, *, repeats: int) -> Row:
    """A hundred steps, one of them a RigL update, against a hundred dense ones."""
    runs = {
        "dense": _Run(None),
        "compressed": _Run(sparsity),
        "compressed, no updates": _Run(sparsity, every=0),
        "masked": _Run(sparsity, "masked"),
    }
    times = by_turns({name: run.period for name, run in runs.items()}, repeats=repeats, seconds=0)
    ratios = {name: ratio(times["dense"], own) for name, own in times.items() if name != "dense"}
    shape = "-".join(map(str, SIZES)) + f" B{BATCH}"
    return Row("training step (Adam, RigL)", shape, sparsity, threads, ratios)


@dataclass(frozen=True)
class Updates:
    """What RigL's updates take of the time of a whole run, cosine and all."""

    sparsity: float
    threads: int
    share: float
    steps_an_update: float
    """How many ordinary steps the first update, with the largest drop fraction, costs beside its own."""


def updates(sparsity: float, threads: int, *, steps: int = 1000, every: int = 100) -> Updates:
    """One run, every step on the clock: an update costs what its step takes beyond an ordinary one."""
    run = _Run(sparsity, every=every, steps=steps)
    assert run.sparse is not None
    run.step()  # the first step makes the optimizer's state
    moved: list[str] = []
    run.sparse.register_update_hook(lambda layer, _: moved.append(layer.name))
    ordinary: list[float] = []
    due: list[float] = []
    for _ in range(steps - 1):
        moved.clear()
        begin = time.perf_counter()
        run.step()
        (due if moved else ordinary).append(time.perf_counter() - begin)
    usual = statistics.median(ordinary)
    extra = [taken - usual for taken in due]
    return Updates(sparsity, threads, sum(extra) / (sum(ordinary) + sum(due)), extra[0] / usual)


@dataclass(frozen=True)
class Memory:
    """Bytes of weights, gradients, Adam state and topology, and the same for the dense model."""

    sparsity: float
    sparse: int
    dense: int

    @property
    def share(self) -> float:
        """Of the dense model's bytes."""
        return self.sparse / self.dense


def memory(sparsity: float) -> Memory:
    """Counted after a step, when everything is there. Biases count on both sides."""
    runs = [_Run(None), _Run(sparsity)]
    for run in runs:
        run.step()
    dense, sparse = (_bytes(run) for run in runs)
    return Memory(sparsity, sparse, dense)


def _bytes(run: _Run) -> int:
    total = 0
    for param in run.model.parameters():
        tensors = [param, param.grad, *run.optimizer.state[param].values()]
        total += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    if run.sparse is not None:
        for layer in run.sparse.layers.values():
            total += layer.explored.bits.numel()
            if isinstance(layer.weight, CompressedWeight):
                total += layer.weight.index_bytes()
    return total
