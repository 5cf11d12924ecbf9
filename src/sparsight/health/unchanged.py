"""Changes of a model that last as long as a `with` block and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsight import chance
from sparsight.dynamics.routes import Route
from sparsight.moe.depth import MixtureOfDepths
from sparsight.moe.layer import MoE


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Inference without gradients; modes, buffers, last routings and random numbers are put back after."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    looked = [(m, m.routing, getattr(m, "dropped", None)) for m in model.modules() if _routed(m)]
    device = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    with torch.random.fork_rng(device), torch.no_grad():
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, old in buffers:
                if not torch.equal(buffer, old):
                    buffer.copy_(old)
            for layer, routing, dropped in looked:
                layer.routing = routing
                if dropped is not None:
                    layer.dropped = dropped


def _routed(module: nn.Module) -> bool:
    return isinstance(module, (MoE, MixtureOfDepths))


@contextmanager
def with_router_noise(routes: Sequence[Route], strength: float, seed: int) -> Iterator[None]:
    """Normal noise on the routers' weights, `strength` times their root mean square."""
    params = [p for route in routes for p in route.router]
    with _put_back(params):
        for i, param in enumerate(params):
            size = param.detach().float().square().mean().sqrt()
            drawn = chance.normal(param.numel(), chance.mix(seed, i)).view(param.shape)
            param.add_((strength * size * drawn.to(param.device)).to(param.dtype))
        yield


@contextmanager
def without_expert(route: Route, expert: int) -> Iterator[None]:
    """No token for one expert in this library's layers; no output from it in others."""
    if isinstance(route.module, MoE):

        def passed(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
            # Finite, since the layer refuses infinite logits, and below every other expert's.
            lowest = logits.amin(-1, keepdim=True) - 1e4
            return torch.cat((logits[:, :expert], lowest, logits[:, expert + 1 :]), -1)

        handle = route.module.router.register_forward_hook(passed)
        try:
            yield
        finally:
            handle.remove()
        return
    parts = route.parts[expert] if route.parts else ()
    params = list({id(part.param): part.param for part in parts}.values())
    with _put_back(params):
        for part in parts:
            part.cut(part.param).zero_()
        yield


@contextmanager
def _put_back(params: Sequence[nn.Parameter]) -> Iterator[None]:
    before = [param.detach().clone() for param in params]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for param, old in zip(params, before, strict=True):
                param.copy_(old)
