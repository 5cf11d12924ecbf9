"""Stop a run, save it, load it into fresh objects, go on: the weights are the same to the last bit."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import sparsight as sp


def build(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, sp.Sparsifier]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method = sp.rigl(steps=steps, every=max(steps // 20, 1))
    return model, optimizer, sp.sparsify(model, optimizer, density=0.1, method=method)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        batch = torch.Generator().manual_seed(step)  # the data of a step depends on its number alone
        x, y = torch.randn(64, 32, generator=batch), torch.randint(8, (64,), generator=batch)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(*, steps: int = 400) -> None:
    model, optimizer, sparse = build(steps)
    train(model, optimizer, 0, steps)

    half, half_optimizer, half_sparse = build(steps)
    train(half, half_optimizer, 0, steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        parts = {"model": half, "optimizer": half_optimizer, "sparse": half_sparse}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        print(f"stopped at {half_sparse}, {file.stat().st_size / 1024:.0f} KiB")
        saved = torch.load(file)

    resumed, resumed_optimizer, resumed_sparse = build(steps)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    resumed_sparse.load_state_dict(saved["sparse"])
    train(resumed, resumed_optimizer, steps // 2, steps)

    weights = all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    after = resumed_sparse.topologies
    topologies = all(topology.same_as(after[name]) for name, topology in sparse.topologies.items())
    print(f"resumed to {resumed_sparse}")
    print(f"same weights: {weights}, same topologies: {topologies}, updates: {resumed_sparse.updates}")


if __name__ == "__main__":
    main()
