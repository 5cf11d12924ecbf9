"""The studies. Each is one function whose keyword arguments are its knobs, and returns what to run.

Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sparsight.recipes.image import image
from sparsight.recipes.knobs import EstimatorName, MethodName, Paths, Weights
from sparsight.recipes.language import language
from sparsight.recipes.training import Training
from sparsight.studies.trial import Arm, Claim, Study


def connections(
    *,
    data: Literal["digits", "fashion-mnist", "mnist"] = "digits",
    density: float = 0.02,
    width: int = 256,
    steps: int = 1000,
) -> Study:
    """Do connections that move learn more than connections that stay?

    Args:
        data: What is classified; digits are at hand everywhere.
        density: Share of the weights that exist.
        width: Units of a layer of the MLP.
        steps: Optimizer steps of each run.
    """

    def arm(name: str, method: MethodName, share: float) -> Arm:
        def make(seed: int) -> Training:
            weights = Weights(density=share, method=method)
            return image(data=data, width=width, steps=steps, seed=seed, weights=weights)

        return Arm(name, make)

    return Study(
        "connections",
        f"Do connections that move learn more than connections that stay, at {density:g} of the weights?",
        "Mocanu et al. 2018 (SET); Evci et al. 2020 (RigL)",
        (
            arm("dense", "static", 1.0),
            arm("static", "static", density),
            arm("SET", "set", density),
            arm("RigL", "rigl", density),
        ),
        (
            Claim("SET ends more accurate than a static topology", "SET", "static", "accuracy", True),
            Claim("RigL ends more accurate than a static topology", "RigL", "static", "accuracy", True),
            Claim("RigL ends more accurate than SET", "RigL", "SET", "accuracy", True),
        ),
        ("accuracy", "test_loss"),
    )


def gradients(
    *, text: Path | None = None, experts: int = 8, width: int = 128, steps: int = 400, batch: int = 32
) -> Study:
    """Does a router learn more from the whole gradient than from half of it?

    Args:
        text: Any text file; by default the source of Python's standard library.
        experts: Experts of a block.
        width: Numbers that describe a character.
        steps: Optimizer steps of each run.
        batch: Pieces of text of a step.
    """

    def arm(name: str, estimator: EstimatorName, count: int) -> Arm:
        def make(seed: int) -> Training:
            paths = Paths(experts=count, estimator=estimator)
            return language(text=text, width=width, steps=steps, batch=batch, seed=seed, paths=paths)

        return Arm(name, make)

    metric = "bits_per_character"
    return Study(
        "gradients",
        "Does a router learn more from an estimate of its whole gradient than from half of it?",
        "Liu et al. 2023, 2024 (SparseMixer); Fedus et al. 2022 (Switch)",
        (
            arm("one expert", "switch", 0),
            arm("Switch", "switch", experts),
            arm("SparseMixer", "sparsemixer", experts),
            arm("midpoint", "midpoint", experts),
        ),
        (
            Claim("experts help: Switch ends below one expert", "Switch", "one expert", metric, False),
            Claim("SparseMixer ends below Switch", "SparseMixer", "Switch", metric, False),
            Claim("the plain midpoint rule ends below Switch", "midpoint", "Switch", metric, False),
        ),
        (metric,),
    )


def balance(
    *, text: Path | None = None, experts: int = 8, width: int = 128, steps: int = 400, batch: int = 32
) -> Study:
    """Does a bias balance experts as well as a loss, and at less cost?

    Args:
        text: Any text file; by default the source of Python's standard library.
        experts: Experts of a block.
        width: Numbers that describe a character.
        steps: Optimizer steps of each run.
        batch: Pieces of text of a step.
    """

    def arm(name: str, by: Literal["loss", "bias", "none"]) -> Arm:
        def make(seed: int) -> Training:
            paths = Paths(experts=experts, balance=by)
            return language(text=text, width=width, steps=steps, batch=batch, seed=seed, paths=paths)

        return Arm(name, make)

    metric = "bits_per_character"
    return Study(
        "balance",
        "Does a bias balance experts as well as a loss, and at less cost in quality?",
        "Wang et al. 2024 (loss-free balancing); Fedus et al. 2022 (Switch loss)",
        (arm("nothing", "none"), arm("Switch loss", "loss"), arm("loss-free bias", "bias")),
        (
            Claim("a Switch loss evens the load", "Switch loss", "nothing", "load_cv", False),
            Claim("a bias evens the load", "loss-free bias", "nothing", "load_cv", False),
            Claim("a bias ends below a Switch loss", "loss-free bias", "Switch loss", metric, False),
        ),
        (metric, "load_cv"),
    )


def load_of(folder: Path) -> Mapping[str, float]:
    """The variation of the load over the last fifth of a run, where tokens are routed."""
    from sparsight.dynamics.reading import load_run

    series = load_run(folder).get("moe/load_cv")
    if not len(series):
        return {}
    return {"load_cv": float(series.values[-max(len(series) // 5, 1) :].mean())}
