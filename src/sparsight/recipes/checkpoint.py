"""Save a training and take it up again, bit for bit."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsight.recipes.stored import replace_file
from sparsight.recipes.training import Stateful, Training

FILE = "checkpoint.pt"

Followers = Mapping[str, Stateful]
"""Those who look on, in the order in which they take up what they knew: the watch, then its manager."""


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """The last evaluation."""


def save(run: Path, training: Training, progress: Progress, followers: Followers) -> None:
    """Model, optimizer, parts, generators and counters, in one file that is either old or new."""
    content = {
        "progress": vars(progress),
        "data": training.data,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "parts": {name: part.state_dict() for name, part in training.parts.items()},
        "followers": {name: part.state_dict() for name, part in followers.items()},
        "random": _random_state(),
    }
    replace_file(run / FILE, lambda stream: torch.save(content, stream))


def load(run: Path, training: Training, followers: Followers) -> Progress:
    """Take a fresh training of the same recipe and knobs to where the saved one was."""
    saved = read(run)
    if saved["data"] != training.data:
        raise ValueError(
            f"the data of '{run}' is not what it was when the run began (fingerprint {saved['data']}, now "
            f"{training.data}), so it cannot go on bit for bit"
        )
    if sorted(saved["parts"]) != sorted(training.parts):
        raise ValueError(
            f"the checkpoint of '{run}' holds the parts {sorted(saved['parts'])}, the recipe has "
            f"{sorted(training.parts)}"
        )
    try:
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"the checkpoint of '{run}' does not fit the recipe as it is now: {error}") from None
    for name, part in training.parts.items():
        part.load_state_dict(saved["parts"][name])
    for name, follower in followers.items():
        if name in saved["followers"]:
            follower.load_state_dict(saved["followers"][name])
    _set_random_state(saved["random"])
    return Progress(**saved["progress"])


def read(run: Path) -> dict[str, Any]:
    """The file's content; it is data, and nothing in it is executed."""
    file = run / FILE
    if not file.is_file():
        raise ValueError(f"'{run}' has no checkpoint: it was stopped before the first one was written")
    try:
        content: dict[str, Any] = torch.load(file, weights_only=True)
        Progress(**content["progress"])
    except (RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError, OSError) as error:
        raise ValueError(f"'{file}' is not a checkpoint that can be read: {error}") from None
    return content


def _random_state() -> dict[str, Any]:
    # A recipe of yours may use any of these.
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
