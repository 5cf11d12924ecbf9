"""`sparsify`: from a dense model to a sparse one, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from sparsight import chance
from sparsight.dst.distributions import Distribution, by_name, erk
from sparsight.dst.explored import Explored
from sparsight.dst.find import Target, find_targets
from sparsight.dst.first import First, first_topologies
from sparsight.dst.layer import Layer, RunningMomentum
from sparsight.dst.method import Method
from sparsight.dst.sparsifier import Sparsifier, require_held
from sparsight.dst.structures import Unstructured
from sparsight.nn.compressed import CompressedWeight
from sparsight.nn.convert import compress, why_no_gain, why_not
from sparsight.nn.masked import MaskedWeight, is_masked
from sparsight.topology import Topology

Storage = Literal["auto", "compressed", "masked"]


def sparsify(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    method: Method,
    density: float | None = None,
    distribution: Distribution | Mapping[str, float] | None = None,
    storage: Storage = "auto",
    include: Sequence[str] | None = None,
    keep_dense: Sequence[str] = (),
    seed: int = 0,
) -> Sparsifier:
    """Make the weights of `model` sparse and keep them so while `optimizer` trains them.

    `density` is the share of weights that exist, over all sparse layers; `distribution` divides it among
    the layers (ERK unless told otherwise; a mapping gives densities by name or pattern). `include` and
    `keep_dense` are lists of names or patterns (`"blocks.*.mlp*"`). The model is changed in place.

    `storage="compressed"` replaces Linear layers by `SparseLinear`, whose parameter is the vector of existing
    weights (in the model and in the optimizer); "masked" keeps the dense parameter with zeros; "auto"
    compresses where that gains time. `summary()` says what each layer got and why.

    >>> import sparsight as sp
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> sparse = sp.sparsify(model, optimizer, density=0.1, method=sp.rigl(steps=1000))
    >>> sum(topology.nnz for topology in sparse.topologies.values())
    237
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the first argument must be the model, got {type(model).__name__}")
    _check_arguments(method, distribution, storage)
    targets = find_targets(model, include, keep_dense)
    weights = {target.name: target.param for target in targets}
    if optimizer is not None:
        require_held(optimizer, weights)
    if twice := [name for name, weight in weights.items() if is_masked(weight)]:
        raise ValueError(f"layers {twice} are sparse already; densify() the Sparsifier that holds them first")
    spread, density = _spread(distribution, density, method, weights)
    firsts = first_topologies(weights, density, spread, method, seed)
    layers = {
        target.name: _layer(model, optimizer, target, firsts[target.name], method, storage, seed)
        for target in targets
    }
    sparse = Sparsifier(model, layers, method, density, seed)
    return sparse if optimizer is None else sparse.attach(optimizer)


def _check_arguments(
    method: Method, distribution: Distribution | Mapping[str, float] | None, storage: str
) -> None:
    if not isinstance(method, Method):
        raise ValueError(f"method must be a Method such as sp.rigl(steps=10_000), got {method!r}")
    if storage not in Storage.__args__:  # type: ignore[attr-defined]
        raise ValueError(f"storage must be 'auto', 'compressed' or 'masked', got '{storage}'")
    if isinstance(distribution, type) or not (
        distribution is None or callable(distribution) or isinstance(distribution, Mapping)
    ):
        raise ValueError(
            f"distribution must be one such as sp.erk() or a mapping of densities, got {distribution!r}"
        )
    if method.initial is not None and method.initial_scope == "global":
        if distribution is not None:
            raise ValueError(
                f"method '{method.name}' ranks all layers together, so a distribution has no say; "
                "leave it out or use scope='layer'"
            )
        if not isinstance(method.structure, Unstructured):
            raise ValueError(f"method '{method.name}': a global ranking cannot keep {method.structure}")


def _spread(
    distribution: Distribution | Mapping[str, float] | None,
    density: float | None,
    method: Method,
    weights: Mapping[str, torch.Tensor],
) -> tuple[Distribution, float]:
    """The distribution to use and the density of the whole."""
    spread = by_name(distribution) if isinstance(distribution, Mapping) else distribution or erk()
    if method.density is not None:
        if density not in (None, method.density):
            raise ValueError(f"method '{method.name}' has density {method.density}, got density={density}")
        return spread, method.density
    if density is None and isinstance(spread, by_name):
        sizes = {name: tuple(weight.shape) for name, weight in weights.items()}
        counts = spread(sizes, None)
        return spread, sum(counts.values()) / sum(weight.numel() for weight in weights.values())
    if density is None:
        raise ValueError(f"method '{method.name}' needs a density in (0, 1], got none")
    if not (isinstance(density, int | float) and 0 < density <= 1):
        raise ValueError(f"density must lie in (0, 1], got {density}")
    if method.latent is not None and (method.latent.backward or 1.0) < density:
        raise ValueError(
            f"method '{method.name}': the backward density {method.latent.backward} must not be below "
            f"the density {density}"
        )
    return spread, density


def _layer(
    model: nn.Module,
    optimizer: Optimizer | None,
    target: Target,
    first: First,
    method: Method,
    storage: Storage,
    seed: int,
) -> Layer:
    momentum = None if method.momentum is None else RunningMomentum(method.momentum, target.param)
    why = _why_masked(model, target, first.topology, method, storage)
    weight: MaskedWeight | CompressedWeight
    if why is None:
        modules = [place.module for place in target.places]
        dense = [module for module in modules if isinstance(module, nn.Linear | nn.Conv2d)]
        weight = compress(model, dense, first.topology, optimizer)
    elif method.latent is None:
        weight = MaskedWeight(target.param, first.topology)
    else:
        weight = MaskedWeight(target.param, Topology.full(first.topology.shape, target.param.device))
    layer = Layer(
        name=target.name,
        weight=weight,
        start=first.start,
        budget=first.budget,
        target=first.topology.nnz,
        explored=Explored(first.topology),
        momentum=momentum,
        why=why or ("asked for" if storage == "compressed" else "it gains"),
    )
    if method.latent is not None:
        own = chance.mix(seed, target.name)
        backward = layer.backward_set(first.topology, method.latent.backward, own)
        layer.latent.choose(first.topology, backward)
        layer.latent.fall_asleep()
    return layer


def _why_masked(
    model: nn.Module, target: Target, topology: Topology, method: Method, storage: Storage
) -> str | None:
    """Why this weight is stored masked; None where it is compressed."""
    if storage == "masked":
        return "asked for"
    if method.latent is not None:
        return f"{method.name} keeps its missing weights"
    for place in target.places:
        if reason := why_not(model, place.module, place.attribute):
            return reason
    if storage == "auto" and method.ramp is not None:
        return "begins too dense to gain"
    return why_no_gain(topology) if storage == "auto" else None
