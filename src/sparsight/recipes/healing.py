"""A mixture of experts that can be made to collapse: for showing that it is caught and healed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.recipes.loop import generator_of
from sparsight.recipes.training import Tap, Training

KINDS, DIM, BATCH = 4, 12, 128


def _tokens(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four kinds of tokens, each with its own rule for the answer; the last input is always 1."""
    rules = torch.randn(KINDS, DIM, DIM, generator=generator_of(0, "rules")) / DIM**0.5
    kind = torch.randint(KINDS, (count,), generator=generator)
    x = torch.randn(count, DIM, generator=generator)
    x[:, :KINDS] = 2.0 * nn.functional.one_hot(kind, KINDS)
    x[:, -1] = 1.0
    return x, torch.einsum("td,tde->te", x, rules[kind])


def kinds(*, sick: bool, steps: int = 500, seed: int = 1) -> Training:
    """Four experts for four kinds of tokens. `sick` begins with a router that sends every token to expert 0,
    and without a balance loss to stop it."""
    torch.manual_seed(seed)
    balance = sp.SwitchLoss(0.0 if sick else 0.05)
    model = sp.MoE(DIM, hidden=DIM, experts=KINDS, balance=balance, name="experts")
    if sick:
        with torch.no_grad():
            model.router.get_parameter("weight")[0, -1] = 8.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tap = Tap()

    def step(i: int) -> Mapping[str, float]:
        x, target = _tokens(BATCH, generator_of(seed, "tokens", i))
        losses = (model(x) - target).square().mean(-1)
        tap(losses.detach())
        optimizer.zero_grad()
        (losses.mean() + sp.balance_loss(model)).backward()
        optimizer.step()
        return {"loss": float(losses.detach().mean())}

    def evaluate() -> Mapping[str, float]:
        x, target = _tokens(4096, generator_of(0, "test"))
        return {"explained": 1 - float((model(x) - target).square().mean() / target.var())}

    return Training(model, optimizer, steps, step, evaluate, {}, tap, main="explained")
