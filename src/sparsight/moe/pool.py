"""Scratch memory that is used again instead of being allocated anew.

A large buffer that is freed goes back to the operating system, and its pages have to be zeroed and mapped
again at the next step. For a mixture of experts that costs as much as a third of the step.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 64
_SMALL = 1 << 16


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
        self._free: list[np.ndarray[Any, Any]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Like `torch.empty`."""
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < _SMALL:
            return torch.empty(shape, dtype=dtype, device=device)
        chunk = self._take(size)
        view = chunk[:size]
        # The storage holds `view` and nothing else does: when `view` dies, so has every alias.
        weakref.finalize(view, self._free.append, chunk).atexit = False
        return torch.frombuffer(view, dtype=dtype).view(shape)

    @property
    def waiting(self) -> int:
        """Bytes that are held for the next request."""
        return sum(chunk.nbytes for chunk in self._free)

    def _take(self, size: int) -> np.ndarray[Any, Any]:
        best = None
        for index, chunk in enumerate(self._free):
            fits = size <= chunk.nbytes <= 2 * size
            if fits and (best is None or chunk.nbytes < self._free[best].nbytes):
                best = index
                if chunk.nbytes < size + size // 8:
                    break
        if best is not None:
            return self._free.pop(best)
        # A request that finds nothing replaces a chunk of the wrong size, so that batches of changing
        # sizes do not pile up chunks.
        if self._free:
            del self._free[0]
        room = size + size // 16
        raw = np.empty(room + _ALIGN, np.uint8)
        start = -raw.ctypes.data % _ALIGN
        return raw[start : start + room]

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        return Pool()

    def __reduce__(self) -> tuple[type[Pool], tuple[()]]:
        return Pool, ()
