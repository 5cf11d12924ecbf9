"""What a training loop calls: the losses of a whole model, and its balancers' steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsight.moe.depth import MixtureOfDepths
from sparsight.moe.layer import MoE

Routed = MoE | MixtureOfDepths


def routed_layers(model: nn.Module) -> Iterator[Routed]:
    """Every routed layer of a model once; a layer without a name takes the one it has in the model."""
    for name, module in model.named_modules():
        if isinstance(module, (MoE, MixtureOfDepths)):
            module.name = module.name or name.replace("_orig_mod.", "").removesuffix("_orig_mod")
            yield module


def balance_loss(model: nn.Module) -> Tensor:
    """The balance losses of all routed layers, one a layer, for the forward passes since the last call.

    Add it to the loss of every micro-batch. Zero where no layer has a balancer with a loss.

    >>> import sparsight as sp
    >>> moe = sp.MoE(8, 16, experts=4, balance=sp.SwitchLoss(1.0))
    >>> y = moe(torch.randn(32, 8))
    >>> bool(sp.balance_loss(moe) > 0)
    True
    """
    total: Tensor | None = None
    for layer in routed_layers(model):
        loss = layer.ledger.collect()
        if loss is None:
            continue
        if torch.is_grad_enabled() and not loss.requires_grad and _learns(layer):
            raise ValueError(
                f"the balance loss of layer '{layer.name}' has no gradient: its forward pass ran "
                "without one. With torch.utils.checkpoint use use_reentrant=False; to read the loss only, "
                "call this under no_grad"
            )
        total = loss if total is None else total + loss.to(total.device)
    if total is None:
        like = next(model.parameters(), torch.zeros(()))
        return torch.zeros((), device=like.device)
    return total


def _learns(layer: Routed) -> bool:
    return any(p.requires_grad for p in layer.router.parameters())


def reinforce_loss(model: nn.Module, loss: Tensor) -> Tensor:
    """The second term of the router's gradient for layers with `Reinforce`: add it to `loss`.

    `loss` is a scalar, or one value for each token; with one for each token, each pays for its own. Its
    value is of no meaning, only its gradient.

    >>> import sparsight as sp
    >>> moe = sp.MoE(8, 16, experts=4, estimator=sp.Reinforce())
    >>> loss = moe(torch.randn(32, 8)).square().mean()
    >>> (loss + sp.reinforce_loss(moe, loss)).backward()
    """
    terms = [
        layer.ledger.reinforce(loss) for layer in routed_layers(model) if layer.ledger.needs.loss is not None
    ]
    if not terms:
        raise ValueError("reinforce_loss: no layer of this model has the estimator Reinforce")
    return torch.stack(terms).sum()


class Following:
    """Made by `follow_steps`; `remove()` lets go of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self._handle: Any = optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer under a GradScaler is called even when the step is to be skipped.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf.any()):
            return
        for layer in routed_layers(self.model):
            layer.after_step()

    def remove(self) -> None:
        """Stop following."""
        self._handle.remove()


def follow_steps(model: nn.Module, optimizer: Optimizer) -> Following:
    """After each step of `optimizer`, move the biases, penalties, running means and schedules of `model`.

    Once, before training. Needed by loss-free biases, schedules, ReMoE, Default MoE and REINFORCE's baseline.

    >>> import sparsight as sp
    >>> moe = sp.MoE(8, 16, experts=4, balance=sp.LossFreeBias(0.1))
    >>> optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    >>> following = sp.follow_steps(moe, optimizer)
    >>> moe(torch.randn(32, 8)).sum().backward()
    >>> optimizer.step()
    >>> bool(moe.ledger.bias().any())
    True
    """
    if not any(True for _ in routed_layers(model)):
        raise ValueError("follow_steps: this model has no MoE or MixtureOfDepths layer")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in held for layer in routed_layers(model) for p in layer.parameters()):
        raise ValueError("follow_steps: the optimizer holds none of the parameters of the model's layers")
    for hook in optimizer._optimizer_step_post_hooks.values():
        other = getattr(hook, "__self__", None)
        if isinstance(other, Following) and other.model is model:
            raise ValueError("follow_steps: this optimizer is followed already, and would count twice")
    return Following(model, optimizer)
