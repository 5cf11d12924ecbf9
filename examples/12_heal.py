"""A mixture of experts that collapses, is caught, and is healed while it trains.

Three runs that differ in two things. The second and third begin with a router that sends every token to one
expert, and without a balance loss to stop it. The third is managed with act=True: what is wrong is found and
acted on, every action is recorded, and the run ends about as well as the healthy one.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics.history import History

KINDS, DIM = 4, 12


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and all that was recorded of it."""

    name: str
    quality: float
    """1 − error²/variance on fresh tokens."""
    history: History


def tokens(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Four kinds of tokens, each with its own rule for the answer; the last input is always 1."""
    rules = torch.randn(KINDS, DIM, DIM, generator=torch.Generator().manual_seed(0)) / DIM**0.5
    kind = torch.randint(KINDS, (count,), generator=generator)
    x = torch.randn(count, DIM, generator=generator)
    x[:, :KINDS] = 2.0 * nn.functional.one_hot(kind, KINDS)
    x[:, -1] = 1.0
    return x, torch.einsum("td,tde->te", x, rules[kind])


def train(name: str, folder: Path, steps: int, *, sick: bool, act: bool) -> Outcome:
    torch.manual_seed(1)
    model = sp.MoE(DIM, hidden=12, experts=KINDS, balance=sp.SwitchLoss(0.0 if sick else 0.05))
    if sick:
        with torch.no_grad():
            model.router.weight[0, -1] = 8.0  # expert 0 wins every token
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(2)
    with sp.watch(model, optimizer, folder / name) as watch:
        sp.manage(watch, act=act)  # the one line; without act=True it says what it would do
        for _ in range(steps):
            x, target = tokens(128, generator)
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            (loss + sp.balance_loss(model)).backward()
            optimizer.step()
            watch.log(loss=loss)
    model.eval()
    with torch.no_grad():
        x, target = tokens(4096, torch.Generator().manual_seed(3))
        quality = 1 - float((model(x) - target).square().mean() / target.var())
    return Outcome(name, quality, sp.load_run(folder / name))


def heal(folder: Path, steps: int = 500) -> list[Outcome]:
    """The healthy run, the sick one, and the sick one healed."""
    return [
        train("healthy", folder, steps, sick=False, act=False),
        train("sick", folder, steps, sick=True, act=False),
        train("healed", folder, steps, sick=True, act=True),
    ]


def main(steps: int = 500) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    with tempfile.TemporaryDirectory() as folder:
        healthy, sick, healed = heal(Path(folder), steps)
    print("what happened to the one that was healed:")
    for event in healed.history.events:
        print(f"  step {event.step:>3}  {event.kind:<7}  {event.message}")
    for run in (healthy, sick, healed):
        used = run.history.get("moe/effective_experts", "model").values
        told = f"effective experts {used[0]:.1f} -> {used[-1]:.1f} of {KINDS}"
        print(f"{run.name:<8} quality {run.quality:.3f}, {told}")


if __name__ == "__main__":
    main()
