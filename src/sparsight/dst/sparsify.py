"""`sparsify`: from a dense model to a sparse one, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsight.dst import chance
from sparsight.dst.distributions import Distribution, by_name, erk, total_budget
from sparsight.dst.explored import Explored
from sparsight.dst.find import Target, find_targets
from sparsight.dst.layer import Layer, RunningMomentum
from sparsight.dst.method import Method
from sparsight.dst.rewire import Fill, Structure, best
from sparsight.dst.sparsifier import Sparsifier, require_held
from sparsight.nn.masked import MaskedWeight
from sparsight.topology import Topology


def sparsify(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    method: Method,
    density: float | None = None,
    distribution: Distribution | Mapping[str, float] | None = None,
    storage: str = "masked",
    include: Sequence[str] | None = None,
    keep_dense: Sequence[str] = (),
    seed: int = 0,
) -> Sparsifier:
    """Make the weights of `model` sparse and keep them so while `optimizer` trains them.

    `density` is the share of weights that exist, over all sparse layers; `distribution` divides it among
    the layers (ERK unless told otherwise; a mapping gives densities by name or pattern). `include` and
    `keep_dense` are lists of names or patterns (`"blocks.*.mlp*"`). The model is changed in place.

    >>> import sparsight as sp
    >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> sparse = sp.sparsify(model, optimizer, density=0.1, method=sp.rigl(steps=1000))
    >>> sum(int((p != 0).sum()) for p in (model[0].weight, model[2].weight))
    237
    """
    if storage != "masked":
        raise ValueError(f"storage must be 'masked', got '{storage}'")
    density = _density(density, method)
    targets = find_targets(model, include, keep_dense)
    weights = {target.name: target.param for target in targets}
    if optimizer is not None:
        require_held(optimizer, weights)
    sizes = {name: tuple(weight.shape) for name, weight in weights.items()}
    spread = by_name(distribution) if isinstance(distribution, Mapping) else distribution or erk()

    budgets = _counts(spread, sizes, density, method.structure)
    starts = budgets
    if method.initial_density is not None:
        starts = _counts(spread, sizes, max(method.initial_density, density), method.structure)
    scores = method.initial(weights) if method.initial is not None else None
    if scores is not None and method.initial_scope == "global":
        budgets = starts = _global_counts(scores, total_budget(sizes, density))
    topologies = {
        name: _first_topology(name, weight, starts[name], method.structure, scores, seed)
        for name, weight in weights.items()
    }
    layers = {
        target.name: _layer(target, topologies[target.name], starts, budgets, method, seed)
        for target in targets
    }
    sparse = Sparsifier(model, layers, method, density, seed)
    return sparse if optimizer is None else sparse.attach(optimizer)


def _density(density: float | None, method: Method) -> float:
    if density is None:
        if method.density is None:
            raise ValueError(f"method '{method.name}' needs a density in (0, 1], got none")
        return method.density
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    if method.density is not None and density != method.density:
        raise ValueError(f"method '{method.name}' has density {method.density}, got density={density}")
    return density


def _counts(
    spread: Distribution, sizes: Mapping[str, tuple[int, ...]], density: float, structure: Structure
) -> dict[str, int]:
    counts = spread(sizes, density)
    fitted = {}
    for name, wanted in counts.items():
        try:
            fitted[name] = structure.feasible(sizes[name], wanted)
        except ValueError as error:
            raise ValueError(f"layer '{name}': {error}") from None
    return fitted


def _global_counts(scores: Mapping[str, Tensor], budget: int) -> dict[str, int]:
    """One ranking over all layers; each has at least its best weight."""
    ranked = []
    for score in scores.values():
        score = score.double().cpu()
        score[score.argmax()] = torch.inf
        ranked.append(score)
    everything = torch.cat(ranked)
    chosen = best(everything, budget, torch.arange(everything.numel()), seed=0)
    parts = chosen.split([score.numel() for score in ranked])
    return {name: int(part.sum()) for name, part in zip(scores, parts, strict=True)}


def _first_topology(
    name: str,
    weight: Tensor,
    count: int,
    structure: Structure,
    scores: Mapping[str, Tensor] | None,
    seed: int,
) -> Topology:
    shape = tuple(weight.shape)
    own = chance.mix(seed, name, "first")
    places = torch.arange(weight.numel(), device=weight.device)
    score = chance.uniform(places, own) if scores is None else scores[name]
    if bad := int(score.isnan().sum()):
        raise ValueError(f"layer '{name}': {bad} of {score.numel()} initial scores are NaN")
    filled = structure.fill(None, places[:0], iter([(places, score)]), Fill(shape, count, own))
    return Topology.from_positions(shape, filled)


def _layer(
    target: Target,
    topology: Topology,
    starts: Mapping[str, int],
    budgets: Mapping[str, int],
    method: Method,
    seed: int,
) -> Layer:
    name, param = target.name, target.param
    full = Topology.full(topology.shape, topology.col.device)
    weight = MaskedWeight(param, full if method.latent is not None else topology)
    layer = Layer(
        name=name,
        places=target.places,
        weight=weight,
        start=starts[name],
        budget=budgets[name],
        target=starts[name],
        explored=Explored(topology),
        momentum=None if method.momentum is None else RunningMomentum(method.momentum, param),
    )
    if method.latent is not None:
        weight.choose(topology, layer.backward_set(topology, method.latent.backward, chance.mix(seed, name)))
        weight.sleep()
    return layer
