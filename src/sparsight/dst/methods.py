"""The named methods: each an alias of a few lines over the same parts.

`steps` is the length of the training, `every` the number of optimizer steps between updates. A page for
each is in docs/methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from torch import Tensor

from sparsight.dst import criteria, initial
from sparsight.dst.method import (
    DenseMomentum,
    InitialScores,
    Latent,
    Method,
    by_global_score,
    by_layer,
    by_mean_momentum,
)
from sparsight.dst.schedules import Schedule, alternating, changes, constant, cosine, cubic
from sparsight.dst.schedules import every as each
from sparsight.dst.structures import NM, Block, ConstantFanIn

Scope = Literal["layer", "global"]


Fraction = float | Schedule
"""A share of the weights to swap: a number, which the method puts on its schedule, or a schedule."""


def _share(fraction: float) -> float:
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie in [0, 1] or be a schedule, got {fraction}")
    return fraction


def _cosine(fraction: Fraction, end: int) -> Schedule:
    return fraction if callable(fraction) else cosine(_share(fraction), end=end)


def _end(steps: int, share: float, every: int, name: str) -> int:
    if steps < 1:
        raise ValueError(f"{name}: steps must be the length of the training, got {steps}")
    if not 0 < share <= 1:
        raise ValueError(f"{name}: end must be a share of the training in (0, 1], got {share}")
    end = int(steps * share)
    if every < 1 or every > end:
        raise ValueError(
            f"{name}: an update every {every} steps that ends at step {end} never happens; "
            f"expected 1 <= every <= {end}"
        )
    return end


def static(*, initial: InitialScores | None = None) -> Method:
    """A topology that never changes, at random by default: the baseline of every sparse method.

    >>> static().name
    'static'
    """
    return Method("static", initial=initial)


def rigl(
    *,
    steps: int,
    fraction: Fraction = 0.3,
    every: int = 100,
    end: float = 0.75,
) -> Method:
    """Drop by magnitude, grow by gradient, on a cosine (Evci et al., 2020).

    The update replaces the weight step of the weights it may swap; none comes after `end` of the training.

    >>> rigl(steps=10_000).due(100), rigl(steps=10_000).due(7_600)
    (True, False)
    """
    last = _end(steps, end, every, "rigl")
    return Method(
        "rigl",
        grow=criteria.gradient,
        fraction=_cosine(fraction, last),
        due=each(every, end=last),
        replaces_step=True,
        gradient="due",
        steps=steps,
    )


def itop(*, steps: int, fraction: Fraction = 0.5, every: int = 1000, end: float = 0.75) -> Method:
    """RigL set to explore: long periods, large updates (Liu et al., 2021). See `Sparsifier.itop_rate`."""
    return replace(rigl(steps=steps, fraction=fraction, every=every, end=end), name="itop")


def set_(*, fraction: Fraction = 0.3, every: int = 100, end: int | None = None, std: float = 0.0) -> Method:
    """Drop the smallest of each sign, grow at random, after the weight step (Mocanu et al., 2018).

    The original updates once an epoch and draws new weights with std 0.1; `std=0` is the RigL family's.

    >>> set_(every=50).due(50)
    True
    """
    return Method(
        "set",
        drop=criteria.signed_magnitude,
        grow=criteria.random,
        fraction=fraction if callable(fraction) else constant(_share(fraction)),
        due=each(every, end=end),
        grow_std=std,
    )


def snfs(
    *,
    steps: int,
    fraction: Fraction = 0.5,
    every: int = 100,
    beta: float = 0.9,
    second: float | None = None,
) -> Method:
    """Sparse networks from scratch (Dettmers & Zettlemoyer, 2019): the layers compete by momentum.

    Needs the dense gradient at *every* step and one dense buffer a layer (two with `second`, which gives
    Adam's m/√v): the cost is that of a dense weight gradient throughout.
    """
    last = _end(steps, 1.0, every, "snfs")
    return Method(
        "snfs",
        grow=criteria.momentum,
        fraction=_cosine(fraction, last),
        due=each(every, end=last),
        gradient="always",
        share=by_mean_momentum,
        momentum=DenseMomentum(beta, second),
        steps=steps,
    )


def mest(
    *, steps: int, fraction: Fraction = 0.3, every: int = 100, weight: float = 1.0, end: float = 0.75
) -> Method:
    """Drop by |w| + weight·|g|, grow at random: no dense gradient ever (Yuan et al., 2021)."""
    last = _end(steps, end, every, "mest")
    return Method(
        "mest",
        drop=criteria.magnitude_and_gradient(weight),
        grow=criteria.random,
        fraction=_cosine(fraction, last),
        due=each(every, end=last),
        steps=steps,
    )


def top_kast(*, backward: float, every: int = 1, decay: float = 1e-4) -> Method:
    """Forward with the largest weights, gradients to a larger set (Jayakumar et al., 2020).

    `backward` is the density of the set that learns. Weight decay is `decay` in the forward set and
    `decay / density` in the rest, so that a newcomer has to earn its place. Keeps a dense copy of the
    weights.
    """
    if not 0 < backward <= 1:
        raise ValueError(f"top_kast: backward must be a density in (0, 1], got {backward}")
    return Method(
        "top_kast",
        grow=criteria.latent_magnitude,
        fraction=constant(1.0),
        due=each(every),
        initial=initial.magnitude,
        latent=Latent(backward, inside=decay, outside=decay, over_density=True),
    )


def gmp(
    *,
    steps: int,
    begin: float = 0.0,
    end: float = 0.75,
    every: int = 100,
    initial_density: float = 1.0,
    scope: Scope = "layer",
) -> Method:
    """Gradual magnitude pruning: from dense to the target on a cubic, never growing (Zhu & Gupta, 2017).

    The final density is reached exactly at `end` of the training.
    """
    first, last = int(steps * begin), _end(steps, end, every, "gmp")
    return Method(
        "gmp",
        due=each(every, start=first + every, end=last),
        share=by_layer if scope == "layer" else by_global_score,
        initial_density=initial_density,
        ramp=cubic(1.0, begin=first, end=last),
        steps=steps,
    )


def granet(
    *,
    steps: int,
    begin: float = 0.0,
    end: float = 0.75,
    every: int = 100,
    fraction: Fraction = 0.5,
    initial_density: float = 0.5,
    scope: Scope = "global",
) -> Method:
    """GMP that also regrows a share of what is left by gradient: neuroregeneration (Liu et al., 2021).

    Layers compete for the shrinking budget (`scope="global"`, the authors' code) or follow the
    distribution (`scope="layer"`).
    """
    first, last = int(steps * begin), _end(steps, end, every, "granet")
    return Method(
        "granet",
        grow=criteria.gradient,
        fraction=_cosine(fraction, last),
        due=each(every, start=first + every, end=last),
        replaces_step=True,
        gradient="due",
        share=by_layer if scope == "layer" else by_global_score,
        initial_density=initial_density,
        ramp=cubic(1.0, begin=first, end=last),
        steps=steps,
    )


def acdc(*, steps: int, phase: int = 500, warmup: float = 0.1, finish: float = 0.25) -> Method:
    """Alternate compressed and decompressed phases (Peste et al., 2021).

    Dense for `warmup` of the training, then sparse and dense phases of `phase` steps in turn, and sparse
    for the last `finish`. Weights that return start at zero.
    """
    first, last = int(steps * warmup), int(steps * (1 - finish))
    if phase < 1 or not 0 <= first < last:
        raise ValueError(
            f"acdc: expected phase >= 1 and warmup + finish < 1, got phase={phase}, "
            f"warmup={warmup}, finish={finish}"
        )

    ramp = alternating(phase, begin=first, end=last)
    return Method(
        "acdc", grow=criteria.random, due=changes(ramp), initial_density=1.0, ramp=ramp, steps=steps
    )


def srigl(
    *,
    steps: int,
    fraction: Fraction = 0.3,
    every: int = 100,
    end: float = 0.75,
    saliency: float = 0.3,
) -> Method:
    """RigL with a constant fan-in; neurons with too few salient weights are ablated (Lasby et al., 2024).

    A layer holds the largest multiple of its living neurons that its budget allows.
    """
    base = rigl(steps=steps, fraction=fraction, every=every, end=end)
    return replace(base, name="srigl", structure=ConstantFanIn(saliency))


def nm(n: int = 2, m: int = 4, *, every: int = 1, decay: float = 2e-4) -> Method:
    """N of every M inputs, trained straight-through with SR-STE's decay (Zhou et al., 2021).

    All weights live and learn; the forward pass sees the N largest of each M. `density` is n/m.
    """
    return Method(
        "nm",
        grow=criteria.latent_magnitude,
        fraction=constant(1.0),
        due=each(every),
        structure=NM(n, m),
        initial=initial.magnitude,
        density=n / m,
        latent=Latent(outside=decay),
    )


def block(
    rows: int,
    cols: int,
    *,
    steps: int,
    fraction: Fraction = 0.3,
    every: int = 100,
    end: float = 0.75,
) -> Method:
    """RigL on whole blocks of `rows` x `cols` weights: scores are summed over a block."""
    if rows < 1 or cols < 1:
        raise ValueError(f"block: rows and cols must be at least 1, got {rows}x{cols}")
    base = rigl(steps=steps, fraction=fraction, every=every, end=end)
    return replace(base, name="block", structure=Block(rows, cols))


def snip(loss: Callable[[], Tensor], *, scope: Scope = "global") -> Method:
    """Keep the connections with the largest |g·w| at initialisation, then train them (Lee et al., 2019).

    `loss` computes the loss of one batch with the model as it is.

    >>> import torch
    >>> layer, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
    >>> snip(lambda: layer(x).square().mean()).name
    'snip'
    """
    return Method("snip", initial=initial.Snip(loss), initial_scope=scope)


def grasp(loss: Callable[[], Tensor], *, scope: Scope = "global") -> Method:
    """Keep the connections that carry the gradient's norm, w·Hg, at initialisation (Wang et al., 2020)."""
    return Method("grasp", initial=initial.Grasp(loss), initial_scope=scope)
