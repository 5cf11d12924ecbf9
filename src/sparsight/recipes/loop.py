"""The few lines of a training loop that all recipes share."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sparsight as sp
from sparsight import chance


def generator_of(seed: int, what: str, i: int = 0) -> torch.Generator:
    """A generator for one purpose: the data of step i follows from (seed, i) alone."""
    return torch.Generator().manual_seed(chance.mix(seed, what, i) >> 1)


def rows_of(count: int, batch: int, seed: int, i: int) -> Tensor:
    """Which rows step i sees: epoch after epoch, each in its own order, with nothing to remember.

    >>> seen = torch.cat([rows_of(6, 4, 0, i) for i in range(3)])
    >>> seen.bincount().tolist()
    [2, 2, 2, 2, 2, 2]
    """
    first, last = i * batch, (i + 1) * batch
    rows = []
    for epoch in range(first // count, (last - 1) // count + 1):
        rows.append(_order(count, seed, epoch)[max(first - epoch * count, 0) : last - epoch * count])
    return torch.cat(rows)


@lru_cache(maxsize=2)  # the epoch that ends and the one that begins
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator_of(seed, "epoch", epoch))


def learning_rate(peak: float, i: int, steps: int) -> float:
    """Up over the first twentieth, then down on a cosine to a tenth; a function of the step alone.

    >>> [round(learning_rate(1.0, i, 100), 2) for i in (0, 4, 52, 99)]
    [0.2, 1.0, 0.54, 0.1]
    """
    warm = max(steps // 20, 1)
    if i < warm:
        return peak * (i + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (i + 1 - warm) / max(steps - warm, 1)))


def update(model: nn.Module, optimizer: Optimizer, loss: Tensor, lr: float) -> float:
    """One optimizer step on `loss` and the balance losses of the model; returns the loss alone."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad()
    (loss + sp.balance_loss(model)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def adamw(model: nn.Module, lr: float) -> Optimizer:
    """AdamW with weight decay on matrices alone, as is usual for Transformers."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)


def fingerprint(*tensors: Tensor) -> str:
    """Changes when the data does."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().numpy().tobytes(), total)
    return f"{total:08x}"


def check_positive(where: str, **knobs: float) -> None:
    """Refuse knobs that must be positive and are not."""
    for name, value in knobs.items():
        if not value > 0:
            raise ValueError(f"{where}: {name} must be positive, got {value}")
