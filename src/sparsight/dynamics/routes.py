"""Routes: where a model decides which expert a token goes to, and how to see what was decided.

An adapter is a function (name, module) → Route or None. `routed` knows this library's own layers;
`where_logits` makes one for any module from the place of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsight.moe.depth import MixtureOfDepths
from sparsight.moe.layer import MoE


@dataclass(frozen=True)
class Part:
    """A parameter, or one of `of` equal slices along its first dimension, belonging to one expert."""

    param: nn.Parameter
    index: int | None = None
    of: int | None = None
    """How many slices there are; the length of the first dimension where it is not said."""

    @property
    def numel(self) -> int:
        """How many weights it has."""
        whole = self.param.numel()
        return whole if self.index is None else whole // (self.of or self.param.shape[0])

    def cut(self, tensor: Tensor) -> Tensor:
        """Its share of a tensor that has the parameter's shape."""
        return tensor if self.index is None else tensor.reshape(self.of or tensor.shape[0], -1)[self.index]


@dataclass(frozen=True)
class Seen:
    """What one forward pass decided. Padding is not in it."""

    expert: Tensor
    """[N] the expert of each assignment."""
    token: Tensor
    """[N] the token of each assignment."""
    logit: Tensor
    """[T, E] what the router said."""
    prob: Tensor | None = None
    """[T, E] its probabilities, where they are not the softmax of the logits."""
    dropped: int | Tensor = 0
    """How many assignments were dropped for lack of capacity, or [N] which."""
    alone: int | None = None
    """How many tokens had one expert left after SparseMixer's mask."""
    real: Tensor | None = None
    """[T] which positions of the input the tokens are, where some are padding."""
    counted: Tensor | None = None
    """[N] which assignments make up the load, where that is not all of them."""

    def load(self) -> Tensor:
        """[E] assignments of each expert."""
        expert = self.expert if self.counted is None else self.expert[self.counted]
        return torch.bincount(expert.reshape(-1), minlength=self.logit.shape[-1])

    def shares(self) -> Tensor:
        """[T, E] probabilities that add up to one for each token."""
        if self.prob is None:
            return self.logit.float().softmax(-1)
        return self.prob.float() / self.prob.float().sum(-1, keepdim=True).clamp_min(1e-20)

    def only(self, real_T: Tensor) -> Seen:
        """What concerns the tokens that are real.

        >>> seen = Seen(torch.tensor([1, 0, 1]), torch.arange(3), torch.zeros(3, 2))
        >>> less = seen.only(torch.tensor([True, False, True]))
        >>> less.expert.tolist(), less.token.tolist(), less.logit.shape[0]
        ([1, 1], [0, 1], 2)
        """
        keep = real_T[self.token]
        number = real_T.cumsum(0) - 1
        return replace(
            self,
            expert=self.expert[keep],
            token=number[self.token[keep]],
            logit=self.logit[real_T],
            prob=None if self.prob is None else self.prob[real_T],
            dropped=self.dropped[keep] if isinstance(self.dropped, Tensor) else self.dropped,
            real=real_T.nonzero().squeeze(1),
            counted=None if self.counted is None else self.counted[keep],
        )


See = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Seen | None]
Name = str


@dataclass(frozen=True)
class Route:
    """One place where tokens are routed."""

    name: str
    module: nn.Module
    """The module whose forward pass is hooked."""
    experts: int
    k: int
    see: See
    """(module, args, kwargs, output) → what was decided."""
    router: tuple[nn.Parameter, ...] = ()
    parts: tuple[tuple[Part, ...], ...] = ()
    """The parameters of each expert."""
    run: Callable[[Tensor], Tensor] | None = None
    """[n, dim] → [E, n, dim]: every expert on the same tokens, for comparing what they do."""
    family: str = "moe"
    padded: bool = False
    """Whether padding reaches the module unmarked, to be taken out by the model's attention mask."""
    about: dict[str, Any] = field(default_factory=dict)


Adapter = Callable[[Name, nn.Module], Route | None]


def routed(name: str, module: nn.Module) -> Route | None:
    """This library's own routed layers."""
    if isinstance(module, MoE):
        return _moe(name, module)
    if isinstance(module, MixtureOfDepths):
        return Route(
            name, module, 1, 1, _see_depths, tuple(module.router.parameters()), family="depth",
            about={"capacity": module.capacity},
        )  # fmt: skip
    return None


def _moe(name: str, module: MoE) -> Route:
    def run(rows: Tensor) -> Tensor:
        modes = [expert.training for expert in module.experts]
        try:
            # Under autocast the rows came in another type than the weights have.
            rows = rows.to(next((p.dtype for p in module.experts.parameters()), rows.dtype))
            return torch.stack([expert.eval()(rows) for expert in module.experts])
        finally:
            for expert, mode in zip(module.experts, modes, strict=True):
                expert.train(mode)

    estimator = module.estimator
    return Route(
        name,
        module,
        len(module.experts),
        module.k,
        _see_moe,
        tuple(module.router.parameters()),
        tuple(tuple(Part(p) for p in expert.parameters()) for expert in module.experts),
        run,
        about={
            "router": module.router_kind.name,
            "estimator": getattr(estimator, "__name__", type(estimator).__name__),
            "capacity": None if module.capacity is None else module.capacity.factor,
            "fixed": module.router_kind.fixed,
        },
    )


def _real(kwargs: dict[str, Any], args: tuple[Any, ...]) -> Tensor | None:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    return mask.reshape(-1).bool().nonzero().squeeze(1) if isinstance(mask, Tensor) else None


def _see_moe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen | None:
    assert isinstance(module, MoE)
    routing = module.routing
    if routing is None:
        return None
    return Seen(
        routing.expert,
        routing.token,
        routing.logit,
        routing.prob,
        module.dropped,
        None if routing.alone is None else int(routing.alone),
        _real(kwargs, args),
        routing.counted,
    )


def _see_depths(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen | None:
    assert isinstance(module, MixtureOfDepths)
    routing = module.routing
    if routing is None:
        return None
    return Seen(routing.expert, routing.token, routing.logit, routing.prob)


def where_logits(
    match: Callable[[str, nn.Module], bool],
    logits: Callable[[nn.Module, Any], Tensor],
    *,
    k: int = 1,
    chosen: Callable[[nn.Module, Any], Tensor] | None = None,
    parts: Callable[[nn.Module], Sequence[Sequence[Part]]] = lambda module: (),
) -> Adapter:
    """An adapter for any module: `logits(module, output)` says where they are, [..., E].

    `chosen(module, output)` gives the chosen experts [..., k]; without it they are the k largest logits.

    >>> gate = nn.Linear(8, 4)
    >>> adapter = where_logits(lambda name, module: name == "gate", lambda module, output: output, k=2)
    >>> adapter("gate", gate).experts
    4
    """

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Seen:
        logit = logits(module, output).detach()
        logit = logit.reshape(-1, logit.shape[-1])
        top = (
            logit.topk(k).indices
            if chosen is None
            else chosen(module, output).detach().reshape(len(logit), -1)
        )
        token = torch.arange(len(logit), device=logit.device)[:, None].expand_as(top)
        return Seen(top.reshape(-1), token.reshape(-1), logit)

    def adapt(name: str, module: nn.Module) -> Route | None:
        if not match(name, module):
            return None
        params = tuple(module.parameters(recurse=False))
        widths = [p.shape[0] for p in params if p.dim() == 2]
        owned = tuple(tuple(expert) for expert in parts(module))
        if not widths and not owned:
            raise ValueError(
                f"where_logits: '{name}' ({type(module).__name__}) has no matrix to tell the number of "
                "experts by; pass parts=, one list of parts for each expert"
            )
        return Route(name, module, len(owned) or widths[0], k, see, params, owned, padded=True)

    return adapt


def clean(name: str) -> str:
    """A module's name without the wrappers of torch.compile and DistributedDataParallel; the model itself
    is called "model", since "" stands for the whole."""
    bare = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return bare.removeprefix("module.") or "model"


def find_routes(model: nn.Module, adapters: Iterable[Adapter]) -> list[Route]:
    """Every place where tokens are routed; the first adapter that knows a module describes it."""
    adapters = tuple(adapters)
    found = []
    for name, module in model.named_modules():
        for adapter in adapters:
            route = adapter(clean(name), module)
            if route is not None:
                found.append(route)
                break
    return found
