"""Small models, loops and readers that the tests of this folder share."""

import numpy as np
import torch
from torch import Tensor, nn

import sparsight as sp
from sparsight.dynamics.history import History


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
    """One step for each batch, on a loss that every parameter feels."""
    for x in batches:
        optimizer.zero_grad()
        (model(x).square().mean() + sp.balance_loss(model)).backward()
        optimizer.step()


def batches(steps: int, *shape: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(steps)]


def recorded(watch: sp.Watch) -> History:
    """What the run holds now."""
    assert watch.store is not None
    watch.store.flush()
    return sp.load_run(watch.run)


def entropy(p: np.ndarray) -> np.ndarray:
    """Along the last axis, in nats."""
    safe = np.where(p > 0, p, 1)
    return -(p * np.log(safe)).sum(-1)


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
