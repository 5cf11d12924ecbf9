"""Random numbers as a function of a seed and a position.

Nothing is drawn from a stream, so a result does not depend on the device, the storage, the number of
threads or how a layer is cut into blocks, and a resumed run needs no generator state.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _finalise(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def mix(seed: int, *parts: int | str) -> int:
    """A 64-bit seed for one purpose: `mix(seed, layer, update)`."""
    state = _finalise((seed + _GOLDEN) & _MASK)
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = _finalise((state + _GOLDEN * (number + 1)) & _MASK)
    return state


def _shift_right(x: Tensor, by: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return (x >> by) & ((1 << (64 - by)) - 1)


def hashes(positions: Tensor, seed: int) -> Tensor:
    """splitmix64 of each position, as int64 whose signed order is the unsigned order of the hash."""
    x = positions + _signed((seed * _GOLDEN) & _MASK)
    x = (x ^ _shift_right(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift_right(x, 27)) * _signed(_SECOND)
    return (x ^ _shift_right(x, 31)) ^ _signed(1 << 63)


def uniform(positions: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each position, float64.

    >>> uniform(torch.arange(3), seed=1).tolist() == uniform(torch.arange(3), seed=1).tolist()
    True
    """
    return _shift_right(hashes(positions, seed), 11).double() * 2.0**-53


def normal(count: int, seed: int) -> Tensor:
    """`count` standard normal numbers, float32."""
    generator = torch.Generator().manual_seed(seed & ((1 << 63) - 1))
    return torch.randn(count, generator=generator)
