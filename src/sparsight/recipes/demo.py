"""`sparsight demo`: sparse weights, sparse paths and a run that is healed, in two minutes and one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsight.dst.summary import text_table
from sparsight.nn.compressed import CompressedWeight
from sparsight.recipes.healing import kinds
from sparsight.recipes.image import image
from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.language import language
from sparsight.recipes.run import Outcome, train
from sparsight.recipes.training import Training
from sparsight.report.together import Chapter, write_together


@dataclass(frozen=True)
class Sizes:
    """How long each part trains; the defaults fit two cores and two minutes."""

    image_steps: int = 300
    image_width: int = 512
    language_steps: int = 120
    language_width: int = 96
    healing_steps: int = 500


_USUAL = Sizes()


def demo(folder: Path, sizes: Sizes = _USUAL, *, say: Callable[[str], None] = print) -> Path:
    """Run all three parts below `folder` and return the path of the report."""
    taken = [run for part in ("weights", "paths", "healing") for run in (folder / part).glob("*/run.sqlite")]
    if taken:
        raise ValueError(f"'{folder}' holds the runs of an earlier demo; remove it or choose another --out")
    chapters = [
        _weights(folder / "weights", sizes, say),
        _paths(folder / "paths", sizes, say),
        _healing(folder / "healing", sizes, say),
    ]
    return write_together(folder / "report.html", "Sparsight demo", chapters)


def _go(training: Training, run: Path, name: str, say: Callable[[str], None], **options: Any) -> Outcome:
    say(f"  {name} …")
    outcome = train(training, run, quiet=True, evaluations=6, config={"arm": name}, **options)
    if outcome.stopped_by is not None:
        raise KeyboardInterrupt
    return outcome


def _weights(folder: Path, sizes: Sizes, say: Callable[[str], None]) -> Chapter:
    steps, width = sizes.image_steps, sizes.image_width
    say(f"Sparse weights: an MLP of width {width} on scikit-learn's digits, {steps} steps.")
    rows = []
    for name, density in (("dense", 1.0), ("RigL 90 %", 0.1)):
        weights = Weights(density=density, storage="compressed")
        training = image(width=width, steps=steps, weights=weights)
        outcome = _go(training, folder / name.split()[0].lower(), name, say)
        rows.append(
            [
                name,
                f"{100 * outcome.metrics['accuracy']:.1f} %",
                f"{1000 * outcome.seconds / outcome.steps:.1f}",
                f"{_bytes(training) / 1e6:.1f}",
            ]
        )
    table = text_table(["", "test accuracy", "ms a step", "MB to train"], rows)
    say(f"\n{table}\n(MB: weights, gradients, Adam's state, topology)\n")
    return Chapter("Sparse weights", "The same network dense and with a tenth of its weights.", folder)


def _bytes(training: Training) -> int:
    """Weights, gradients, optimizer state, and what the kernels keep of the topology."""
    total = 0
    for param in training.model.parameters():
        held = [param, param.grad, *training.optimizer.state.get(param, {}).values()]
        total += sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))
    sparse: Any = training.parts.get("sparse")
    for layer in {} if sparse is None else sparse.layers.values():
        if isinstance(layer.weight, CompressedWeight):
            total += layer.weight.index_bytes()
    return total


def _paths(folder: Path, sizes: Sizes, say: Callable[[str], None]) -> Chapter:
    steps, width = sizes.language_steps, sizes.language_width
    say(f"Sparse paths: a small GPT with 8 experts a block on Python's own source, {steps} steps.")
    rows = []
    arms: Mapping[str, Paths] = {
        "Switch": Paths(experts=8, estimator="switch"),
        "SparseMixer": Paths(experts=8, estimator="sparsemixer"),
    }
    for name, paths in arms.items():
        training = language(characters=500_000, width=width, steps=steps, batch=16, paths=paths)
        outcome = _go(training, folder / name.lower(), name, say)
        bits = f"{outcome.metrics['bits_per_character']:.3f}"
        rows.append([name, bits, f"{1000 * outcome.seconds / outcome.steps:.0f}", outcome.verdict])
    say(f"\n{text_table(['', 'bits a character', 'ms a step', 'health'], rows)}")
    say("(one seed and a short training: `sparsight study gradients` asks the question properly)\n")
    return Chapter("Sparse paths", "Routers with half of their gradient and with an estimate of all.", folder)


def _healing(folder: Path, sizes: Sizes, say: Callable[[str], None]) -> Chapter:
    steps = sizes.healing_steps
    say(f"Health: four experts whose router begins collapsed, left alone and managed, {steps} steps.")
    rows = []
    for name, sick, act in (("healthy", False, False), ("sick", True, False), ("healed", True, True)):
        outcome = _go(kinds(sick=sick, steps=steps), folder / name, name, say, act=act)
        rows.append([name, f"{outcome.metrics['explained']:.3f}", outcome.verdict])
    say(f"\n{text_table(['', 'explained', 'health at the end'], rows)}\n")
    said = "A router that sends every token to one expert: left alone, and found and acted on."
    return Chapter("A collapse, caught and healed", said, folder, whole="healed")
