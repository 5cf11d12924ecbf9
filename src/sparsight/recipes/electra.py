"""ELECTRA: a generator fills gaps, a discriminator finds what it filled in, and then learns from labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.training import Tap, Training


def electra(
    *,
    text: Path | None = None,
    task: Literal["sst2", "cola"] = "sst2",
    labelled: Path | None = None,
    test_labelled: Path | None = None,
    lines: int = 20_000,
    vocabulary: int = 2000,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    longest: int = 32,
    steps: int = 300,
    tune: int = 250,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
    weights: Weights = Weights(),
    paths: Paths = Paths(),
) -> Training:
    """Pre-train as ELECTRA does, then fine-tune on labelled sentences.

    Args:
        text: Sentences to pre-train on, one a line; by default english/wordnet-glosses.txt of SPARSIGHT_DATA.
        task: Which labelled sentences of that folder to fine-tune on.
        labelled: Labelled sentences of your own: sentence, tab, class.
        test_labelled: Labelled sentences to test on; by default the last tenth of `labelled`.
        lines: How many lines of the text are used, at most.
        vocabulary: Subwords that are learned from the text.
        width: Numbers that describe a subword; the generator has half of them.
        layers: Transformer blocks of the discriminator; the generator has half of them.
        heads: Heads of each attention.
        longest: Subwords of a sentence; what is longer is cut.
        steps: Optimizer steps of pre-training.
        tune: Optimizer steps of fine-tuning, which follow.
        batch: Sentences of a step.
        lr: Highest learning rate of AdamW, in both.
        seed: Of the weights, the topology and the order of the data.
        weights: Sparse weights.
        paths: Sparse paths.
    """
    import torch
    from torch import Tensor
    from torch.nn import functional

    from sparsight.recipes import loop
    from sparsight.recipes.text import PAD, english, numbered, subwords, trimmed
    from sparsight.recipes.twins import Twins, matthews

    loop.check_positive("electra", width=width, layers=layers, steps=steps, tune=tune, batch=batch, lr=lr)
    sentences, train, test = english(text, task, labelled, test_labelled)
    sentences = sentences[:lines]
    tokenizer = subwords(sentences, vocabulary)
    ids = numbered(tokenizer, sentences, longest)
    train_ids, test_ids = (numbered(tokenizer, part.sentences, longest) for part in (train, test))
    held_out = max(len(ids) // 50, 1)
    pre_ids, held_ids = ids[:-held_out], ids[-held_out:]

    torch.manual_seed(seed)
    model = Twins(
        tokenizer.get_vocab_size(),
        classes=int(train.classes.max()) + 1,
        length=longest,
        dim=width,
        heads=heads,
        layers=layers,
        paths=paths,
    )
    optimizer = loop.adamw(model, lr)
    tap = Tap()

    def gaps(i: int) -> tuple[Tensor, Tensor]:
        """How well step i's gaps are filled and the fillings are found: one number a gap, one a subword."""
        rows = loop.rows_of(len(pre_ids), batch, seed, i)
        return model.losses(trimmed(pre_ids[rows]), loop.generator_of(seed, "gaps", i))

    def step(i: int) -> Mapping[str, float]:
        if i < steps:
            filled, found = gaps(i)
            tap(found.detach())
            loss = filled.mean() + 50 * found.mean()  # the paper's weight: finding is the easier loss
            total = loop.update(model, optimizer, loss, loop.learning_rate(lr, i, steps))
            return {"loss": total, "generator": filled.mean().item(), "discriminator": found.mean().item()}
        i -= steps
        rows = loop.rows_of(len(train_ids), batch, seed, i)
        batch_ids = trimmed(train_ids[rows])
        each = functional.cross_entropy(model.classify(batch_ids), train.classes[rows], reduction="none")
        tap(each.detach().repeat_interleave((batch_ids != PAD).sum(1)))  # a subword pays for its sentence
        return {"loss": loop.update(model, optimizer, each.mean(), loop.learning_rate(lr, i, tune))}

    def evaluate() -> Mapping[str, float]:
        generator = loop.generator_of(0, "held out")
        filled, found = model.losses(trimmed(held_ids[:256]), generator)
        guesses = torch.cat([model.classify(trimmed(part)).argmax(1) for part in test_ids.split(128)])
        right = (guesses == test.classes).double().mean().item()
        return {
            "accuracy": right,
            "matthews": matthews(guesses, test.classes),
            "generator": filled.mean().item(),
            "discriminator": found.mean().item(),
        }

    def first() -> Tensor:
        filled, found = gaps(0)
        return filled.mean() + 50 * found.mean()

    parts = weights.apply(
        model, optimizer, steps=steps + tune, seed=seed, loss=first, keep_dense=("classifier", "detector")
    )
    paths.follow(model, optimizer)
    known = loop.fingerprint(ids, train_ids, train.classes, test_ids, test.classes)
    return Training(model, optimizer, steps + tune, step, evaluate, parts, tap, known, "accuracy")
