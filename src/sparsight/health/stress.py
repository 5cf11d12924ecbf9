"""`sp.stress`: how quality and routing change under shift. The model is the same afterwards, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sparsight import chance
from sparsight.dst.summary import text_table
from sparsight.dynamics.hugging_face import hugging_face
from sparsight.dynamics.records import Record
from sparsight.dynamics.routes import Adapter, Route, find_routes, routed
from sparsight.dynamics.watch import Watch
from sparsight.health import shifts as shifting
from sparsight.health.shifts import InputShift, RouterNoise, Shift
from sparsight.health.unchanged import unchanged, with_router_noise, without_expert

Quality = Callable[[nn.Module, Any], float]
"""(model, batch) → how good it is on it: more is better, 0 is worthless."""


@dataclass(frozen=True)
class Path:
    """What a routed layer did under a shift."""

    load: NDArray[np.float64]
    """Share of each expert."""
    entropy: float
    """Mean of H(p)/ln E over tokens."""
    change: float = 0.0
    """Total variation from the load without a shift: the share of the load that moved."""


@dataclass(frozen=True)
class Row:
    """One shift at one strength."""

    shift: str
    strength: str
    quality: float
    drop: float
    """1 − quality / clean quality."""
    paths: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Stress:
    """What `stress` found; the first row is without any shift. Print it for a table."""

    rows: tuple[Row, ...]

    @property
    def clean(self) -> Row:
        """Without a shift."""
        return self.rows[0]

    def worst(self) -> Row:
        """Where quality fell most."""
        return max(self.rows, key=lambda row: row.drop)

    def table(self, where: str | None = None) -> str:
        """The table of one routed layer, or of the means over all."""
        layers = list(self.clean.paths)
        if where is not None and where not in layers:
            raise ValueError(f"stress: no routed layer '{where}'; there are {layers}")
        chosen = layers if where is None else [where]
        head = ["shift", "strength", "quality", "drop", *(["load moved", "entropy"] if chosen else [])]
        return text_table(head, [_shown(row, chosen) for row in self.rows])

    def __str__(self) -> str:
        layers = list(self.clean.paths)
        if len(layers) < 2:
            return self.table()
        parts = [f"mean of {len(layers)} layers\n{self.table()}"]
        return "\n\n".join([*parts, *(f"{name}\n{self.table(name)}" for name in layers)])


def _shown(row: Row, layers: Sequence[str]) -> list[str]:
    told = [row.shift, row.strength, f"{row.quality:.4f}", f"{100 * row.drop:.1f} %"]
    if layers:
        moved = float(np.mean([row.paths[name].change for name in layers]))
        entropy = float(np.mean([row.paths[name].entropy for name in layers]))
        told += [f"{100 * moved:.1f} %", f"{entropy:.3f}"]
    return told


def accuracy_or_r2(model: nn.Module, batch: Any) -> float:
    """For batches (input, target): the share that is right for integer targets (negative ones are left out),
    1 − error²/variance for others."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise ValueError(
            "stress: expected batches (input, target); pass quality=(model, batch) → number else"
        )
    x, target = batch
    y = model(**x) if isinstance(x, Mapping) else model(x)
    y = getattr(y, "logits", y)
    if target.is_floating_point():
        if y.shape != target.shape:
            raise ValueError(f"stress: outputs {tuple(y.shape)} and targets {tuple(target.shape)} differ")
        error = (y - target).square().mean()
        return float(1 - error / target.var().clamp_min(1e-12))
    counted = target >= 0
    return float((y.argmax(-1) == target)[counted].float().mean())


def stress(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    quality: Quality = accuracy_or_r2,
    shifts: Sequence[Shift] = shifting.DEFAULT,
    adapters: Sequence[Adapter] = (),
    watch: Watch | None = None,
    seed: int = 0,
) -> Stress:
    """Try a model under shift: its inputs changed, an expert switched off, a router perturbed.

    `batches` are (input, target) pairs, or whatever `quality` takes; of a batch, the first tensor (or the
    first in the first mapping) is what is shifted. With `watch`, quality under the mildest strength of each
    shift is recorded, for the rule `falls_under_shift`. Inference only: nothing of the model changes.

    >>> import sparsight as sp
    >>> model, x = sp.MoE(8, 16, experts=4), torch.randn(64, 8)
    >>> found = sp.stress(model, [(x, model.eval()(x).detach())])
    >>> found.clean.quality, found.rows[1].shift
    (1.0, 'noise')
    """
    batches = list(batches)
    if not batches:
        raise ValueError("stress: no batches; expected at least one")
    routes = [r for r in find_routes(model, (*adapters, routed, hugging_face)) if r.family == "moe"]
    if watch is not None:
        routes = [r for r in watch.routes if r.family == "moe"]
    with unchanged(model):
        clean = _measure(model, batches, quality, routes, ("none", ""), None)
        rows = [clean]
        for shift in shifts:
            rows += _rows(model, batches, quality, routes, shift, clean, seed)
    found = Stress(tuple(rows))
    if watch is not None:
        _report(watch, found)
    return found


def _rows(
    model: nn.Module,
    batches: list[Any],
    quality: Quality,
    routes: list[Route],
    shift: Shift,
    clean: Row,
    seed: int,
) -> Iterator[Row]:
    if isinstance(shift, InputShift):
        for strength in shift.strengths:
            # One seed for all batches of a strength: a permutation is the same for the whole data.
            own = chance.mix(seed, shift.name) & ((1 << 63) - 1)
            moved = [
                _shifted(batch, shift, strength, own + i * _per_batch(shift))
                for i, batch in enumerate(batches)
            ]
            if any(batch is None for batch in moved):
                return
            yield _measure(model, moved, quality, routes, (shift.name, f"{strength:g}"), clean)
    elif isinstance(shift, RouterNoise):
        for strength in shift.strengths if routes else ():
            with with_router_noise(routes, strength, chance.mix(seed, shift.name)):
                yield _measure(model, batches, quality, routes, (shift.name, f"{strength:g}"), clean)
    else:
        for route in routes:
            for expert in range(route.experts):
                with without_expert(route, expert):
                    told = f"{route.name}[{expert}]"
                    yield _measure(model, batches, quality, routes, (shift.name, told), clean)


def _per_batch(shift: InputShift) -> int:
    return 0 if shift.change is shifting.permute_features else 1


def _shifted(batch: Any, shift: InputShift, strength: float, seed: int) -> Any:
    """A batch with its first tensor shifted; None where this shift means nothing to it."""
    if isinstance(batch, Tensor):
        return shift.change(batch, strength, seed)
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            if isinstance(value, Tensor):
                new = shift.change(value, strength, seed)
                return None if new is None else {**batch, key: new}
    if isinstance(batch, (tuple, list)) and batch:
        new = _shifted(batch[0], shift, strength, seed)
        return None if new is None else type(batch)([new, *batch[1:]])
    return None


def _measure(
    model: nn.Module,
    batches: list[Any],
    quality: Quality,
    routes: list[Route],
    name: tuple[str, str],
    clean: Row | None,
) -> Row:
    loads = {r.name: torch.zeros(r.experts, dtype=torch.float64) for r in routes}
    sums = {r.name: [0.0, 0.0] for r in routes}
    with _looking(routes, loads, sums):
        value = float(np.mean([quality(model, batch) for batch in batches]))
    paths = {}
    for route in routes:
        load = (loads[route.name] / loads[route.name].sum().clamp_min(1)).numpy()
        entropy, tokens = sums[route.name]
        change = 0.0
        if clean is not None:
            change = float(np.abs(load - clean.paths[route.name].load).sum() / 2)
        paths[route.name] = Path(load, entropy / max(tokens, 1) / math.log(max(route.experts, 2)), change)
    drop = 0.0 if clean is None else _drop(value, clean.quality)
    return Row(*name, value, drop, paths)


def _drop(value: float, clean: float) -> float:
    return (clean - value) / abs(clean) if clean else 0.0


@contextmanager
def _looking(routes: list[Route], loads: dict[str, Tensor], sums: dict[str, list[float]]) -> Iterator[None]:
    def hook(route: Route) -> Callable[..., None]:
        def passed(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            seen = route.see(module, args, kwargs, output)
            if seen is not None:
                loads[route.name] += seen.load().double().cpu()
                shares = seen.shares()
                sums[route.name][0] += float(torch.special.entr(shares).sum())
                sums[route.name][1] += shares.shape[0]

        return passed

    handles = [r.module.register_forward_hook(hook(r), with_kwargs=True) for r in routes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _report(watch: Watch, found: Stress) -> None:
    records = [Record(watch.step, "stress/quality", "", found.clean.quality)]
    mildest: dict[str, float] = {}
    for row in found.rows[1:]:
        name = f"{row.shift} {row.strength}" if row.shift == "expert off" else row.shift
        mildest.setdefault(name, row.quality)
    records += [Record(watch.step, "stress/quality", name, value) for name, value in mildest.items()]
    watch._emit(records)
