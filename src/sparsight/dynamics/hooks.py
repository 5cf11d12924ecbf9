"""Hooks on modules, and the padding that a model's attention mask tells of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsight.dynamics.routes import Route, Seen


class Hook:
    """A forward hook that stays behind when its module is copied or saved: nobody watches the copy.

    >>> import copy
    >>> layer, told = nn.Linear(1, 1), []
    >>> handle = layer.register_forward_hook(Hook(lambda *args: told.append(1)))
    >>> _ = layer(torch.ones(1)), copy.deepcopy(layer)(torch.ones(1))
    >>> len(told)
    1
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    # Counting is no part of the graph: a compiled model comes out of it here and goes in again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any) -> None:
        if self.call is not None:
            self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Padding:
    """Which tokens are padding, for layers that are not told: from the 2-D `attention_mask` of the stack they
    belong to. A stack is a module whose forward takes `attention_mask` beside `input_ids` or `inputs_embeds`.
    """

    def __init__(self, model: nn.Module, routes: Iterable[Route]) -> None:
        self._masks: dict[nn.Module, Any] = {}
        self._stacks = {route.name: _stacks(model, route.module) for route in routes if route.padded}
        hooked = {stack for stacks in self._stacks.values() for stack in stacks}
        self.handles = [
            stack.register_forward_pre_hook(Hook(self._enter), with_kwargs=True) for stack in hooked
        ]

    def _enter(self, stack: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "attention_mask" not in kwargs and args:
            # Given by position: slower to find, and nobody inside a model does it.
            kwargs = inspect.signature(stack.forward).bind_partial(*args, **kwargs).arguments
        self._masks[stack] = kwargs.get("attention_mask")

    def take_out(self, route: Route, seen: Seen) -> Seen:
        """What was decided, without the padding."""
        for stack in self._stacks.get(route.name, ()):
            mask = self._masks.get(stack)
            if mask is None:
                return seen
            # A mask in another form was made by an outer stack from the one it was given.
            if isinstance(mask, Tensor) and mask.dim() == 2:
                fits = mask.numel() == seen.logit.shape[0] and seen.real is None
                return seen.only(mask.reshape(-1).bool()) if fits else seen
        return seen


def _stacks(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The stacks around a module, the innermost first."""
    names = {id(m): name for name, m in model.named_modules(remove_duplicate=False)}
    parts = names[id(module)].split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
    return [each for each in dict.fromkeys(around) if _is_stack(each)]


def _is_stack(module: nn.Module) -> bool:
    takes = inspect.signature(type(module).forward).parameters
    return "attention_mask" in takes and ("input_ids" in takes or "inputs_embeds" in takes)
