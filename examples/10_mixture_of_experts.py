"""A mixture of experts that learns to give each kind of token an expert of its own.

Four kinds of tokens, each with its own rule for the answer. One small expert cannot learn four rules; four
experts can, if the router finds out which token needs which. Plain top-1 keeps half of the router's
gradient, SparseMixer estimates the other half. On a task this clear both find the kinds.
"""

import torch
from torch import nn

import sparsight as sp

KINDS, DIM = 4, 16


def tokens(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, answers and kinds: the kind is in the first numbers, its rule is a random matrix."""
    rules = torch.randn(KINDS, DIM, DIM, generator=torch.Generator().manual_seed(0)) / DIM**0.5
    kind = torch.randint(KINDS, (count,), generator=generator)
    x = torch.randn(count, DIM, generator=generator)
    x[:, :KINDS] = 2.0 * nn.functional.one_hot(kind, KINDS)
    return x, torch.einsum("td,tde->te", x, rules[kind]), kind


def train(name: str, estimator: sp.GatingOnly | sp.Quadrature, steps: int) -> float:
    torch.manual_seed(1)
    model = sp.MoE(
        dim=DIM,
        hidden=32,
        experts=KINDS,
        estimator=estimator,
        balance=[sp.SwitchLoss(0.01), sp.ZLoss(1e-3)],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sp.follow_steps(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x, target, _ = tokens(256, generator)
        loss = (model(x) - target).square().mean() + sp.balance_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model.eval()
    with torch.no_grad():
        x, target, kind = tokens(2048, generator)
        error = (model(x) - target).square().mean().item()
    table = torch.zeros(KINDS, KINDS, dtype=torch.int64)
    table.index_put_((kind, model.routing.expert), torch.ones_like(kind), accumulate=True)
    print(f"{name}: error {error:.3f}; tokens of each kind (rows) by expert (columns):")
    print(table)
    return error


def main(steps: int = 300) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    variance = tokens(2048, torch.Generator().manual_seed(3))[1].var().item()
    print(f"answers have variance {variance:.3f}")
    train("plain top-1", sp.GatingOnly(), steps)
    train("SparseMixer", sp.SparseMixer(), steps)


if __name__ == "__main__":
    main()
