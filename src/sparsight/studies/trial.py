"""A study: arms that differ in one thing, run with the same seeds, and claims judged seed by seed.

Importing this file does not import torch, so that the command line can list the studies at once.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sparsight.recipes.training import Training

Verdict = Literal["supported", "contradicted", "undecided"]


@dataclass(frozen=True)
class Arm:
    """One way to do it."""

    name: str
    make: Callable[[int], Training]
    """From a seed to a run that is ready to start."""


@dataclass(frozen=True)
class Claim:
    """`better` beats `worse` in `metric`."""

    text: str
    better: str
    worse: str
    metric: str
    higher: bool
    """Whether more of the metric is better."""


@dataclass(frozen=True)
class Study:
    """A question, who says what about it, and what has to be run to see."""

    name: str
    question: str
    source: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    metrics: tuple[str, ...]
    """What is shown, first of all what the claims are about."""

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for claim in self.claims:
            for side in (claim.better, claim.worse):
                if side not in names:
                    raise ValueError(f"study '{self.name}': claim '{claim.text}' names no arm '{side}'")


@dataclass(frozen=True)
class Result:
    """How one arm ended with one seed."""

    arm: str
    seed: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    """A claim beside what was measured: the difference in its favour, paired by seed."""

    claim: Claim
    difference: float
    error: float
    """Standard error of the difference; infinite with one seed."""
    verdict: Verdict


def judge(claim: Claim, results: Sequence[Result]) -> Judged:
    """Supported or contradicted where the mean difference exceeds two standard errors, else undecided.

    >>> claim = Claim("b beats a", "b", "a", "accuracy", True)
    >>> results = [Result(arm, seed, {"accuracy": value + seed}) for seed in (0, 1, 2)
    ...            for arm, value in (("a", 0.5), ("b", 0.6 + 0.01 * seed))]
    >>> judge(claim, results).verdict
    'supported'
    """
    of = {(r.arm, r.seed): r.metrics[claim.metric] for r in results if claim.metric in r.metrics}
    seeds = sorted({seed for arm, seed in of if arm == claim.better and (claim.worse, seed) in of})
    sign = 1 if claim.higher else -1
    gains = [sign * (of[claim.better, seed] - of[claim.worse, seed]) for seed in seeds]
    if not gains:
        return Judged(claim, math.nan, math.inf, "undecided")
    mean = statistics.mean(gains)
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    verdict: Verdict = "undecided"
    if abs(mean) > 2 * error:
        verdict = "supported" if mean > 0 else "contradicted"
    return Judged(claim, mean, error, verdict)


def run(
    study: Study,
    seeds: int,
    out: Path,
    *,
    also: Callable[[Path], Mapping[str, float]] = lambda folder: {},
    say: Callable[[str], None] = print,
) -> list[Result]:
    """Run every arm with every seed, by turns; each is a run of its own in `out`, for `sparsight compare`.

    What is finished is not run again, so a study that was stopped goes on. `also` reads more numbers from
    the folder of a finished run.
    """
    from sparsight.recipes.run import train

    if seeds < 1:
        raise ValueError(f"a study needs at least one seed, got {seeds}")
    results = []
    for seed in range(seeds):
        for arm in study.arms:
            folder = out / f"{_plain(arm.name)}-{seed}"
            done = folder / "result.json"
            if done.is_file():
                metrics = json.loads(done.read_text())
            else:
                say(f"{study.name}: {arm.name}, seed {seed}")
                training = arm.make(seed)
                _clear(folder)
                outcome = train(
                    training, folder, evaluations=1, quiet=True, config={"arm": arm.name, "seed": seed}
                )
                if outcome.stopped_by is not None:
                    raise KeyboardInterrupt
                metrics = {**outcome.metrics, "seconds": outcome.seconds, **also(folder)}
                done.write_text(json.dumps(metrics))
            results.append(Result(arm.name, seed, metrics))
    (out / "study.json").write_text(json.dumps([asdict(r) for r in results], indent=1))
    return results


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).strip("-")


def _clear(folder: Path) -> None:
    """A run that was stopped half-way leaves files behind; this arm begins anew."""
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()


def report(study: Study, results: Sequence[Result]) -> str:
    """The question, the table, and what became of each claim."""
    from sparsight.dst.summary import text_table

    rows = []
    for arm in study.arms:
        own = [r.metrics for r in results if r.arm == arm.name]
        rows.append([arm.name, *(_mean(metric, own) for metric in (*study.metrics, "seconds"))])
    seeds = len({r.seed for r in results})
    lines = [study.question, f"({study.source}; mean ± standard deviation of {seeds} seeds)", ""]
    lines += [text_table(["", *study.metrics, "seconds"], rows), ""]
    for claim in study.claims:
        judged = judge(claim, results)
        error = f"{judged.error:.4f}" if math.isfinite(judged.error) else "unknown"
        lines.append(
            f"{judged.verdict}: {claim.text} "
            f"(paired difference {judged.difference:+.4f} in favour, standard error {error})"
        )
    return "\n".join(lines)


def _mean(metric: str, runs: Sequence[Mapping[str, float]]) -> str:
    values = [run[metric] for run in runs if metric in run]
    if not values:
        return "–"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {spread:.4f}"
