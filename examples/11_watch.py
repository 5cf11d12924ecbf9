"""Watch a mixture of experts collapse, with one line added to the loop.

Two runs that differ in one thing: the second has no balance loss and a router that starts out in favour of
one expert. The loss does not tell which is which. What is recorded beside it does.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import sparsight as sp

EXPERTS, DIM = 8, 16


def build() -> nn.Sequential:
    moe = sp.MoE(DIM, 32, experts=EXPERTS, balance=sp.SwitchLoss(0.05))
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), moe, nn.Linear(DIM, DIM))


def train(run: Path, steps: int, healthy: bool) -> None:
    torch.manual_seed(0)
    model = build()
    if not healthy:
        with torch.no_grad():
            model[0].bias.add_(1.0)
            model[2].router.weight[3] += 2.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    target = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)) / DIM**0.5
    generator = torch.Generator().manual_seed(2)
    table = sp.sinks.CSV(run / "numbers.csv", layers=False)
    with sp.watch(model, optimizer, run, every=10, sinks=[table]) as watch:  # the one line
        for _ in range(steps):
            x = torch.randn(128, DIM, generator=generator)
            losses = (model(x) - (x @ target).sin()).square().mean(-1)
            watch.losses(losses)  # optional: what each expert makes of its tokens
            balance = sp.balance_loss(model)
            optimizer.zero_grad()
            (losses.mean() + (balance if healthy else 0)).backward()
            optimizer.step()
            watch.log(loss=losses.mean())


def show(run: Path) -> None:
    history = sp.load_run(run)
    print(f"\n{run.name}: {history.meta['parameters']:,} parameters, {history.last_step} steps")
    print(f"  loss               {history.get('log/loss').tail(10).values.mean():.3f}")
    print(f"  effective experts  {history.get('moe/effective_experts').last:.1f} of {EXPERTS}")
    print(f"  tokens per expert  {history.get('moe/tokens_per_expert', '2').last.astype(int).tolist()}")
    print(f"  idle for steps     {history.get('moe/idle_steps', '2').last.astype(int).tolist()}")
    print(f"  gradient norms     {history.get('moe/grad_norm', '2').last.round(4).tolist()}")


def main(steps: int = 200) -> None:
    torch.set_num_threads(1)  # layers this small gain nothing from more
    with tempfile.TemporaryDirectory() as folder:
        for name, healthy in (("healthy", True), ("collapsing", False)):
            train(Path(folder) / name, steps, healthy)
            show(Path(folder) / name)
        numbers = (Path(folder) / "healthy" / "numbers.csv").read_text().splitlines()
        print(f"\nnumbers.csv has {len(numbers) - 1} numbers of the whole model; {numbers[1]} is the first")


if __name__ == "__main__":
    main()
