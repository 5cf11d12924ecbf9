"""Rules on sparse weights: whether the search for connections works, and whether enough of them are left."""

from __future__ import annotations

import math
import operator
from functools import partial

import numpy as np

from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.looking import (
    Numbers,
    average,
    highest_of,
    layer,
    middle,
    percent,
    plan,
    scalars,
    since,
    vectors,
)


def frozen_topology(history: History, *, early: float = 0.5, readings: int = 3) -> list[Finding]:
    """A method that is to search for connections has stopped, or never began.

    RigL and its relatives search for three quarters of the training. Frozen too early is a search that ended
    before `early` of it; where its length is not known, one that has been over for three times as long as it
    went on. `static()` and pruning methods do not search by choice.
    """
    asked = plan(history)
    fraction, updates = scalars(history, "sparse/drop_fraction"), scalars(history, "sparse/updates")
    if not asked.rewires or len(updates) < readings or not math.isfinite(updates.last):
        return []
    step, last = int(updates.steps[-1]), _last_search(fraction, updates)
    progress = asked.progress(step)
    stopped = since(fraction, lambda share: share <= 1e-9, readings=readings, steps=10) is not None
    if not last:
        # The first update may be far off. Nothing comes of a fraction of 0, or with half of the time over.
        bad = stopped or (progress is not None and progress >= early)
    elif progress is not None:
        # Updates that are far apart look like an end: ask for the fraction, or for three periods without one.
        silent = step - last > 3 * last / max(1.0, float(updates.last))
        bad = (stopped or silent) and last < early * step / progress
    else:
        bad = step - last >= max(100, 3 * last)
    if not bad:
        return []
    count = int(updates.last) if math.isfinite(updates.last) else 0
    of = f" of {asked.steps}" if asked.steps else ""
    told = f"stopped at step {last}{of}" if last else f"swapped nothing in {step} steps{of}"
    return [
        Finding(
            "frozen_topology",
            "act",
            "",
            step,
            last,
            f"the model: the search for connections ({asked.method}) {told}, after {count} updates with a "
            f"drop fraction of {float(fraction.last) if len(fraction) else 0:.2g} now; the topology is "
            "frozen.",
            {"last_update": last, "updates": count, "steps": asked.steps, "method": asked.method},
        )
    ]


def _last_search(fraction: Series, updates: Series) -> int:
    """The last reading by which an update with a drop fraction above 0 had come; 0 if there was none."""
    counts = np.nan_to_num(updates.values)
    came = np.diff(counts, prepend=0.0) > 0
    if len(fraction) == len(updates):
        shares = np.nan_to_num(fraction.values)
        # The fraction is read at the reading's own step; the update came between it and the reading before.
        came &= np.maximum(shares, np.concatenate(([shares[0]], shares[:-1]))) > 1e-9
    places = np.flatnonzero(came)
    return int(updates.steps[places[-1]]) if len(places) else 0


def short_lived_growth(history: History, *, share: float = 0.1, updates: int = 3) -> list[Finding]:
    """Grown weights that the next update drops again: fewer than `share` survive, `updates` times running.

    If grown weights were dropped no sooner than others, 1 − drop fraction of them would survive, usually 70 %
    and more. Below 10 %, nine growth decisions of ten are undone and the search stands still.
    """
    found = []
    for where in history.places("sparse/survival") if plan(history).rewires else ():
        series = vectors(history, "sparse/survival", where)
        first = Series(series.steps, series.values[:, 0]) if len(series) else series
        onset = since(first, lambda alive: alive < share, readings=updates, steps=1) if len(first) else None
        # While a layer is being pruned, the grown weights go with all the other small ones.
        density = scalars(history, "sparse/density", where).tail(updates * 10)
        if onset is None or (len(density) and density.values[0] > 1.01 * density.last):
            continue
        alive = average(first.tail(updates).values)
        found.append(
            Finding(
                "short_lived_growth",
                "warn",
                where,
                int(first.steps[-1]),
                onset,
                f"{where}: {percent(alive)} of the grown weights survive the next update since step {onset}; "
                "what is grown is dropped at once.",
                {"survival": alive},
            )
        )
    return found


def low_exploration(
    history: History, *, reach: float = 1.25, by: float = 0.4, updates: int = 20
) -> list[Finding]:
    """The search has seen little more than the first topology.

    What dynamic sparse training gains over a static topology comes from positions tried (ITOP, Liu et al.,
    2021). By `by` of the training (or after `updates` updates, where its length is not known) at least a
    quarter of the density should have been tried besides: an ITOP rate of `reach` times the density.
    """
    asked = plan(history)
    rate, density = scalars(history, "sparse/itop_rate"), scalars(history, "sparse/density")
    count = scalars(history, "sparse/updates")
    if not asked.rewires or not len(rate) or not len(density):
        return []
    step, start = int(rate.steps[-1]), highest_of(density.values)
    progress = asked.progress(step)
    enough = progress >= by if progress is not None else len(count) > 0 and count.last >= updates
    if not enough or not 0 < start <= 0.8 or not rate.last < min(1.0, reach * start):
        return []
    onset = int(rate.steps[0])
    return [
        Finding(
            "low_exploration",
            "warn",
            "",
            step,
            onset,
            f"the model: by step {step} the search has tried {percent(float(rate.last))} of the positions at "
            f"a density of {percent(start)} (since step {onset}); it explores next to nothing.",
            {"itop_rate": float(rate.last), "density": start},
        )
    ]


def dead_neurons(history: History, *, worth_a_look: float = 0.25, too_much: float = 0.5) -> list[Finding]:
    """Outputs of a sparse layer without a single weight: width that is paid for and not there.

    SRigL removes neurons on purpose, so that with it only a layer with few left is worth a look.
    """
    ablates = plan(history).method == "srigl"
    found = []
    for where in history.places("sparse/dead_neurons"):
        series = scalars(history, "sparse/dead_neurons", where)
        limit = 0.75 if ablates else worth_a_look
        # Recorded when a topology changes; it holds until the next change, so one reading tells.
        onset = since(series, partial(operator.le, limit), readings=1, steps=0)
        if onset is None:
            continue
        dead = float(series.last)
        found.append(
            Finding(
                "dead_neurons",
                "act" if dead >= too_much and not ablates else "warn",
                where,
                int(series.steps[-1]),
                onset,
                f"{where}: {percent(dead)} of the outputs have no weight since step {onset}.",
                {"dead_neurons": dead},
            )
        )
    return found


def over_sparsified(history: History, *, weights: float = 1.0, early: float = 0.5) -> list[Finding]:
    """So few weights that an output of a layer reads less than one input on average.

    At density × fan-in < 1 most paths through the layer are cut and gradients cannot say which to grow.
    Before `early` of the training that must be acted on; a network pruned so far at the end is worth a look.
    """
    progress = plan(history).progress(history.last_step)
    found = []
    for where in history.places("sparse/density"):
        shape = layer(history, where).get("shape")
        if not isinstance(shape, list | tuple) or len(shape) < 2:
            continue
        fan_in = math.prod(shape[1:])
        series = scalars(history, "sparse/density", where)
        onset = since(series, partial(operator.gt, weights / fan_in), steps=10)
        if onset is None or fan_in < 2:
            continue
        mean = float(series.last) * fan_in
        found.append(
            Finding(
                "over_sparsified",
                "act" if progress is None or progress < early else "warn",
                where,
                int(series.steps[-1]),
                onset,
                f"{where}: at a density of {percent(float(series.last))} an output has {mean:.2g} weights on "
                f"average since step {onset}; most paths through the layer are cut.",
                {"density": float(series.last), "weights_an_output": mean},
            )
        )
    return found


def pruned_too_fast(
    history: History, *, rise: float = 1.2, within: int = 200, least: float = 0.2
) -> list[Finding]:
    """Density fell, and the loss has not come back to where it was before.

    Looked at are the last `within` steps: a density lower by `least` of itself than at their start, and a
    loss `rise` times that of the readings before.
    """
    density, loss = scalars(history, "sparse/density"), scalars(history, "log/loss")
    if plan(history).method == "acdc" or len(density) < 6 or len(loss) < 10:
        return []
    step = int(density.steps[-1])
    recent = density.since(step - within)
    highest, now = highest_of(recent.values), float(recent.last)
    if not 0 < now < (1 - least) * highest:
        return []
    falling = np.flatnonzero(np.diff(recent.values) < 0)
    onset = int(recent.steps[falling[0]]) if len(falling) else step
    before, after = loss.until(onset).tail(5), loss.since(onset)
    if len(before) < 3 or len(after) < 10:
        return []
    was, is_now = middle(before.values), middle(after.tail(5).values)
    if not (was > 0 and is_now >= rise * was and _rose(before.values, after.tail(5).values)):
        return []
    return [
        Finding(
            "pruned_too_fast",
            "warn",
            "",
            step,
            onset,
            f"the model: density fell from {percent(highest)} to {percent(now)} from step {onset} on, and "
            f"the loss rose from {was:.3g} to {is_now:.3g}.",
            {"density_before": highest, "density": now, "loss_before": was, "loss": is_now},
        )
    ]


def _rose(before: Numbers, after: Numbers) -> bool:
    """Whether every reading after is above every one before, so that noise is no reason."""
    return bool(np.isfinite(before).all() and np.isfinite(after).all() and after.min() > before.max())
