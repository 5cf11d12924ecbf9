"""The first thing to try: dense and sparse MLPs on the handwritten digits inside scikit-learn."""

from __future__ import annotations

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
