"""A method is a sentence: drop by this, grow by that, this much, at these steps. Here is a new one.

The data depends on 8 of 64 inputs. A good method finds them.
"""

import torch
from torch import Tensor, nn

import sparsight as sp

USEFUL = 8


def taylor(view: sp.LayerView) -> Tensor:
    """Drop where |w·g| is small: one number for each existing weight, higher is better."""
    assert view.grad is not None
    return (view.values * view.grad).abs()


def gradient_with_noise(view: sp.LayerView) -> Tensor:
    """Grow by |gradient| times a little chance: one number for each position."""
    return sp.criteria.gradient(view) * (0.5 + sp.criteria.random(view))


def share_on_useful(sparse: sp.Sparsifier) -> float:
    return float((sparse.topologies["0"].col < USEFUL).double().mean())


def main(*, steps: int = 400, density: float = 0.1) -> None:
    every, last = max(steps // 20, 1), int(0.75 * steps)
    mine = sp.Method(
        "taylor",
        drop=taylor,
        grow=gradient_with_noise,
        fraction=sp.linear(0.3, end=last),
        due=sp.every(every, end=last),
        gradient="due",
        replaces_step=True,
    )
    methods = [sp.static(), sp.set_(every=every, end=last), sp.rigl(steps=steps, every=every), mine]
    print(f"{USEFUL} of 64 inputs matter; {USEFUL / 64:.1%} of the first layer's weights by chance\n")
    for method in methods:
        torch.manual_seed(0)
        teacher = torch.randn(USEFUL, 4)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        sparse = sp.sparsify(model, optimizer, density=density, method=method)
        at_first = share_on_useful(sparse)
        for _ in range(steps):
            x = torch.randn(128, 64)
            loss = nn.functional.cross_entropy(model(x), (x[:, :USEFUL] @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(
            f"{method.name:<8} weights on useful inputs {at_first:.0%} -> {share_on_useful(sparse):.0%}   "
            f"loss {loss.item():.3f}   {sparse.updates} updates"
        )


if __name__ == "__main__":
    main()
