"""A small training that a page can follow: python -m tests.report.training RUN FLAG

It goes on until it is ended; when the file FLAG appears, a finding is recorded.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import sparsight as sp
from sparsight.dynamics.records import Event


def main(run: str, flag: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), sp.MoE(32, 32, experts=4), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sparse = sp.sparsify(model, optimizer, density=0.5, method=sp.rigl(steps=2000, every=20))
    assert sparse is not None
    truth = torch.randn(16, 4)
    with sp.watch(model, optimizer, run, every=5) as watch:
        watch.store.patience = 0.2
        found = False
        while True:
            x = torch.randn(64, 16)
            y = (x @ truth).argmax(1)
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            (loss + sp.balance_loss(model)).backward()
            optimizer.step()
            watch.log(loss=loss, accuracy=(out.argmax(1) == y).float().mean())
            if flag.exists() and not found:
                found = True
                said = "Expert 3 has had no token for 100 steps."
                watch.event(Event(watch.step, "finding", "dead_experts", "act", "2", said))
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
