"""Sparse after training, for comparison: pruning with fine-tuning, and a lottery ticket.

Both call a training function that is yours.
"""

import torch
from torch import nn

import sparsight as sp
from sparsight.recipes.digits import load_digits


def main(*, steps: int = 150, width: int = 64, density: float = 0.1, rate: float = 0.5) -> None:
    data = load_digits()
    trained_steps = 0

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def train(
        model: nn.Module, sparse: sp.Sparsifier | None, start: int = 0, stop: int | None = None
    ) -> None:
        nonlocal trained_steps
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        if sparse is not None:
            sparse.attach(optimizer)
        for step in range(start, steps if stop is None else stop):
            batch = torch.Generator().manual_seed(step)
            rows = torch.randint(len(data.train_x), (128,), generator=batch)
            loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained_steps += 1

    def report(what: str, model: nn.Module) -> None:
        nonlocal trained_steps
        right = (model(data.test_x).argmax(1) == data.test_y).double().mean()
        weights = sum(int(p.count_nonzero()) for p in model.parameters() if p.dim() > 1)
        print(f"{what:<34} test accuracy {right:6.1%}   weights {weights:>6,}   steps {trained_steps:>5}")
        trained_steps = 0

    model = make()
    train(model, None)
    report("dense", model)
    sp.prune(model, density)
    report("  pruned in one shot", model)

    model = make()
    train(model, None)
    sp.prune(model, density, fine_tune=lambda sparse: train(model, sparse), rounds=3)
    report("pruned in 3 rounds, fine-tuned", model)

    model = make()
    sp.lottery_ticket(
        model,
        lambda sparse, start, stop: train(model, sparse, start, stop),
        density,
        rate=rate,
        rewind=steps // 10,
    )
    report("lottery ticket, rewound", model)

    # Sparse from the start, for as many steps as pruning took in all.
    model = make()
    method = sp.rigl(steps=4 * steps, every=max(steps // 5, 1))
    train(model, sp.sparsify(model, density=density, method=method), stop=4 * steps)
    report("RigL, never dense", model)


if __name__ == "__main__":
    main()
