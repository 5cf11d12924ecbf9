"""What row blocks cost in accuracy: RigL free, in blocks of 4 and of 8 rows, on Fashion-MNIST.

Run with SPARSIGHT_DATA set: python benchmarks/block_accuracy.py
"""

import statistics

import torch
from torch import nn

import sparsight as sp
from sparsight.dst.summary import text_table
from sparsight.recipes.data import images

BATCH, EPOCHS, SEEDS = 128, 2, 3


def accuracy(data, sparsity: float, rows: int, seed: int) -> float:
    train_x, train_y, test_x, test_y = data
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = EPOCHS * (len(train_x) // BATCH)
    if sparsity:
        method = sp.rigl(steps=steps) if rows == 1 else sp.block(rows, 1, steps=steps)
        sp.sparsify(
            model, optimizer, density=1 - sparsity, method=method, keep_dense=["4"], seed=seed,
            distribution=sp.uniform(first_dense=False),
        )  # fmt: skip
    order = torch.Generator().manual_seed(seed)
    for step in range(steps):
        if step % (len(train_x) // BATCH) == 0:
            shuffled = torch.randperm(len(train_x), generator=order)
        at = step % (len(train_x) // BATCH) * BATCH
        rows_now = shuffled[at : at + BATCH]
        loss = nn.functional.cross_entropy(model(train_x[rows_now]), train_y[rows_now])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) == test_y).double().mean().item()


def main() -> None:
    train_x, train_y, test_x, test_y = images("fashion-mnist")
    data = (train_x.flatten(1), train_y, test_x.flatten(1), test_y)
    table = []
    for sparsity, rows in [(0.0, 1)] + [(s, r) for s in (0.9, 0.95, 0.98) for r in (1, 4, 8)]:
        found = [accuracy(data, sparsity, rows, seed) for seed in range(SEEDS)]
        name = "dense" if not sparsity else "free" if rows == 1 else f"blocks of {rows}×1"
        spread = statistics.stdev(found)
        table.append([f"{100 * sparsity:g} %", name, f"{statistics.mean(found):.2f} ± {spread:.2f} %"])
        print(*table[-1], flush=True)
    print(f"\nFashion-MNIST, MLP 784-512-512-10, {EPOCHS} epochs, {SEEDS} seeds:")
    print(text_table(["sparsity", "structure", "test accuracy"], table))


if __name__ == "__main__":
    main()
