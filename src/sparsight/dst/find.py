"""Which parameters of a model are to be sparse, and what they are called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.nn import Parameter

from sparsight.nn.layer import SparseLayer

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True)
class Place:
    """A parameter by the module that holds it."""

    module: nn.Module
    module_name: str
    attribute: str

    @property
    def parameter_name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def layer_name(self) -> str:
        """`fc1` for `fc1.weight`; other parameters go by their full name."""
        return self.module_name if self.attribute == "weight" and self.module_name else self.parameter_name

    def matches(self, pattern: str) -> bool:
        names = {self.layer_name, self.parameter_name}
        if self.attribute == "weight" or self.attribute in _ATTENTION:
            names.add(self.module_name)
        return any(fnmatchcase(name, pattern) for name in names)

    @property
    def usual(self) -> bool:
        """Whether this is a weight that is sparse unless told otherwise."""
        if isinstance(self.module, nn.MultiheadAttention):
            return self.attribute in _ATTENTION
        return isinstance(self.module, _WEIGHTED) and self.attribute == "weight"


@dataclass(frozen=True)
class Target:
    """One parameter to be sparse; tied weights are one target with several places."""

    param: Parameter
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.places[0].layer_name

    def matches(self, pattern: str) -> bool:
        return any(place.matches(pattern) for place in self.places)

    @property
    def usual(self) -> bool:
        # A weight tied to an embedding is an embedding.
        return all(place.usual for place in self.places) and self.param.requires_grad


def parameters_of(model: nn.Module) -> list[Target]:
    """Every parameter once, with all the places that hold it."""
    found: dict[int, Target] = {}
    for module_name, module in model.named_modules():
        clean = module_name.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for attribute, param in module._parameters.items():
            if param is not None:
                target = found.setdefault(id(param), Target(param))
                target.places.append(Place(module, clean, attribute))
    return list(found.values())


def _picked(pattern: str, targets: Iterable[Target]) -> list[Target]:
    hits = [target for target in targets if target.matches(pattern)]
    return [target for target in hits if target.usual] or hits


def _no_match(pattern: str, role: str, names: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or list(names)[:5]
    return ValueError(f"{role} pattern '{pattern}' matches no layer; did you mean {near}?")


def find_targets(model: nn.Module, include: Sequence[str] | None, keep_dense: Sequence[str]) -> list[Target]:
    """Linear, Conv and attention weights, or what `include` names, without what `keep_dense` names.

    A pattern chooses among the usual weights; where it matches none of those, it chooses whatever
    parameter it matches. Frozen weights stay as they are unless they are named.
    """
    for role, patterns in (("include", include or ()), ("keep_dense", keep_dense)):
        if isinstance(patterns, str):
            raise ValueError(f"{role} must be a sequence of patterns, got the string '{patterns}'")
        for pattern in patterns:
            if list(patterns).count(pattern) > 1:
                raise ValueError(f"{role} names '{pattern}' twice")
    everything = parameters_of(model)
    names = [target.name for target in everything if target.param.dim() > 1]
    chosen = [target for target in everything if target.usual]
    if include is not None:
        wanted: set[int] = set()
        for pattern in include:
            hits = _picked(pattern, everything)
            if not hits:
                raise _no_match(pattern, "include", names)
            wanted |= {id(target.param) for target in hits}
        chosen = [target for target in everything if id(target.param) in wanted]
    for pattern in keep_dense:
        left = [target for target in chosen if not target.matches(pattern)]
        if len(left) == len(chosen):
            raise _no_match(pattern, "keep_dense", [target.name for target in chosen])
        chosen = left
    if not chosen:
        sparse = [name for name, module in model.named_modules() if isinstance(module, SparseLayer)]
        raise ValueError(
            f"layers {sparse} are sparse already; densify() the Sparsifier that holds them first"
            if sparse
            else "no layer to sparsify: the model has no trainable Linear, Conv or attention weight "
            "left; name others with include=[...]"
        )
    return chosen
