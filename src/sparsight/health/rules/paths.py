"""Rules on how tokens are divided among experts."""

from __future__ import annotations

import operator
from functools import partial

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.looking import (
    Numbers,
    Paths,
    column_means,
    listed,
    paths,
    percent,
    scalars,
    since,
    vectors,
)


def expert_collapse(history: History, *, room: float = 0.25, readings: int = 3) -> list[Finding]:
    """The load of a layer is that of a few experts.

    With k experts a token, the effective number of experts exp H(f) lies between k (always the same ones) and
    E (all alike). Collapsed is a layer that uses less than `room` of the way from k to E.
    """
    found = []
    for layer in paths(history, "effective_experts"):
        series = _used(history, layer)
        onset = since(series, lambda used: used < room, readings=readings)
        if onset is None:
            continue
        used = layer.k + series.last * (layer.experts - layer.k)
        shares = _shares(vectors(history, "moe/tokens_per_expert", layer.where), 1)
        top = int(shares.argmax()) if len(shares) else -1
        most = f", and expert {top} takes {percent(shares[top])} of the tokens' choices" if top >= 0 else ""
        found.append(
            Finding(
                "expert_collapse",
                "act",
                layer.where,
                int(series.steps[-1]),
                onset,
                f"{layer.where}: the load is that of {used:.1f} of {layer.experts} experts since step "
                f"{onset}{most}.",
                {"effective_experts": float(used), "experts": _busiest(shares), "shares": _plain(shares)},
            )
        )
    return found


def collapse_onset(
    history: History, *, room: float = 0.25, below: float = 0.6, fall: float = 0.2, ahead: int = 200
) -> list[Finding]:
    """The load is on its way to a few experts: at this pace a layer will have collapsed in `ahead` steps.

    Asked for are ten readings with a fall of `fall` of the room between k and E, most of them lower than the
    one before, so that a dip at the start of a training does not count.
    """
    found = []
    for layer in paths(history, "effective_experts"):
        series = _used(history, layer).tail(10)
        values = series.values
        if len(series) < 10 or series.steps[-1] - series.steps[0] < 50 or not np.isfinite(values).all():
            continue
        if not room <= values[-1] < below:
            continue
        early, late = values[:3].mean(), values[-3:].mean()
        span = max(1, int(series.steps[-2] - series.steps[1]))
        expected = late - (early - late) / span * ahead
        if early - late < fall or expected >= room or (np.diff(values) < 0).mean() < 0.7:
            continue
        onset = int(series.steps[values.argmax()])
        before, now = (layer.k + v * (layer.experts - layer.k) for v in (early, late))
        found.append(
            Finding(
                "collapse_onset",
                "warn",
                layer.where,
                int(series.steps[-1]),
                onset,
                f"{layer.where}: the load fell from {before:.1f} to {now:.1f} effective experts of "
                f"{layer.experts} since step {onset}; at this pace it collapses within {ahead} steps.",
                {"before": float(before), "now": float(now)},
            )
        )
    return found


def dead_experts(history: History, *, idle: int = 100, expected: float = 20.0) -> list[Finding]:
    """Experts without a token for `idle` steps, in which an even load would have brought `expected` or more.

    By chance an expert with an even share misses that many with probability exp(−20).
    """
    found = []
    for layer in paths(history, "idle_steps"):
        series = vectors(history, "moe/idle_steps", layer.where)
        if not len(series):
            continue
        waited = np.nan_to_num(series.last, posinf=0.0, neginf=0.0).clip(max=1e15)
        step = int(series.steps[-1])
        rate = _tokens_a_step(history, layer) / layer.experts
        dead = np.flatnonzero((waited >= idle) & ~(waited * rate < expected)).tolist()
        if not dead:
            continue
        onset = max(0, step - int(waited[dead].max()))
        found.append(
            Finding(
                "dead_experts",
                "act",
                layer.where,
                step,
                onset,
                f"{layer.where}: {len(dead)} of {layer.experts} experts ({listed(dead)}) had no token for "
                f"{int(waited[dead].min())} steps or more, since step {onset}.",
                {"experts": dead, "idle_steps": [int(waited[e]) for e in dead]},
            )
        )
    return found


def overload(
    history: History, *, times: float = 5.0, excess: float = 0.5, least: float = 2.5
) -> list[Finding]:
    """One expert has `times` the mean load, or `excess` of the way from an even share to every token.

    The step waits for the busiest expert, and a capacity would drop what is too much for it. Below `least`
    times the mean load, as with two of four experts a token, neither is worth a word.
    """
    found = []
    for layer in paths(history, "max_vio"):
        series = scalars(history, "moe/max_vio", layer.where)
        even = layer.k / layer.experts
        serious = max(least, (even + excess * (1 - even)) / even)
        limit = min(times, serious) - 1
        onset = since(series, partial(operator.le, limit))
        if onset is None:
            continue
        ratio = 1 + float(series.last)
        shares = _shares(vectors(history, "moe/tokens_per_expert", layer.where), 1)
        top = int(shares.argmax()) if len(shares) else -1
        who = f"expert {top}" if top >= 0 else "one expert"
        all_of_them = even * ratio
        found.append(
            Finding(
                "overload",
                "act" if ratio >= serious else "warn",
                layer.where,
                int(series.steps[-1]),
                onset,
                f"{layer.where}: {who} has {ratio:.1f} times the mean load, {percent(all_of_them)} of the "
                f"tokens, since step {onset}.",
                {"experts": [top] if top >= 0 else [], "ratio": ratio},
            )
        )
    return found


def dominance(
    history: History, *, window: int = 5, gain: float = 0.1, spread: float = 1.25, least: float = 2.0
) -> list[Finding]:
    """The more an expert has, the more it gets: the same one leads, grows, and the whole load spreads out.

    Over three windows the leader's share rises by `gain` of all tokens, it holds `least` times the mean, and
    the shares of the last window, fitted on those of the first, have a slope above `spread`. Where loads are
    held in balance, or differ by chance, that slope is at most 1.
    """
    found = []
    for layer in paths(history, "tokens_per_expert"):
        series = vectors(history, "moe/tokens_per_expert", layer.where).tail(3 * window)
        if len(series) < 3 * window or series.steps[-1] - series.steps[0] < 50:
            continue
        first, second, third = (
            _shares(Series(series.steps[i : i + window], series.values[i : i + window]), window) * layer.k
            for i in (0, window, 2 * window)
        )
        top, even = int(third.argmax()), layer.k / layer.experts
        off = first - first.mean()
        variance = float(off @ off)
        slope = float(off @ third) / variance if variance > 0 else 0.0
        rises = first[top] < second[top] < third[top] and third[top] - first[top] >= gain
        if not (rises and second.argmax() == top and third[top] >= least * even and slope > spread):
            continue
        leader = np.nan_to_num(series.values[:, top] / np.maximum(series.values.sum(1), 1e-12)) * layer.k
        low = np.flatnonzero(leader <= first[top] + 0.25 * (third[top] - first[top]))
        onset, step = int(series.steps[low[-1] if len(low) else 0]), int(series.steps[-1])
        found.append(
            Finding(
                "dominance",
                "warn",
                layer.where,
                step,
                onset,
                f"{layer.where}: expert {top} went from {percent(first[top])} to {percent(third[top])} of "
                f"the tokens since step {onset}, and shares spread {slope:.1f} times: who has more gets "
                "more.",
                {"experts": [top], "before": float(first[top]), "now": float(third[top]), "slope": slope},
            )
        )
    return found


def drop_rate(history: History, *, worth_a_look: float = 0.1, too_much: float = 0.25) -> list[Finding]:
    """Assignments dropped for lack of capacity: those tokens pass by their experts.

    At a capacity factor of 1.25 a balanced layer drops a few percent; one token in ten is more than chance
    does, one in four is a layer that serves three quarters of its data.
    """
    found = []
    for layer in paths(history, "drop_rate"):
        series = scalars(history, "moe/drop_rate", layer.where)
        onset = since(series, lambda rate: rate >= worth_a_look, readings=5, steps=40)
        if onset is None:
            continue
        rate = float(series.tail(5).values.mean())
        capacity = layer.about.get("capacity")
        factor = f" at a capacity factor of {capacity:g}" if isinstance(capacity, int | float) else ""
        found.append(
            Finding(
                "drop_rate",
                "act" if rate >= too_much else "warn",
                layer.where,
                int(series.steps[-1]),
                onset,
                f"{layer.where}: {percent(rate)} of the assignments are dropped{factor} since step {onset}.",
                {"drop_rate": rate, "capacity": capacity},
            )
        )
    return found


def _used(history: History, layer: Paths) -> Series:
    """How much of the way from k to E the effective number of experts is, reading by reading."""
    series = scalars(history, "moe/effective_experts", layer.where)
    if layer.experts <= layer.k:
        return series.tail(0) if len(series) else series
    return Series(series.steps, (series.values - layer.k) / (layer.experts - layer.k))


def _shares(tokens: Series, readings: int) -> Numbers:
    """Load shares over the last readings; empty where there is no load."""
    if not len(tokens):
        return np.empty(0)
    load = np.nan_to_num(column_means(tokens.values[-readings:]), posinf=0.0, neginf=0.0).clip(min=0)
    total = load.sum()
    return load / total if total > 0 else np.full(len(load), 1 / len(load))


def _busiest(shares: Numbers) -> list[int]:
    """Experts with more than twice an even share."""
    return [] if not len(shares) else np.flatnonzero(shares > 2 / len(shares)).tolist()


def _plain(shares: Numbers) -> list[float]:
    return [round(float(share), 4) for share in shares]


def _tokens_a_step(history: History, layer: Paths) -> float:
    """Assignments a step over the last readings; infinite where they were not counted."""
    tokens = vectors(history, "moe/tokens_per_expert", layer.where).tail(11)
    if not len(tokens):
        return float("inf")
    loads = np.nan_to_num(tokens.values).sum(1)
    if len(tokens) == 1:
        return float(loads[0]) / max(1, int(tokens.steps[0]))
    return float(loads[1:].sum()) / max(1, int(tokens.steps[-1] - tokens.steps[0]))
