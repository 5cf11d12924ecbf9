"""A training loop made sparse by two lines: the import, and one call before the loop."""

import torch
from torch import nn

import sparsight as sp
from sparsight.recipes.digits import load_digits


def main(*, steps: int = 600, width: int = 256, density: float = 0.1) -> None:
    torch.manual_seed(0)
    data = load_digits()
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    sparse = sp.sparsify(model, optimizer, density=density, method=sp.rigl(steps=steps, every=50))

    for _ in range(steps):
        rows = torch.randint(len(data.train_x), (128,))
        loss = nn.functional.cross_entropy(model(data.train_x[rows]), data.train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    right = (model(data.test_x).argmax(1) == data.test_y).double().mean()
    print(f"test accuracy {right:.1%} with {density:.0%} of the weights, after {sparse.updates} rewirings\n")
    sparse.summary()


if __name__ == "__main__":
    main()
