"""What a sparse model costs: multiply-adds of its weights, forward and per training step.

Counted: every Linear, Conv and attention weight, as many times as the model uses it. Not counted: norms,
activations, attention scores. A multiply-add is two FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsight.dst.find import parameters_of
from sparsight.dst.layer import Layer
from sparsight.dst.method import Method
from sparsight.dst.schedules import every
from sparsight.nn.layer import SparseLayer


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward pass and of one training step, and of each layer's forward."""

    forward: float
    forward_dense: float
    step: float
    step_dense: float
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def forward_ratio(self) -> float:
        return self.forward / self.forward_dense

    @property
    def step_ratio(self) -> float:
        return self.step / self.step_dense


def training_flops(
    method: Method, sparse: float, dense: float, *, start: float | None = None, backward: float = 0.0
) -> float:
    """FLOPs of an average training step from the cost of a forward pass, sparse and dense.

    RigL (3 f_S ΔT + 2 f_S + f_D) / (ΔT + 1); SET and static 3 f_S; SNFS 2 f_S + f_D; with latent weights
    2 f_S and the backward set; a ramp is integrated over the training from `start`. NaN where a method of
    one's own does not say how long the training is (`Method(steps=...)`).

    >>> from sparsight.dst.methods import rigl, static
    >>> training_flops(static(), 0.1, 1.0), round(training_flops(rigl(steps=1000), 0.1, 1.0), 4)
    (0.30000000000000004, 0.3089)
    """

    def at(cost: float) -> float:
        if method.latent is not None:
            return 2 * cost + (dense if method.latent.backward is None else backward)
        if method.gradient == "never":
            return 3 * cost
        if method.gradient == "always":
            return 2 * cost + dense
        period = _period(method)
        return (3 * cost * period + 2 * cost + dense) / (period + 1)

    if method.ramp is None:
        return at(sparse)
    if method.steps is None:
        return math.nan
    begin = sparse if start is None else start
    ramp = method.ramp
    costs = (at(sparse + (begin - sparse) * ramp(step)) for step in range(method.steps))
    return sum(costs) / method.steps


def _period(method: Method) -> float:
    if isinstance(method.due, every):
        return method.due.period
    if method.steps is None:
        return math.nan
    return method.steps / max(sum(method.due(step) for step in range(method.steps)), 1)


def count_flops(
    model: nn.Module,
    layers: Sequence[Layer],
    method: Method,
    inputs: Sequence[Any] = (),
    *,
    uses: Uses | None = None,
    instant: bool = False,
) -> Flops:
    """The FLOPs of a model whose sparse layers are `layers`, by one run on `inputs` if there are any, or by
    `uses` that were counted. `instant` is a step at the present density, not the average of a ramp."""
    by_param = {id(layer.weight.param): layer for layer in layers}
    if inputs:
        uses = _uses(model, inputs)
    dense = now = final = start = backward = 0.0
    by_layer: dict[str, float] = {}
    for target in parameters_of(model):
        layer = by_param.get(id(target.param))
        places = [p for p in target.places if p.usual] or (target.places if layer else [])
        if uses is None:
            times = float(bool(places))
        else:
            times = sum(uses.get((id(p.module), p.attribute), 0.0) for p in places)
        unit = 2.0 * times
        size = layer.topology.size if layer else target.param.numel()
        dense += unit * size
        if layer is not None:
            wider = layer.weight.backward or layer.topology
            by_layer[layer.name] = unit * layer.topology.nnz
        now += unit * (layer.topology.nnz if layer else size)
        final += unit * (layer.budget if layer else size)
        start += unit * (layer.start if layer else size)
        backward += unit * (wider.nnz if layer else size)
    if instant or method.ramp is None:
        step = training_flops(replace(method, ramp=None), now, dense, backward=backward)
    else:
        step = training_flops(method, final, dense, start=start, backward=backward)
    return Flops(now, dense, step, 3 * dense, by_layer)


Uses = dict[tuple[int, str], float]
"""How many times each weight is multiplied by, under the id of its module and its name there."""


class UseCounter:
    """Counts the uses of the weights of some modules, from now until `stop()`: outputs / rows."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.uses: Uses = {}
        self._handles = [
            module.register_forward_hook(self._count, with_kwargs=True)
            for module in modules
            if module._parameters
        ]

    def stop(self) -> None:
        """Let go of the modules."""
        for handle in self._handles:
            handle.remove()

    def _add(self, module: nn.Module, name: str, times: float) -> None:
        self.uses[id(module), name] = self.uses.get((id(module), name), 0.0) + times

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):
            # Its projections run inside one function; all of them see every token.
            tokens = (args[0] if args else kwargs["query"]).numel() / module.embed_dim
            for name, param in module._parameters.items():
                if param is not None and name.endswith("proj_weight"):
                    self._add(module, name, tokens)
            self._add(module.out_proj, "weight", tokens)
            return
        if isinstance(output, Tensor):
            for name, param in module._parameters.items():
                if param is not None and (param.dim() > 1 or name == "values"):
                    rows = module.topology.rows if isinstance(module, SparseLayer) else param.shape[0]
                    self._add(module, name, output.numel() / rows)


def _uses(model: nn.Module, inputs: Sequence[Any]) -> Uses:
    """The uses of one forward pass on `inputs`."""
    modes = {module: module.training for module in model.modules()}
    counter = UseCounter(model.modules())
    try:
        model.eval()
        with torch.enable_grad():  # without it, torch's fused transformer path bypasses the modules
            model(*inputs)
    finally:
        counter.stop()
        for module, training in modes.items():
            module.training = training
    return counter.uses
