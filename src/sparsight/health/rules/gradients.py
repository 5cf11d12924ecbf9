"""Rules on gradients: who gets one, who gets too much, and who gets one that changes nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.looking import (
    Numbers,
    Paths,
    column_means,
    column_medians,
    layer,
    listed,
    middle,
    paths,
    percent,
    scalars,
    vectors,
)

_LAYERS = ("sparse", "dense")
_NORMS = (
    "moe/grad_norm",
    "moe/router_grad_norm",
    "depth/router_grad_norm",
    *(f"{family}/grad_norm" for family in _LAYERS),
)


def non_finite_gradient(history: History, *, readings: int = 3) -> list[Finding]:
    """NaN or infinity in the gradient of an expert, router or layer: the next step destroys its weights."""
    found: dict[str, Finding] = {}
    for name in _NORMS:
        for where in history.places(name):
            series = history.get(name, where)
            bad = ~np.isfinite(series.values[-readings:])
            if where in found or not bad.any():
                continue
            every = ~np.isfinite(series.values)
            onset = int(series.steps[np.flatnonzero(every.reshape(len(every), -1).any(1))[0]])
            experts = np.flatnonzero(bad.any(0)).tolist() if bad.ndim == 2 else []
            part = "the router's gradient" if "router" in name else "the gradient"
            whose = f"{part} of expert {listed(experts)}" if experts else part
            found[where] = Finding(
                "non_finite_gradient",
                "act",
                where,
                int(series.steps[-1]),
                onset,
                f"{where}: {whose} is NaN or infinite since step {onset}.",
                {"experts": experts, "quantity": name},
            )
    return list(found.values())


def exploding_gradient(
    history: History, *, times: float = 10.0, act: float = 100.0, now: int = 3, past: int = 50
) -> list[Finding]:
    """The gradient of one path or layer grew by `times` over its own past, and the others' did not.

    A learning rate that suited it is now ten times too large for it. The middle of the last `now` readings is
    set against the lower quartile of the `past` ones before, so that one odd batch does not count.
    """
    found = []
    for path in paths(history, "grad_norm"):
        series = vectors(history, "moe/grad_norm", path.where)
        growth, level = _growth(series, now, past)
        grown = np.flatnonzero(growth >= times).tolist()
        large = [e for e in grown if level[e] >= times * middle(np.delete(level, e)[np.delete(level, e) > 0])]
        if large:
            worst = max(large, key=lambda expert: growth[expert])
            one = Series(series.steps, series.values[:, worst])
            whose = f"{path.where}: the gradient of expert {worst}"
            evidence = {"experts": large, "growth": float(growth[worst]), "grad_norm": float(level[worst])}
            found.append(_exploding(one, path.where, whose, evidence, times, act))
    layers: dict[str, tuple[Series, float, float]] = {}
    for family in _LAYERS:
        for where in history.places(f"{family}/grad_norm"):
            series = scalars(history, f"{family}/grad_norm", where)
            growth, level = _growth(Series(series.steps, series.values.reshape(-1, 1)), now, past)
            if len(growth):
                layers[where] = (series, float(growth[0]), float(level[0]))
    usual = middle(np.array([growth for _, growth, _ in layers.values()], np.float64))
    height = middle(np.array([level for _, _, level in layers.values()], np.float64))
    for where, (series, growth_of, level_of) in layers.items():
        # With every layer's gradient growing, the loss diverges, and that is another finding. And a layer
        # that was asleep and wakes up to what is usual among the others begins to learn.
        alone = len(layers) == 1
        if growth_of >= times and (alone or (growth_of >= times * usual and level_of > height)):
            evidence = {"experts": [], "growth": growth_of, "grad_norm": level_of}
            found.append(_exploding(series, where, f"{where}: the gradient", evidence, times, act))
    return found


def _growth(series: Series, now: int, past: int) -> tuple[Numbers, Numbers]:
    """Growth of each column over its own past, and its level now; empty with too little past."""
    if len(series) < now + 5:
        return np.empty(0), np.empty(0)
    level = column_medians(series.values[-now:])
    # The lower quartile: a path that exploded a while ago is still set against how it was before.
    before = _quartile(series.values[-now - past : -now])
    return np.where(before > 0, level / np.where(before > 0, before, 1.0), 0.0), level


def _quartile(values: Numbers) -> Numbers:
    """The lower quartile of each column; sorting puts NaN last."""
    return np.asarray(np.sort(values, axis=0)[len(values) // 4])


def _exploding(
    series: Series, where: str, whose: str, evidence: dict[str, Any], times: float, act: float
) -> Finding:
    growth, level = evidence["growth"], evidence["grad_norm"]
    small = np.flatnonzero(~(series.values >= level / math.sqrt(times)))
    onset = int(series.steps[min(int(small[-1]) + 1, len(series) - 1) if len(small) else 0])
    return Finding(
        "exploding_gradient",
        "act" if growth >= act else "warn",
        where,
        int(series.steps[-1]),
        onset,
        f"{whose} grew {growth:.3g} times, to a norm of {level:.2g}, from step {onset} on, and the others' "
        "did not.",
        evidence,
    )


def starved_parameters(
    history: History, *, share: float = 0.1, window: int = 10, silent: int = 100
) -> list[Finding]:
    """Parameters that get a gradient in less than `share` of the steps in which they could.

    An expert could in those steps in which an even load would bring it a token: with λ tokens an expert and
    step, 1 − exp(−λ) of them. A layer could in all of them.
    """
    found = []
    for path in paths(history, "update_freq"):
        finding = _starved_experts(history, path, share, window, silent)
        found += [] if finding is None else [finding]
    for where in history.places("sparse/update_freq"):
        series = vectors(history, "sparse/update_freq", where).tail(3)
        if len(series) < 3 or not np.isfinite(series.values).all():
            continue
        rare = float(series.values[:, 0].min())  # the lowest of ten bins: a gradient in a tenth of the steps
        if rare >= 0.5:
            onset, step = int(series.steps[0]), int(series.steps[-1])
            found.append(
                Finding(
                    "starved_parameters",
                    "warn",
                    where,
                    step,
                    onset,
                    f"{where}: {percent(rare)} of the existing weights have a gradient in less than a tenth "
                    f"of the steps, since step {onset} or before.",
                    {"share": rare},
                )
            )
    return found + _silent_layers(history, silent)


def _starved_experts(history: History, path: Paths, share: float, window: int, silent: int) -> Finding | None:
    series = vectors(history, "moe/update_freq", path.where).tail(window)
    tokens = vectors(history, "moe/tokens_per_expert", path.where).tail(window)
    if len(series) < window or len(tokens) < window:
        return None
    step, onset = int(series.steps[-1]), int(series.steps[0])
    span = max(1, step - onset)
    rate = float(np.nan_to_num(tokens.values[1:]).sum()) / span / path.experts
    frequency = column_means(series.values)
    idle = vectors(history, "moe/idle_steps", path.where)
    # Experts that get nothing at all are dead, which is a finding of its own.
    alive = idle.last < silent if len(idle) and len(idle.last) == len(frequency) else frequency > 0
    could = 1 - math.exp(-rate)
    starved = np.flatnonzero((frequency < share * could) & alive).tolist()
    # Fewer than twenty steps in which it could have learned prove nothing.
    if not starved or could * span < 20:
        return None
    worst = float(frequency[starved].min())
    return Finding(
        "starved_parameters",
        "warn",
        path.where,
        step,
        onset,
        f"{path.where}: {len(starved)} of {path.experts} experts ({listed(starved)}) learn in "
        f"{percent(worst)} of the steps since step {onset}; with an even load it would be "
        f"{percent(1 - math.exp(-rate))}.",
        {"experts": starved, "update_freq": [float(frequency[e]) for e in starved]},
    )


def _silent_layers(history: History, silent: int) -> list[Finding]:
    """Layers that are watched and have had no gradient for `silent` steps."""
    found: list[Finding] = []
    norms = [s for (name, _), s in history.series.items() if name in ("dense/grad_norm", "sparse/grad_norm")]
    # The latest reading, not the latest step: users log their own numbers between readings.
    last = max((int(series.steps[-1]) for series in norms if len(series)), default=0)
    layers = history.meta.get("layers", ())
    for entry in layers if last and isinstance(layers, list | tuple) else ():
        family, where = (entry.get("family"), entry.get("name")) if isinstance(entry, dict) else ("", "")
        if family not in _LAYERS or not isinstance(where, str):
            continue
        series = scalars(history, f"{family}/grad_norm", where)
        onset = int(series.steps[-1]) if len(series) else 0
        if last - onset >= silent:
            found.append(
                Finding(
                    "starved_parameters",
                    "warn",
                    where,
                    last,
                    onset,
                    f"{where or 'the model'}: no gradient for {last - onset} steps, since step {onset}; "
                    "these parameters do not learn.",
                    {"silent_steps": last - onset},
                )
            )
    return found


def capacity_without_competence(
    history: History, *, ratio: float = 1e-3, window: int = 10, served: float = 0.1
) -> list[Finding]:
    """Parameters that are used and no longer change the loss.

    To first order a step changes the loss by lr·|g|². An expert that serves at least `served` of the mean
    load at every reading, with a gradient below `ratio` of its peers', changes it a million times less than
    they do; so does a layer with a gradient that much below the other layers'.
    """
    found = []
    for path in paths(history, "grad_norm"):
        series = vectors(history, "moe/grad_norm", path.where).tail(window)
        tokens = vectors(history, "moe/tokens_per_expert", path.where).tail(window)
        if len(series) < window or series.values.shape != tokens.values.shape:
            continue
        norms, load = column_medians(series.values), np.nan_to_num(tokens.values)
        busy = (load >= served * load.mean(1, keepdims=True)).all(0) & (load > 0).all(0)
        # A gradient is that of the reading's own step, in which a rare expert may have had no token.
        frequency = vectors(history, "moe/update_freq", path.where).tail(window)
        if frequency.values.shape == load.shape:
            busy &= frequency.values.mean(0) > 0.9
        usual = middle(norms[busy])
        idle = np.flatnonzero(busy & (norms < ratio * usual)).tolist()
        if idle:
            onset = int(series.steps[0])
            found.append(
                Finding(
                    "capacity_without_competence",
                    "warn",
                    path.where,
                    int(series.steps[-1]),
                    onset,
                    f"{path.where}: {len(idle)} of {path.experts} experts ({listed(idle)}) serve tokens and "
                    f"do not change the loss: gradient {float(norms[idle].max()):.1g} where the usual is "
                    f"{usual:.2g}, since step {onset}.",
                    {"experts": idle, "grad_norm": [float(norms[e]) for e in idle], "usual": usual},
                )
            )
    return found + _idle_layers(history, ratio, window)


def _idle_layers(history: History, ratio: float, window: int) -> list[Finding]:
    norms: dict[tuple[str, str], tuple[float, Series]] = {}
    for family in _LAYERS:
        for where in history.places(f"{family}/grad_norm"):
            series = scalars(history, f"{family}/grad_norm", where).tail(window)
            if len(series) == window:
                # Per root of its size where that is known: a large layer has a larger norm from the same
                # signal.
                shape = layer(history, where).get("shape")
                size = math.sqrt(max(1, math.prod(shape))) if isinstance(shape, list | tuple) else 1.0
                norms[family, where] = (middle(series.values) / size, series)
    usual = middle(np.array([norm for norm, _ in norms.values()], np.float64))
    found = []
    for (_, where), (norm, series) in norms.items():
        if norm < ratio * usual * 0.1:
            onset = int(series.steps[0])
            found.append(
                Finding(
                    "capacity_without_competence",
                    "warn",
                    where,
                    int(series.steps[-1]),
                    onset,
                    f"{where}: the gradient is {norm / usual:.1g} of the usual layer's since step {onset}; "
                    "these parameters do not change the loss.",
                    {"ratio": norm / usual},
                )
            )
    return found
