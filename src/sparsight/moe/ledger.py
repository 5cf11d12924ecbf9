"""The ledger of a layer: losses that wait to be collected, loads that wait for the step, and what is
remembered.

Everything that outlives a forward pass is here, as buffers, and moves after the optimizer's step only. So a
forward pass that is recomputed sees what the first one saw, and counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from sparsight.moe.balancers import Balancer, LossFreeBias, world_sum
from sparsight.moe.estimators import Estimator, needs_of
from sparsight.moe.notice import notice
from sparsight.moe.routing import Routing

_STEPS = 3
"""Optimizer steps that pass by before something forgotten is mentioned."""
_PASSES = 200
"""Forward passes, for optimizers whose steps cannot be seen."""


def recomputing() -> bool:
    """Whether a backward pass is under way: a forward pass inside it repeats one that has been counted."""
    return bool(ModuleTracker().is_bw)


def _keep_dtypes(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Move a module's buffers with `fn` but leave their dtypes: steps of 0.001 are lost on bfloat16."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            moved = fn(buffer)
            module._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)


class _Memory(nn.Module):
    """A dict of tensors as buffers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Memory:
        _keep_dtypes(self, fn)
        return self

    def tensors(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._buffers.items() if buffer is not None}


class Ledger(nn.Module):
    """What one layer remembers."""

    load: Tensor
    tokens: Tensor
    step: Tensor
    defaults: Tensor
    output_sum: Tensor
    output_count: Tensor
    baseline: Tensor
    loss_sum: Tensor
    loss_count: Tensor

    def __init__(self, dim: int, experts: int, balancers: Sequence[Balancer], estimator: Estimator) -> None:
        super().__init__()
        self.balancers = tuple(balancers)
        self.needs = needs_of(estimator)
        self.memory = nn.ModuleList(_Memory(b.state(experts)) for b in balancers)
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("tokens", torch.zeros((), dtype=torch.int64))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        if self.needs.defaults is not None:
            self.register_buffer("defaults", torch.zeros(experts, dim))
            self.register_buffer("output_sum", torch.zeros(experts, dim))
            self.register_buffer("output_count", torch.zeros(experts, dtype=torch.int64))
        if self.needs.loss is not None:
            self.register_buffer("baseline", torch.full((), torch.nan))
            self.register_buffer("loss_sum", torch.zeros(()))
            self.register_buffer("loss_count", torch.zeros((), dtype=torch.int64))
        self.asked = False
        """Whether anyone has ever asked for the balance loss."""
        self._set_keeping()
        self._forget()
        self._rest()
        self._warned = False

    def _set_keeping(self) -> None:
        lossy = any(not isinstance(b, LossFreeBias) for b in self.balancers)
        self._keeps = lossy or self.needs.loss is not None

    def rebalance(self, balancers: Sequence[Balancer]) -> None:
        """Go on with other balancers: each takes over the memory at its place, and those that come on top
        must have none, so that checkpoints stay as they are."""
        kept = list(self.memory)[: len(balancers)]
        extra = [balancer.state(self.load.numel()) for balancer in balancers[len(kept) :]]
        if any(extra) or any(len(list(m.buffers())) for m in list(self.memory)[len(kept) :]):
            raise ValueError(
                "rebalance: a balancer that remembers something cannot come or go in mid-training"
            )
        self.balancers = tuple(balancers)
        self.memory = nn.ModuleList([*kept, *(_Memory(state) for state in extra)])
        self._set_keeping()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ledger:
        self.memory._apply(fn)
        _keep_dtypes(self, fn)
        return self

    def _forget(self) -> None:
        self.live: list[Routing] = []
        self.losses: list[Tensor | None] = []
        self._collected = False
        self._learning = True

    def _rest(self) -> None:
        """A step was told of: nothing is overdue."""
        self._passes = self._steps = self._unasked = 0
        self._seen: int | None = None

    # -- in the forward pass ---------------------------------------------------------------------

    def bias(self) -> Tensor | None:
        """What is added to the scores when experts are selected."""
        biases = [memory._buffers["bias"] for memory in self.memory if "bias" in memory._buffers]
        return None if not biases else torch.stack(biases).sum(0)  # type: ignore[arg-type]

    def record(self, routing: Routing, where: str, watched: Tensor | None) -> None:
        """Count a forward pass in training, and keep its routing if a loss is to be made of it.

        `watched` is a parameter of the router: its version tells that an optimizer has stepped.
        """
        self.load += routing.load()
        self.tokens += routing.tokens
        if not torch.compiler.is_compiling():
            self._watch(where, watched)
        if self._collected:
            self._forget()
        if self._keeps:
            if self.live and not self._learning:
                self._forget()  # a pass without gradients, for looking only
            self._learning = routing.logit.requires_grad
            self.live.append(routing)

    def _watch(self, where: str, watched: Tensor | None) -> None:
        """Say once what is forgotten: steps that nobody tells of, losses that nobody asks for."""
        version = None if watched is None else watched._version
        stepped = None not in (version, self._seen) and version != self._seen
        self._seen = version
        self._passes += 1
        waiting = self._waiting()
        if stepped:
            self._steps += 1
            self._unasked += waiting
            if waiting:
                self._forget()  # made with weights that have changed since: no gradient can come of them
        if self._warned:
            return
        late = self._passes > _PASSES
        if self._unasked >= _STEPS or (waiting and late):
            self._warned = True
            notice(
                f"{where}: the optimizer has stepped {self._unasked} times and nobody asked for the balance "
                "loss; add sp.balance_loss(model) to the loss"
                if self._unasked
                else f"{where}: {len(self.live)} forward passes and nobody asked for their balance loss; add "
                "sp.balance_loss(model) to the loss"
            )
            self._forget()
        elif self.waits_for_steps and (self._steps >= _STEPS or late):
            self._warned = True
            count = f"{self._steps} optimizer steps" if self._steps else f"{self._passes} forward passes"
            notice(
                f"{where}: {count} and it was told of none: its biases, penalties or running means "
                "never move. Call sp.follow_steps(model, optimizer) once before training"
            )

    def _waiting(self) -> bool:
        """Whether losses with a gradient wait to be asked for."""
        return bool(self.live) and self._learning and not self._collected

    @property
    def waits_for_steps(self) -> bool:
        """Whether anything here moves with the optimizer's steps."""
        remembers = any(len(list(memory.buffers())) for memory in self.memory)
        return remembers or self.needs.defaults is not None or self.needs.loss is not None

    def outputs(self, kept: Routing) -> Tensor | None:
        """Where the sums of the experts' outputs go, if anyone wants them."""
        if self.needs.defaults is None:
            return None
        self.output_count += torch.bincount(kept.expert, minlength=kept.experts)
        return self.output_sum

    # -- collected by the loop -------------------------------------------------------------------

    def collect(self) -> Tensor | None:
        """The losses of the forward passes since the last collection; the next pass begins anew.

        They are made here and not in the forward pass, so that a checkpointed pass and its recomputation are
        the same operations.
        """
        self._collected = self.asked = True
        for routing in self.live[len(self.losses) :]:
            self.losses.append(self._loss(routing))
        found = [loss for loss in self.losses if loss is not None]
        return torch.stack(found).sum() if found else None

    def _loss(self, routing: Routing) -> Tensor | None:
        step = int(self.step)
        found = []
        for balancer, memory in zip(self.balancers, self.memory, strict=True):
            assert isinstance(memory, _Memory)
            loss = balancer.loss(routing, memory.tensors(), step)
            if loss is not None:
                found.append(loss)
        return torch.stack(found).sum() if found else None

    def reinforce(self, loss: Tensor) -> Tensor:
        """Σ (loss − baseline)·log p_D over the routings since the last collection."""
        value = loss.detach().float()
        self.loss_sum += value.mean()
        self.loss_count += 1
        base = value.mean() if torch.isnan(self.baseline) else self.baseline
        terms = []
        for routing in self.live:
            log_p = routing.logit.log_softmax(-1)[routing.token, routing.expert]
            if value.dim() == 0:
                terms.append((value - base) * log_p.sum())
                continue
            if value.numel() != routing.tokens:
                raise ValueError(
                    f"reinforce_loss: expected a scalar or one loss for each of {routing.tokens} tokens, got "
                    f"{value.numel()}"
                )
            terms.append(((value.reshape(-1) - base) * log_p).mean())
        self._collected = True
        return torch.stack(terms).sum() if terms else value.new_zeros(())

    # -- after the optimizer's step --------------------------------------------------------------

    @torch.no_grad()
    def after_step(self, where: str) -> None:
        """Let every balancer move, on the load of all ranks and micro-batches, and begin a new step."""
        load, tokens = world_sum(self.load.clone()), world_sum(self.tokens.clone())
        if int(tokens):
            for balancer, memory in zip(self.balancers, self.memory, strict=True):
                assert isinstance(memory, _Memory)
                balancer.update(memory.tensors(), load, int(tokens))
        if self.needs.defaults is not None:
            self._move_defaults(self.needs.defaults)
        if self.needs.loss is not None and int(self.loss_count):
            mean = self.loss_sum / self.loss_count
            kept = mean if torch.isnan(self.baseline) else self.baseline
            self.baseline.copy_(self.needs.loss * kept + (1 - self.needs.loss) * mean)
            self.loss_sum.zero_()
            self.loss_count.zero_()
        if self._waiting() and not self._warned:
            self._warned = True
            notice(
                f"{where}: an optimizer step came before its balance loss was used; add "
                "sp.balance_loss(model) to the loss"
            )
        self.load.zero_()
        self.tokens.zero_()
        self.step += 1
        self._rest()
        self._forget()

    def _move_defaults(self, decay: float) -> None:
        total, count = world_sum(self.output_sum.clone()), world_sum(self.output_count.clone())
        ran = count > 0
        mean = total[ran] / count[ran, None]
        held = self.defaults[ran]
        first = ~held.any(1, keepdim=True)
        self.defaults[ran] = torch.where(first, mean, decay * held + (1 - decay) * mean)
        self.output_sum.zero_()
        self.output_count.zero_()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "losses": [], "live": []}
