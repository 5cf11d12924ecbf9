"""A sample of a parameter's weights, followed over time: how often they have a gradient, how steady it is,
how far a step moves them. A sample of one weight in 256 keeps the memory under two per cent of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsight.dynamics.routes import Part

ONE_IN = 256
AT_LEAST, AT_MOST = 32, 256
_MEMORY = 0.9
"""Share of a running mean that stays at each reading: it looks back over ten readings or so."""


def sample_size(numel: int) -> int:
    """How many weights of a parameter are followed.

    >>> sample_size(10), sample_size(20_000), sample_size(10**6)
    (10, 78, 256)
    """
    return min(numel, max(AT_LEAST, min(AT_MOST, numel // ONE_IN)))


def offsets(numel: int, salt: int) -> Tensor:
    """Which of `numel` weights are followed, sorted: the same ones for equal arguments, at no cost to the
    random numbers of the training."""
    generator = torch.Generator().manual_seed(salt)
    size = sample_size(numel)
    if numel <= size:
        return torch.arange(numel, dtype=torch.int32)
    return torch.randint(numel, (size,), generator=generator).sort().values.to(torch.int32)


@dataclass
class Moments:
    """Running means of a sample's gradients, of their squares, and of whether there is one."""

    mean: Tensor
    square: Tensor
    present: Tensor
    weight: float = 0.0

    def take(self, grad: Tensor | None) -> None:
        """A reading; None is a reading without a gradient."""
        self.weight = _MEMORY * self.weight + 1 - _MEMORY
        self.present.mul_(_MEMORY)
        if grad is None:
            return
        self.present.add_((grad != 0).to(self.present.dtype), alpha=1 - _MEMORY)
        self.mean.lerp_(grad.to(self.mean.dtype), 1 - _MEMORY)
        self.square.lerp_(grad.to(self.square.dtype).square(), 1 - _MEMORY)

    def frequency(self) -> Tensor:
        """For each weight, how often it has had a gradient of late."""
        return (self.present / max(self.weight, 1e-9)).clamp(max=1)  # rounding may go past it

    def signal_and_noise(self) -> tuple[float, float]:
        """Σ mean² and Σ variance of the gradients of late."""
        mean, square = self.mean / max(self.weight, 1e-9), self.square / max(self.weight, 1e-9)
        signal = mean.square()
        return float(signal.sum()), float((square - signal).clamp_min(0).sum())


class Sample:
    """Weights of one parameter, or of an expert's slice of it, that are followed."""

    def __init__(self, part: Part, salt: int, existing: Callable[[Tensor], Tensor] | None = None) -> None:
        self.part = part
        self._salt = salt
        self._existing = existing
        """Turns numbers of existing weights into places in the parameter, where some places are masked."""
        self.renew(None)

    def renew(self, count: int | None) -> None:
        """Choose anew, from `count` existing weights: after a rewiring another weight is in the place."""
        param = self.part.param
        total = self.part.numel
        picked = offsets(total if count is None else count, self._salt)
        if self._existing is not None and count is not None:
            picked = self._existing(picked)
        base = 0 if self.part.index is None else self.part.index * total
        self.at = (picked + base).to(param.device)
        self.before: Tensor | None = None
        zeros = torch.zeros(len(picked), device=param.device)
        self.moments = Moments(zeros, zeros.clone(), zeros.clone())

    def weights(self) -> Tensor:
        """Their values now."""
        return self.part.param.detach().reshape(-1).index_select(0, self.at)

    def gradient(self) -> Tensor | None:
        """Their gradients now."""
        grad = self.part.param.grad
        return None if grad is None else grad.reshape(-1).index_select(0, self.at)

    def moved(self) -> float:
        """Mean |Δw| since `before` was taken."""
        if self.before is None or not len(self.at):
            return 0.0
        return float((self.weights() - self.before).abs().mean())


def squared_norm(part: Part) -> Tensor | None:
    """Σ g² of a part."""
    grad = part.param.grad
    if grad is None:
        return None
    return part.cut(grad).float().square().sum()
