"""Texts from files on this machine, as characters, lines or subwords. Nothing is downloaded."""

from __future__ import annotations

import gzip
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsight.recipes.data import folder_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END, UNKNOWN, MASK = range(5)
_SPECIAL = ["[PAD]", "[BEGIN]", "[END]", "[UNKNOWN]", "[MASK]"]


def read_text(file: Path) -> str:
    """A text file, gzipped or not."""
    if not file.is_file():
        raise ValueError(f"there is no text file '{file}'")
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"'{file}' is not UTF-8 text: {error}") from None


def find_text(folder: Path, name: str) -> Path:
    """`name` or `name.gz` in a folder."""
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise ValueError(f"'{folder}' has no file '{name}' or '{name}.gz'")


def standard_library(characters: int) -> str:
    """Source of Python's own standard library, which is on every machine that can run this."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for file in sorted(folder.glob("*.py")):
        if size >= characters:
            break
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(parts[-1])
    if not parts:
        raise ValueError(f"Python's standard library has no source in '{folder}'; give a text by its path")
    return "".join(parts)[:characters]


@dataclass(frozen=True)
class Characters:
    """The most frequent characters of a text; the rarest share one place.

    >>> letters = Characters.of("abba c", 3)
    >>> letters.ids("abc").tolist()
    [2, 3, 0]
    """

    known: tuple[str, ...]

    @classmethod
    def of(cls, text: str, most: int = 128) -> Characters:
        """From a text."""
        ranked = sorted(Counter(text).items(), key=lambda pair: (-pair[1], pair[0]))
        return cls(("\ufffd", *sorted(letter for letter, _ in ranked[:most])))

    def ids(self, text: str) -> Tensor:
        """One number a character."""
        place = {letter: number for number, letter in enumerate(self.known)}
        return torch.tensor([place.get(letter, 0) for letter in text], dtype=torch.int64)


def subwords(lines: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte-pair subwords learned from these lines. The same lines give the same subwords."""
    try:
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("subwords need the package tokenizers: pip install 'sparsight[app]'") from None
    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=_SPECIAL, show_progress=False, limit_alphabet=256
    )
    tokenizer.train_from_iterator(lines, trainer, length=len(lines))
    return tokenizer


def numbered(tokenizer: Tokenizer, lines: Sequence[str], longest: int) -> Tensor:
    """[lines, ≤ longest]: [BEGIN], the subwords of each line, [END], then padding; what is longer is cut."""
    rows = [
        [BEGIN, *encoded.ids[: longest - 2], END]
        for encoded in tokenizer.encode_batch(list(lines), add_special_tokens=False)
    ]
    ids = torch.full((len(rows), max(len(row) for row in rows)), PAD, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids


def trimmed(ids: Tensor) -> Tensor:
    """Without the columns that are padding in every row."""
    return ids[:, : int((ids != PAD).sum(1).max())]


def aligned(
    source: Path | None, target: Path | None, test_source: Path | None, test_target: Path | None
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs of lines to train and to test on: Multi30k, or files, whose last twentieth may be the test."""
    if (source is None) != (target is None) or (test_source is None) != (test_target is None):
        raise ValueError(
            "translation: source and target come together, and so do test_source and test_target"
        )
    if source is None or target is None:
        folder = folder_of("multi30k")
        source, target = find_text(folder, "train.en"), find_text(folder, "train.de")
        test = "test_2016_flickr"
        test_source = test_source or find_text(folder, f"{test}.en")
        test_target = test_target or find_text(folder, f"{test}.de")
    pairs = _pairs(source, target)
    if test_source is not None and test_target is not None:
        return pairs, _pairs(test_source, test_target)
    held_out = max(len(pairs) // 20, 1)
    return pairs[:-held_out], pairs[-held_out:]


def _pairs(source: Path, target: Path) -> list[tuple[str, str]]:
    left, right = read_text(source).splitlines(), read_text(target).splitlines()
    if len(left) != len(right):
        raise ValueError(
            f"'{source}' has {len(left)} lines and '{target}' {len(right)}: line n must be the translation "
            "of line n"
        )
    pairs = [(a.strip(), b.strip()) for a, b in zip(left, right, strict=True) if a.strip() and b.strip()]
    if len(pairs) < 2:
        raise ValueError(
            f"'{source}' and '{target}' hold {len(pairs)} pairs of sentences; expected 2 at least"
        )
    return pairs


@dataclass(frozen=True)
class Labelled:
    """Sentences and the class of each."""

    sentences: list[str]
    classes: Tensor


def read_labelled(file: Path) -> Labelled:
    """`sentence<tab>class` in each line (SST-2), or CoLA's four columns, whose second is the class."""
    sentences, classes = [], []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        cells = line.split("\t")
        sentence, label = (cells[3], cells[1]) if len(cells) == 4 else (cells[0], cells[-1])
        if number == 1 and label == "label":
            continue  # a heading
        if len(cells) not in (2, 4) or not label.isdecimal():
            raise ValueError(
                f"'{file}', line {number}: expected a sentence, a tab and a class as a number, got {line!r}"
            )
        sentences.append(sentence)
        classes.append(int(label))
    if not sentences:
        raise ValueError(f"'{file}' has no labelled sentence")
    return Labelled(sentences, torch.tensor(classes))


def english(
    text: Path | None, task: str, labelled: Path | None, test_labelled: Path | None
) -> tuple[list[str], Labelled, Labelled]:
    """Sentences to pre-train on, labelled ones to fine-tune on and to test on."""
    if text is None:
        text = find_text(folder_of("english"), "wordnet-glosses.txt")
    sentences = [line.strip() for line in read_text(text).splitlines() if line.strip()]
    if not sentences:
        raise ValueError(f"'{text}' has no sentence")
    if labelled is None:
        if test_labelled is not None:
            raise ValueError("electra: test_labelled needs labelled beside it")
        folder = folder_of("english")
        train, test = (read_labelled(find_text(folder, f"{task}-{part}.tsv")) for part in ("train", "dev"))
        return sentences, train, test
    train = read_labelled(labelled)
    if test_labelled is not None:
        return sentences, train, read_labelled(test_labelled)
    cut = max(len(train.sentences) // 10, 1)
    if cut == len(train.sentences):
        raise ValueError(f"'{labelled}' has one labelled sentence; expected more")
    return (
        sentences,
        Labelled(train.sentences[:-cut], train.classes[:-cut]),
        Labelled(train.sentences[-cut:], train.classes[-cut:]),
    )
