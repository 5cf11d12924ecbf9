"""Tiny data sets, made here: the suite needs no files and no network."""

import gzip
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsight.recipes import Paths, Training, Weights
from sparsight.recipes.find import find


def write_idx(path: Path, array: np.ndarray) -> None:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_images(folder: Path, *, count: int = 96, size: int = 8) -> Path:
    """Three classes: a bright upper, middle or lower third."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for split in ("train", "t10k"):
        labels = chance.integers(0, 3, count)
        pictures = chance.integers(0, 60, (count, size, size))
        for picture, label in zip(pictures, labels, strict=True):
            picture[label * size // 3 : (label + 1) * size // 3] += 150
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", pictures)
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels)
    return folder


_WORDS = {"red": "rot", "dog": "Hund", "runs": "rennt", "big": "groß", "cat": "Katze", "sees": "sieht"}


def _sentences(count: int) -> list[list[str]]:
    chance = random.Random(0)
    return [[chance.choice(list(_WORDS)) for _ in range(chance.randint(3, 6))] for _ in range(count)]


@dataclass(frozen=True)
class Tiny:
    """Files for every recipe, and knobs that make it small."""

    folder: Path

    def knobs(self, recipe: str) -> dict[str, Any]:
        folder = self.folder
        small = {"width": 16, "layers": 1, "heads": 2, "batch": 8}
        return {
            "image": {"data": "mnist", "path": folder / "images", "width": 32, "depth": 1, "batch": 16},
            "language": {"text": folder / "text.txt", "length": 16, **small},
            "translation": {
                "source": folder / "a.en",
                "target": folder / "a.de",
                "vocabulary": 60,
                "longest": 12,
                "sentences": 4,
                **small,
            },
            "electra": {
                "text": folder / "a.en",
                "labelled": folder / "labelled.tsv",
                "vocabulary": 60,
                "longest": 12,
                "tune": 6,
                **small,
            },
        }[recipe]

    def make(
        self, recipe: str, *, weights: Weights = Weights(), paths: Paths = Paths(), **knobs: Any
    ) -> Training:
        chosen = {**self.knobs(recipe), "weights": weights, "paths": paths, **knobs}
        return find(recipe)(**chosen)

    def arguments(self, recipe: str, *more: str) -> list[str]:
        """The same as words of a command line."""
        words = [recipe]
        for name, value in self.knobs(recipe).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        return [*words, *more]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    write_images(folder / "images")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sentences = _sentences(80)
    (folder / "a.en").write_text("\n".join(" ".join(words) for words in sentences) + "\n")
    german = [" ".join(_WORDS[word] for word in words) for words in sentences]
    (folder / "a.de").write_text("\n".join(german) + "\n")
    labels = [f"{' '.join(words)}\t{int('dog' in words)}" for words in sentences]
    (folder / "labelled.tsv").write_text("sentence\tlabel\n" + "\n".join(labels) + "\n")
    return Tiny(folder)
