"""Masked storage: the dense parameter with zeros. Any device, any layer, and no claim of speed.

Because missing weights *are* zero, the forward pass needs no mask at all; gradients of missing weights
are removed before they accumulate, so that clipping and all-reduce see what the optimizer will use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsight.nn.accumulation import Accumulation, Reduce, scale_of
from sparsight.topology import Topology


class MaskedWeight:
    """One parameter and the topology it obeys."""

    storage = "masked"

    def __init__(self, param: Parameter, topology: Topology) -> None:
        self.param = param
        self.topology = topology
        self.backward: Topology | None = None
        """Where gradients flow, when that is more than the forward set (Top-KAST, N:M)."""
        self.reserve: Tensor | None = None
        """Latent weights outside the forward set, zero inside; only with a backward set."""
        self._missing = ~topology.mask()
        self._untrained = self._missing
        self._awake = False
        self._collecting = False
        self._dense_grad: Tensor | None = None
        self._pending: tuple[Tensor, bool] | None = None
        self._accumulation = Accumulation()
        self._handles: list[Any] = []
        self.zero_missing()
        self.hook()

    # -- attaching -----------------------------------------------------------------------------

    def hook(self) -> None:
        """Mask gradients from now on; a frozen parameter is hooked once it is unfrozen."""
        if self._handles or not self.param.requires_grad:
            return
        self._handles = [
            self.param.register_hook(self._on_grad),
            self.param.register_post_accumulate_grad_hook(self._on_accumulated),
        ]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.hook()

    def _on_grad(self, grad: Tensor) -> Tensor:
        if self._collecting:
            # Not every gradient that is computed is added to `.grad` (torch.autograd.grad): wait and see.
            anew = self._dense_grad is None or self._accumulation.begins_anew(self.param)
            self._pending = (grad.detach().clone(), anew)
        self._follow(grad)
        return grad.masked_fill(self._untrained, 0)

    def _on_accumulated(self, param: Tensor) -> None:
        self._accumulation.added(param)
        if self._pending is not None:
            grad, anew = self._pending
            self._dense_grad = grad if anew or self._dense_grad is None else self._dense_grad + grad
            self._pending = None

    def _follow(self, tensor: Tensor) -> None:
        """Move the masks after a model that was moved to another device."""
        if self._missing.device != tensor.device:
            shared = self._untrained is self._missing
            self.topology = self.topology.to(tensor.device)
            self._missing = self._missing.to(tensor.device)
            self._untrained = self._missing if shared else self._untrained.to(tensor.device)

    # -- the dense gradient --------------------------------------------------------------------

    def collect(self, wanted: bool) -> None:
        """Forget what was collected; collect the dense gradient from now on, or do not."""
        self._collecting, self._dense_grad, self._pending = wanted, None, None

    @property
    def has_dense_grad(self) -> bool:
        return self._dense_grad is not None

    def gradient_blocks(self, reduce: Reduce) -> Iterator[tuple[int, Tensor]]:
        """The dense gradient, here in one block: (first flat position, entries)."""
        assert self._dense_grad is not None
        dense = reduce(self._dense_grad)
        factor = scale_of(dense, self.param.grad)
        yield 0, (dense if factor == 1 else dense * factor).flatten()

    # -- reading -------------------------------------------------------------------------------

    def existing(self, dense: Tensor) -> Tensor:
        """The entries of a dense tensor at the existing weights."""
        self._follow(dense)
        return dense.detach().masked_select(~self._missing)

    def values(self) -> Tensor:
        return self.existing(self.param)

    def grad(self) -> Tensor | None:
        return None if self.param.grad is None else self.existing(self.param.grad)

    def strays(self) -> int:
        """How many missing weights are not zero; nothing but an outside hand makes any."""
        self._follow(self.param)
        return int(self.param.detach().masked_select(self._missing).count_nonzero())

    # -- changing ------------------------------------------------------------------------------

    @torch.no_grad()
    def zero_missing(self) -> None:
        self._follow(self.param)
        self.param.masked_fill_(self._missing, 0)

    @torch.no_grad()
    def assign(self, topology: Topology) -> None:
        """Take another topology as it stands; what it does not hold becomes zero."""
        self.topology = topology.to(self.param.device)
        self._missing = ~self.topology.mask()
        if self.backward is None:
            self._untrained = self._missing
        self.zero_missing()

    @torch.no_grad()
    def rewire(self, after: Topology, source: Tensor, grown: Tensor | None, slots: Iterable[Tensor]) -> None:
        """Move to `after`: kept weights and their slots stay, all else starts at zero (or `grown`)."""
        fresh = torch.zeros_like(self._missing)
        fresh.view(-1)[after.positions()[source < 0]] = True
        if grown is not None and grown.numel():
            self.param.masked_scatter_(fresh, grown.to(self.param))
        else:
            self.param.masked_fill_(fresh, 0)
        self.assign(after)
        for slot in slots:
            slot.masked_fill_(fresh | self._missing, 0)

    @torch.no_grad()
    def begin(self, slots: Iterable[Tensor]) -> None:
        """An optimizer was attached: what it remembers of untrained weights is forgotten."""
        if self.backward is not None:
            self._untrained = ~self.backward.mask()
        for slot in slots:
            slot.masked_fill_(self._untrained, 0)

    @torch.no_grad()
    def end(self, slots: Iterable[Tensor]) -> None:
        """An optimizer was detached: from now on nothing moves outside the forward set."""
        self._untrained = self._missing
        for slot in slots:
            slot.masked_fill_(self._missing, 0)

    def settle(self) -> None:
        """After a step: the forward pass sees zeros wherever no weight exists."""
        if self._awake:
            self.fall_asleep()
        self.zero_missing()

    # -- latent weights ------------------------------------------------------------------------

    @torch.no_grad()
    def wake(self) -> None:
        """Bring the latent weights into the parameter, for the optimizer to move."""
        assert self.reserve is not None
        if not self._awake:
            self.param.add_(self.reserve.to(self.param.device))
            self._awake = True

    @torch.no_grad()
    def fall_asleep(self) -> None:
        """Put everything outside the forward set aside, so that the forward pass sees zeros there."""
        self.reserve = self.param.detach().masked_fill(~self._missing, 0)
        self._awake = False
        self.zero_missing()

    @torch.no_grad()
    def choose(self, forward: Topology, backward: Topology, slots: Iterable[Tensor] = ()) -> None:
        """New sets for a waking parameter; slots that leave or enter `backward` become zero."""
        untrained = ~backward.mask()
        for slot in slots:
            slot.masked_fill_(untrained | self._untrained, 0)
        self.topology, self.backward = forward, backward
        self._missing, self._untrained = ~forward.mask(), untrained

    @torch.no_grad()
    def decay(self, inside: float, outside: float) -> None:
        """Add weight decay to the gradient: one rate in the forward set, one in the rest of the backward."""
        if self.param.grad is None:
            return
        rate = torch.where(self._missing, outside, inside).to(self.param.dtype)
        self.param.grad.add_((rate * self.param).masked_fill_(self._untrained, 0))


def is_masked(param: Tensor) -> bool:
    """Whether some MaskedWeight holds this parameter already."""
    hooks = (param._backward_hooks or {}).values()
    return any(isinstance(getattr(hook, "__self__", None), MaskedWeight) for hook in hooks)
