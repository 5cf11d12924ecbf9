"""Shifts: what may happen to a model's inputs, experts and routers after training. Each is a few lines.

A shift of the inputs is a function (input, strength, seed) → shifted input, or None where it has no meaning
for this kind of input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Change = Callable[[Tensor, float, int], Tensor | None]


@dataclass(frozen=True)
class InputShift:
    """A change of the inputs and the strengths at which to try it, the mildest first."""

    name: str
    change: Change
    strengths: tuple[float, ...]


@dataclass(frozen=True)
class ExpertOff:
    """Each expert in turn gets no tokens: they go to the next best. In layers of other libraries its output
    is zero instead."""

    name: str = "expert off"


@dataclass(frozen=True)
class RouterNoise:
    """Noise on the router's weights, as a share of their size."""

    name: str = "router noise"
    strengths: tuple[float, ...] = (0.1, 0.3)


Shift = InputShift | ExpertOff | RouterNoise


def _generator(seed: int, like: Tensor) -> torch.Generator:
    return torch.Generator(like.device).manual_seed(seed)


def add_noise(x: Tensor, strength: float, seed: int) -> Tensor | None:
    """Normal noise of `strength` times the inputs' own standard deviation."""
    if not x.is_floating_point():
        return None
    drawn = torch.randn(x.shape, generator=_generator(seed, x), device=x.device, dtype=x.dtype)
    return x + strength * x.std() * drawn


def blur(x: Tensor, strength: float, seed: int) -> Tensor | None:
    """A Gaussian of that many pixels over images [batch, channels, height, width] (or without channels)."""
    if not x.is_floating_point() or x.dim() not in (3, 4) or min(x.shape[-2:]) < 4:
        return None
    images = x if x.dim() == 4 else x[:, None]
    reach = max(1, min(round(3 * strength), min(x.shape[-2:]) - 1))
    at = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    bell = torch.exp(-at.square() / (2 * strength**2))
    bell = bell / bell.sum()
    count = images.shape[1]
    padded = functional.pad(images, (reach,) * 4, mode="replicate")
    rows = functional.conv2d(padded, bell.view(1, 1, 1, -1).expand(count, -1, -1, -1), groups=count)
    both = functional.conv2d(rows, bell.view(1, 1, -1, 1).expand(count, -1, -1, -1), groups=count)
    return both.view(x.shape)


def permute_features(x: Tensor, strength: float, seed: int) -> Tensor | None:
    """A share of the features of the last dimension trade places, the same way for the whole data."""
    if not x.is_floating_point() or x.dim() < 2:
        return None
    width = x.shape[-1]
    count = max(2, round(strength * width))
    if count > width:
        return None
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(width, generator=generator)[:count]
    order = torch.arange(width)
    order[chosen] = chosen.roll(1)  # everyone moves
    return x[..., order.to(x.device)]


def corrupt_tokens(x: Tensor, strength: float, seed: int) -> Tensor | None:
    """A share of the tokens becomes other tokens of the same batch."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        return None
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(x.shape, generator=generator) < strength
    other = x.flatten()[torch.randint(x.numel(), (x.numel(),), generator=generator).to(x.device)]
    return torch.where(hit.to(x.device), other.view(x.shape), x)


DEFAULT: tuple[Shift, ...] = (
    InputShift("noise", add_noise, (0.1, 0.3, 1.0)),
    InputShift("blur", blur, (0.5, 1.0, 2.0)),
    InputShift("feature permutation", permute_features, (0.05, 0.2, 1.0)),
    InputShift("token corruption", corrupt_tokens, (0.05, 0.15, 0.3)),
    RouterNoise(),
    ExpertOff(),
)
"""Those of the inputs that mean something for them, and those of the routed layers there are."""
