"""Masked storage: the dense parameter with zeros. Any device, any layer, and no claim of speed.

Because missing weights *are* zero, the forward pass needs no mask at all; gradients of missing weights
are removed before they accumulate, so that clipping and all-reduce see what the optimizer will use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsight.topology import Topology


class MaskedWeight:
    """One parameter and the topology it obeys."""

    storage = "masked"

    def __init__(self, param: Parameter, topology: Topology) -> None:
        self.param = param
        self.topology = topology
        self.capture = False
        """Whether the coming backward passes should also collect the dense gradient."""
        self.dense_grad: Tensor | None = None
        self.backward: Topology | None = None
        """Where gradients flow, when that is more than the forward set (Top-KAST, N:M)."""
        self.reserve: Tensor | None = None
        """Latent weights outside the forward set, zero inside; only with a backward set."""
        self._missing = ~topology.mask()
        self._untrained = self._missing
        self._seen_version = -1
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
        if self.capture:
            self._collect(grad.detach())
        self._follow(grad)
        return grad.masked_fill(self._untrained, 0)

    def _collect(self, grad: Tensor) -> None:
        held = self.param.grad
        # A gradient that was zeroed since we last saw it begins a new step: the one before was skipped.
        # An untouched one (same version) may be zero for honest reasons.
        zeroed = held is None or (held._version != self._seen_version and not bool(held.any()))
        if self.dense_grad is None or zeroed:
            self.dense_grad = grad.clone()
        else:
            self.dense_grad += grad

    def _on_accumulated(self, param: Tensor) -> None:
        if self.capture and param.grad is not None:
            self._seen_version = param.grad._version

    def _follow(self, tensor: Tensor) -> None:
        """Move the masks after a model that was moved to another device."""
        if self._missing.device != tensor.device:
            shared = self._untrained is self._missing
            self.topology = self.topology.to(tensor.device)
            self._missing = self._missing.to(tensor.device)
            self._untrained = self._missing if shared else self._untrained.to(tensor.device)

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

    # -- latent weights ------------------------------------------------------------------------

    @torch.no_grad()
    def wake(self) -> None:
        """Bring the latent weights into the parameter, for the optimizer to move."""
        assert self.reserve is not None
        self.param.add_(self.reserve.to(self.param.device))

    @torch.no_grad()
    def sleep(self) -> None:
        """Put everything outside the forward set aside, so that the forward pass sees zeros there."""
        self.reserve = self.param.detach().masked_fill(~self._missing, 0)
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
