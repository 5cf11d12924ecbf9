"""Compressed storage: the parameter is the vector of existing values, and the layer computes on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsight.kernels.index import indices_in, moved, positions_of
from sparsight.kernels.taps import Tap
from sparsight.nn.accumulation import Accumulation, Reduce, scale_of
from sparsight.nn.layer import SparseLayer, resize
from sparsight.topology import Topology


class CompressedWeight:
    """The values that one or several (tied) sparse layers share, and their topology."""

    storage = "compressed"
    backward: Topology | None = None  # methods with latent weights are stored masked
    reserve: Tensor | None = None

    def __init__(self, modules: Sequence[SparseLayer]) -> None:
        self.modules = list(modules)
        self.param = modules[0].values
        self._tap: Tap | None = None
        self._raw: Tensor | None = None
        self._pending: tuple[Tensor, bool] | None = None
        self._accumulation = Accumulation()
        self._handles: list[Any] = []

    @property
    def topology(self) -> Topology:
        return self.modules[0].topology

    # -- the dense gradient --------------------------------------------------------------------

    def collect(self, wanted: bool) -> None:
        """Forget what was collected; collect what a dense gradient needs from now on, or do not."""
        self.unhook()
        self._raw = self._pending = None
        self._tap = Tap(self.modules[0].geometry) if wanted and self.param.requires_grad else None
        for module in self.modules:
            module.tap = self._tap
        self.hook()

    def hook(self) -> None:
        """Follow the parameter's gradient while there is something to collect."""
        if self._tap is not None and not self._handles:
            self._handles = [
                self.param.register_hook(self._on_grad),
                self.param.register_post_accumulate_grad_hook(self._on_accumulated),
            ]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_grad(self, grad: Tensor) -> None:
        # Not every gradient that is computed is added to `.grad` (torch.autograd.grad): wait and see.
        anew = self._raw is None or self._accumulation.begins_anew(self.param)
        self._pending = (grad.detach().clone(), anew)

    def _on_accumulated(self, param: Tensor) -> None:
        self._accumulation.added(param)
        if self._tap is not None and self._pending is not None:
            grad, anew = self._pending
            self._tap.settle(anew=anew)
            self._raw = grad if anew or self._raw is None else self._raw + grad
            self._pending = None

    @property
    def has_dense_grad(self) -> bool:
        return self._tap is not None and bool(self._tap.pairs)

    def gradient_blocks(self, reduce: Reduce) -> Iterator[tuple[int, Tensor]]:
        """The dense gradient in blocks of whole rows: (first flat position, entries)."""
        assert self._tap is not None
        assert self._raw is not None
        factor = scale_of(reduce(self._raw), self.param.grad)
        for row, block in self._tap.blocks():
            block = reduce(block).flatten()
            yield row * self.topology.fan_in, block if factor == 1 else block * factor

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_handles": [],
            "_tap": self._tap is not None,
            "_raw": None,
            "_pending": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        wanted, self._tap = bool(self._tap), None
        self.collect(wanted)

    # -- reading -------------------------------------------------------------------------------

    def values(self) -> Tensor:
        return self.modules[0].layout.by_position(self.param.detach())

    def grad(self) -> Tensor | None:
        grad = self.param.grad
        return None if grad is None else self.modules[0].layout.by_position(grad)

    def index_bytes(self) -> int:
        """What the topology takes beside the values, with everything the kernels derive from it."""
        return sum(module.index_bytes() for module in self.modules)

    def strays(self) -> int:
        """There is no place for a weight that does not exist."""
        return 0

    # -- changing ------------------------------------------------------------------------------

    def zero_missing(self) -> None:
        """Nothing to do: a missing weight has no place."""

    def settle(self) -> None:
        """After a step: nothing to do either."""

    def begin(self, slots: Iterable[Tensor]) -> None:
        """An optimizer was attached: its state is as long as the parameter."""

    def end(self, slots: Iterable[Tensor]) -> None:
        """An optimizer was detached: nothing outside the values could move."""

    @torch.no_grad()
    def assign(self, topology: Topology) -> None:
        """Take another topology; weights that both have keep their values."""
        if not topology.same_as(self.topology):
            self.rewire(topology, indices_in(positions_of(self.topology), positions_of(topology)), None, ())

    @torch.no_grad()
    def rewire(self, after: Topology, source: Tensor, grown: Tensor | None, slots: Iterable[Tensor]) -> None:
        """Move to `after`: kept weights and their slots go along, all else starts at zero (or `grown`)."""
        before = self.modules[0].layout
        for module in self.modules:
            module.topology = after
        now = self.modules[0].layout
        for tensor in (self.param, *slots):
            values = moved(before.by_position(tensor.detach()), source)
            if tensor is self.param and grown is not None and grown.numel():
                values[source < 0] = grown.to(values)
            resize(tensor, values.numel())
            tensor.copy_(now.stored(values))
