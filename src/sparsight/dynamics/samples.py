"""A sample of the weights of several units, followed over time: how often they have a gradient, how steady it
is, how far a step moves them. One weight in 1024 keeps the memory near one per cent of a large model's.

All samples lie in one NumPy vector, since a reading is many small operations and each costs its call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsight.dynamics.routes import Part

ONE_IN = 1024
AT_LEAST, AT_MOST = 32, 256
_MEMORY = 0.9
"""Share of a running mean that stays at each reading: it looks back over ten readings or so."""

Floats = NDArray[np.float32]
Places = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def sample_size(numel: int) -> int:
    """How many weights of a parameter are followed.

    >>> sample_size(10), sample_size(20_000), sample_size(10**6)
    (10, 32, 256)
    """
    return min(numel, max(AT_LEAST, min(AT_MOST, numel // ONE_IN)))


def offsets(numel: int, salt: int) -> NDArray[np.int64]:
    """Which of `numel` weights are followed, sorted: the same ones for equal arguments, at no cost to the
    random numbers of the training."""
    size = sample_size(numel)
    if numel <= size:
        return np.arange(numel, dtype=np.int64)
    return np.sort(np.random.default_rng(salt).integers(numel, size=size))


class Samples:
    """Weights of several units (an expert or a layer each) that are followed."""

    def __init__(self, units: Sequence[Sequence[Part]]) -> None:
        self.parts = [part for unit in units for part in unit]
        self.units = len(units)
        self._unit_of_part = np.repeat(np.arange(self.units), [len(unit) for unit in units])
        # The same salt for the same part of every unit: experts are compared place by place.
        salts = [salt for unit in units for salt in range(len(unit))]
        base = [0 if part.index is None else part.index * part.numel for part in self.parts]
        self._at = [offsets(p.numel, s) + b for p, s, b in zip(self.parts, salts, base, strict=True)]
        self._lay_out()
        length = self.starts[-1]
        self.before: Floats | None = None
        self.mean, self.square = np.zeros(length, np.float32), np.zeros(length, np.float32)
        self.weight, self.present = np.zeros(length, np.float32), np.zeros(length, np.float32)
        self.readings = np.zeros(length, np.float32)

    def _lay_out(self) -> None:
        lengths = [len(at) for at in self._at]
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
        self.unit = np.repeat(self._unit_of_part, lengths)
        self.counts = np.bincount(self.unit, minlength=self.units)

    def renew(self, index: int, count: int, places: Places | None) -> None:
        """Choose the sample of a part anew, from `count` existing weights: after a rewiring another weight is
        in the place. `places` turns numbers of existing weights into places in the parameter."""
        picked = offsets(count, 0)
        if len(picked) != len(self._at[index]):
            wanted = len(self._at[index])
            picked = np.resize(picked, wanted) if len(picked) else np.zeros(wanted, np.int64)
        self._at[index] = picked if places is None or not count else places(picked)
        span = slice(self.starts[index], self.starts[index + 1])
        for kept in (self.mean, self.square, self.weight, self.present, self.readings):
            kept[span] = 0
        self.before = None

    def weights(self) -> Floats:
        """Their values now."""
        return self._gather([part.param for part in self.parts])

    def _gather(self, tensors: Sequence[Tensor | None]) -> Floats:
        found = np.zeros(self.starts[-1], np.float32)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                _take(tensor, self._at[i], found[self.starts[i] : self.starts[i + 1]])
        return found

    def remember(self) -> None:
        """Keep their values for `moved`."""
        self.before = self.weights()

    def take(self, *, counts_absence: bool) -> None:
        """Read their gradients. An expert without one has learned nothing; a layer without one may have been
        rewired in place of a step, which is not held against it."""
        grads = [part.param.grad for part in self.parts]
        has = np.repeat(np.array([g is not None for g in grads], bool), np.diff(self.starts))
        new = 1 - _MEMORY
        grad = self._gather(grads)
        counted = has | counts_absence
        self.readings[counted] = self.readings[counted] * _MEMORY + new
        self.present[counted] *= _MEMORY
        self.present += new * (has & (grad != 0))
        share = np.where(has, np.float32(new), np.float32(0))
        self.weight += share * (1 - self.weight)
        self.mean += share * (grad - self.mean)
        self.square += share * (grad * grad - self.square)

    def frequency(self) -> Floats:
        """For each weight, how often it has had a gradient of late."""
        share = self.present / np.maximum(self.readings, 1e-9)
        return np.minimum(share, 1).astype(np.float32)  # rounding may go past it, and out of a histogram

    def snr(self) -> Floats:
        """For each unit, Σ mean² / Σ variance of the gradients of late; NaN where nothing varies."""
        weight = np.maximum(self.weight, 1e-9)
        signal = (self.mean / weight) ** 2
        noise = np.maximum(self.square / weight - signal, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = self._sum(signal) / self._sum(noise)
        return np.where(np.isfinite(ratio), ratio, np.nan).astype(np.float32)

    def moved(self, weights: Floats) -> Floats:
        """For each unit, mean |Δw| from `remember` to these weights; NaN if that is not known."""
        if self.before is None:
            return np.full(self.units, np.nan, np.float32)
        return self.mean_of(np.abs(weights - self.before))

    def weight_norms(self, weights: Floats) -> Floats:
        """For each unit, the norm of its weights, estimated from the sample."""
        with np.errstate(over="ignore"):  # weights that explode are a finding, not a warning
            squares = weights**2
        lengths = np.diff(self.starts)
        sizes = np.array([part.numel for part in self.parts])
        scale = np.repeat(sizes / np.maximum(lengths, 1), lengths)
        return np.sqrt(self._sum(squares * scale)).astype(np.float32)

    def rows(self, weights: Floats) -> Floats | None:
        """[units, places]: the weights of every unit, where all are laid out alike."""
        if not self.units or (self.counts != self.counts[0]).any():
            return None
        return weights.reshape(self.units, -1)

    def mean_of(self, values: Floats) -> Floats:
        """The mean over each unit's sample."""
        return (self._sum(values) / np.maximum(self.counts, 1)).astype(np.float32)

    def of(self, unit: int, values: Floats) -> Floats:
        """The part of `values` that belongs to a unit."""
        found: Floats = values[self.unit == unit]
        return found

    def _sum(self, values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(self.unit, weights=values, minlength=self.units).astype(np.float64)


def _take(tensor: Tensor, at: NDArray[np.int64], out: Floats) -> None:
    """out = tensor.flatten()[at]."""
    tensor = tensor.detach()
    if not tensor.numel():
        out[:] = 0  # a layer that has no weights at present
    elif tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous():
        np.take(tensor.numpy().reshape(-1), at, out=out, mode="clip")  # shorter, until the sample is renewed
    else:
        picked = tensor.reshape(-1)[torch.from_numpy(at).to(tensor.device)]
        out[:] = picked.float().cpu().numpy()


def norms(units: Sequence[Sequence[Part]]) -> Floats:
    """For each unit, the norm of its whole gradient; 0 without one."""
    squares = np.zeros(len(units))
    sliced: dict[int, NDArray[np.float64]] = {}
    for number, unit in enumerate(units):
        for part in unit:
            grad = part.param.grad
            if grad is None:
                continue
            if part.index is None:
                squares[number] += float(torch.linalg.vector_norm(grad)) ** 2
                continue
            if id(part.param) not in sliced:
                each = torch.linalg.vector_norm(grad.reshape(part.of or len(grad), -1).float(), dim=1)
                sliced[id(part.param)] = each.double().cpu().numpy() ** 2
            squares[number] += sliced[id(part.param)][part.index]
    return np.sqrt(squares).astype(np.float32)
