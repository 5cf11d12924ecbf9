"""Scratch memory that is used again instead of being allocated anew.

A large buffer that is freed goes back to the operating system, and its pages have to be zeroed and mapped
again at the next step. For a mixture of experts that costs as much as a third of the step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_SMALL = 1 << 16
_STEP = 1 << 14

Chunk = np.ndarray[Any, Any]


class Pool:
    """Hands out uninitialised tensors and takes their memory back once nobody holds it any more.

    Every tensor gets a storage of its own over a recycled chunk, and the chunk returns when that storage
    dies. So a tensor may be kept for as long as anyone likes: saved for a backward pass, aliased, or left
    in `param.grad`. Layers that share a pool share their scratch memory. Only CPU memory is pooled; other
    devices have caching allocators.

    >>> pool = Pool()
    >>> first = pool.empty((64, 1024), torch.float32, torch.device("cpu"))
    >>> address = first.data_ptr()
    >>> del first
    >>> pool.empty((64, 1024), torch.float32, torch.device("cpu")).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Chunk]] = {}
        self._lent: dict[int, tuple[weakref.ref[Chunk], Chunk]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `torch.empty`."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL or device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        chunk = self._take(-(-size // _STEP) * _STEP)
        view = chunk[:size]
        # The storage holds `view` and nothing else does: when `view` dies, so has every alias.
        ref = weakref.ref(view, self._returned)
        self._lent[id(ref)] = ref, chunk
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def several(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Tensors side by side in one piece of memory: one request instead of many."""
        return carve(self.empty((room_for(shapes),), dtype, device), shapes)

    @property
    def waiting(self) -> int:
        """Bytes that are held for the next request."""
        return sum(size * len(chunks) for size, chunks in self._free.items())

    def _returned(self, ref: weakref.ref[Chunk]) -> None:
        chunk = self._lent.pop(id(ref))[1]
        self._free.setdefault(chunk.nbytes, []).append(chunk)

    def _take(self, size: int) -> Chunk:
        same = self._free.get(size)
        if same:
            return same.pop()
        near = [s for s, chunks in self._free.items() if chunks and size <= s <= 2 * size]
        if near:
            return self._free[min(near)].pop()
        # A request that finds nothing replaces the next smaller chunk, so that growing batches do not pile
        # up chunks. A larger one stays: it is some other buffer's, and costly to map again.
        smaller = [s for s, chunks in self._free.items() if chunks and s < size]
        if smaller:
            self._free[max(smaller)].pop()
        raw = np.empty(size + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + size]

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return Pool()

    def __reduce__(self) -> tuple[type[Pool], tuple[()]]:
        return Pool, ()


def _padded(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) // _ALIGN) * _ALIGN


def room_for(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many elements tensors of these shapes take side by side.

    >>> room_for([(2, 3), (65,)])
    192
    """
    return sum(_padded(shape) for shape in shapes)


def carve(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Tensors of these shapes, side by side in one piece of memory."""
    parts = memory.split([_padded(shape) for shape in shapes])
    return [part[: math.prod(s)].view(s) for part, s in zip(parts, shapes, strict=True)]
