"""The first thing to try: dense and sparse MLPs on the handwritten digits inside scikit-learn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import sparsight as sp


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8×8 pixels: three quarters to train on, one quarter to test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load_digits() -> Digits:
    """The data set that ships inside scikit-learn, split by a fixed shuffle."""
    from sklearn.datasets import load_digits as load

    images, labels = load(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 4], order[len(x) // 4 :]
    return Digits(x[train], y[train], x[test], y[test])


@dataclass(frozen=True)
class Outcome:
    """What one run ended with."""

    accuracy: float
    weights: int
    flops_ratio: float
    seconds: float


def run(
    data: Digits,
    method: sp.Method | None,
    *,
    density: float = 0.1,
    seed: int = 0,
    steps: int = 1500,
    batch: int = 128,
    width: int = 256,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Outcome:
    """Train an MLP, dense (`method=None`) or sparse, in a loop that knows nothing of sparsity."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    sparse = None
    if method is not None:
        sparse = sp.sparsify(model, optimizer, density=density, method=method, seed=seed)
    order = torch.Generator().manual_seed(seed)
    begin = time.perf_counter()
    for step in range(steps):
        rows = torch.randint(len(data.train_x), (batch,), generator=order)
        loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step, loss.item())
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        right = (model(data.test_x).argmax(1) == data.test_y).double().mean().item()
    weights = sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1)
    if sparse is not None:
        weights = sum(topology.nnz for topology in sparse.topologies.values())
    return Outcome(right, weights, sparse.flops().step_ratio if sparse else 1.0, seconds)


def demo(*, seeds: int = 3, steps: int = 1500, density: float = 0.1) -> None:
    """Dense, RigL, SET and static side by side, with a progress bar and one table at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    if seeds < 1 or steps < 140:
        raise ValueError(f"expected at least 1 seed and 140 steps, got seeds={seeds}, steps={steps}")
    share = f"{100 * (1 - density):g} %"
    contenders: dict[str, sp.Method | None] = {
        "dense": None,
        f"RigL {share}": sp.rigl(steps=steps),
        f"SET {share}": sp.set_(every=100, end=int(0.75 * steps)),
        f"static {share}": sp.static(),
    }
    console = Console()
    data = load_digits()
    console.print(
        f"An MLP 64-256-256-10 on scikit-learn's digits: {steps} steps, {seeds} seeds, "
        f"{len(data.train_x)} images to train on, {len(data.test_x)} to test."
    )
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeRemainingColumn())
    table = Table(title="mean over seeds (± standard deviation)")
    for column in ("", "test accuracy", "existing weights", "training FLOPs / dense", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(contenders) * seeds * steps)
        for name, method in contenders.items():
            outcomes = []
            for seed in range(seeds):

                def show(step: int, loss: float, name: str = name, seed: int = seed) -> None:
                    if step % 50 == 49:
                        progress.update(task, advance=50, description=f"{name} seed {seed} loss {loss:.3f}")

                outcomes.append(run(data, method, density=density, seed=seed, steps=steps, on_step=show))
            table.add_row(name, *_row(outcomes))
    console.print(table)
    console.print(
        "Layers that are large and sparse enough are stored compressed and computed by sparse kernels; "
        "on a network this small most of the time goes elsewhere (`sparsight bench` measures the kernels)."
    )


def _row(outcomes: list[Outcome]) -> list[str]:
    accuracy = [100 * outcome.accuracy for outcome in outcomes]
    spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
    return [
        f"{statistics.mean(accuracy):.2f} ± {spread:.2f} %",
        f"{outcomes[0].weights:,}",
        f"{outcomes[0].flops_ratio:.3f}",
        f"{statistics.mean(outcome.seconds for outcome in outcomes):.1f}",
    ]
