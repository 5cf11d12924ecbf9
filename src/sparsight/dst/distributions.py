"""How many weights each layer owns: `Distribution = (sizes, density) -> {layer: count}`.

Counts are integers, no layer is left empty, and their sum is exactly the budget: what a density leaves
as fractions goes to the largest remainders. At least one weight *a row* is not promised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Sizes = Mapping[str, tuple[int, ...]]
Distribution = Callable[[Sizes, float], dict[str, int]]
"""(layer shapes, density) -> how many weights each layer owns."""


def apportion(shares: Mapping[str, float], budget: int, caps: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers in proportion to `shares`, between 1 and `caps`, whose sum is exactly `budget`.

    >>> apportion({"a": 1.5, "b": 1.5, "c": 7.0}, 10, {"a": 9, "b": 9, "c": 7})
    {'a': 2, 'b': 1, 'c': 7}
    """
    if not len(shares) <= budget <= sum(caps.values()):
        raise ValueError(
            f"a budget of {budget} weights for {len(shares)} layers: expected between "
            f"{len(shares)} (one a layer) and {sum(caps.values())} (all of them)"
        )
    counts = {name: min(max(int(shares[name]), 1), caps[name]) for name in shares}
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name])
    while (short := budget - sum(counts.values())) != 0:
        step = 1 if short > 0 else -1
        order = by_remainder if short > 0 else by_remainder[::-1]
        room = {n: caps[n] - counts[n] if step > 0 else counts[n] - 1 for n in order}
        open_layers = [n for n in order if room[n] > 0]
        # One each by remainder; where much is missing, whole rounds at a time.
        rounds = max(abs(short) // len(open_layers), 1)
        for name in open_layers[: abs(short)]:
            counts[name] += step * min(rounds, room[name])
    return counts


def total_budget(sizes: Sizes, density: float) -> int:
    """density · all positions, to the nearest whole weight."""
    return round(density * sum(math.prod(s) for s in sizes.values()))


def _scaled(sizes: Sizes, density: float, raw: Mapping[str, float]) -> dict[str, int]:
    """Densities ε·raw with ε chosen so that the budget is met; a layer that would pass 1 becomes dense.

    Layers tied at the largest density become dense together, then ε is solved again for the rest.
    """
    caps = {name: math.prod(shape) for name, shape in sizes.items()}
    budget = total_budget(sizes, density)
    dense: set[str] = set()
    while True:
        loose = [name for name in sizes if name not in dense]
        rest = budget - sum(caps[name] for name in dense)
        weight = sum(raw[name] * caps[name] for name in loose)
        scale = rest / weight if weight else 0.0
        top = max((raw[name] for name in loose), default=0.0)
        if not loose or scale * top <= 1.0:
            break
        dense |= {name for name in loose if math.isclose(raw[name], top)}
    shares = {n: float(caps[n]) if n in dense else scale * raw[n] * caps[n] for n in sizes}
    return apportion(shares, budget, caps)


@dataclass(frozen=True)
class uniform:  # noqa: N801 - a distribution reads like a function call
    """Every layer at the same density; the first one dense, as in the RigL paper, unless told otherwise.

    The dense first layer comes on top of the budget: the others hold `density` of their own weights.
    """

    first_dense: bool = True

    def __call__(self, sizes: Sizes, density: float) -> dict[str, int]:
        names = list(sizes)
        if not self.first_dense:
            return _scaled(sizes, density, dict.fromkeys(names, 1.0))
        if len(names) < 2 and density < 1:
            raise ValueError(
                f"uniform(first_dense=True) keeps the first layer dense and there is only {names}; "
                "use uniform(first_dense=False)"
            )
        rest = {name: sizes[name] for name in names[1:]}
        counts = {names[0]: math.prod(sizes[names[0]])}
        return counts | (_scaled(rest, density, dict.fromkeys(rest, 1.0)) if rest else {})


@dataclass(frozen=True)
class er:  # noqa: N801
    """Erdős–Rényi: density ∝ (n_in + n_out) / (n_in · n_out), kernel dimensions left out (SET)."""

    def __call__(self, sizes: Sizes, density: float) -> dict[str, int]:
        raw = {n: sum(s[:2]) / math.prod(s[:2]) for n, s in sizes.items()}
        return _scaled(sizes, density, raw)


@dataclass(frozen=True)
class erk:  # noqa: N801
    """Erdős–Rényi-kernel: density ∝ Σ dims / Π dims (RigL).

    >>> erk()({"a": (20, 10), "b": (10, 5)}, 0.5)
    {'a': 83, 'b': 42}
    """

    def __call__(self, sizes: Sizes, density: float) -> dict[str, int]:
        return _scaled(sizes, density, {n: sum(s) / math.prod(s) for n, s in sizes.items()})


@dataclass(frozen=True)
class by_name:  # noqa: N801
    """Densities by layer name or pattern; layers that no pattern names all have `density`.

    >>> by_name({"b*": 0.5})({"a": (10, 10), "b1": (4, 4)}, 0.1)
    {'a': 10, 'b1': 8}
    """

    densities: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, sizes: Sizes, density: float | None) -> dict[str, int]:
        named: dict[str, tuple[str, float]] = {}
        for pattern, wanted in self.densities.items():
            if not 0 < wanted <= 1:
                raise ValueError(f"density of '{pattern}' must lie in (0, 1], got {wanted}")
            hits = [name for name in sizes if fnmatchcase(name, pattern)]
            if not hits:
                raise ValueError(f"pattern '{pattern}' matches no layer; there are {list(sizes)}")
            for name in hits:
                if name in named:
                    raise ValueError(f"layer '{name}' is named twice, by '{named[name][0]}' and '{pattern}'")
                named[name] = (pattern, wanted)
        rest = {name: shape for name, shape in sizes.items() if name not in named}
        if rest and density is None:
            raise ValueError(f"no density for {list(rest)}: name them too, or give density=...")
        others = _scaled(rest, density, dict.fromkeys(rest, 1.0)) if rest and density else {}
        return {
            name: others[name] if name in others else max(round(named[name][1] * math.prod(shape)), 1)
            for name, shape in sizes.items()
        }
