"""A character language model: a small GPT on the source of Python's standard library, or any text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.training import Tap, Training


def language(
    *,
    text: Path | None = None,
    characters: int = 2_000_000,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    length: int = 64,
    steps: int = 400,
    batch: int = 32,
    lr: float = 3e-3,
    seed: int = 0,
    weights: Weights = Weights(),
    paths: Paths = Paths(),
) -> Training:
    """Predict the next character with a small GPT.

    Args:
        text: Any text file, gzipped or not; by default the source of Python's standard library.
        characters: How much of it is used, at most. The last twentieth is held out.
        width: Numbers that describe a character.
        layers: Transformer blocks.
        heads: Heads of each attention.
        length: Characters that the model sees at once.
        steps: Optimizer steps.
        batch: Pieces of text of a step.
        lr: Highest learning rate of AdamW.
        seed: Of the weights, the topology and the order of the data.
        weights: Sparse weights.
        paths: Sparse paths.
    """
    import math

    import torch
    from torch import Tensor
    from torch.nn import functional

    from sparsight.recipes import loop
    from sparsight.recipes.text import Characters, read_text, standard_library
    from sparsight.recipes.transformer import GPT

    loop.check_positive(
        "language", width=width, layers=layers, length=length, steps=steps, batch=batch, lr=lr
    )
    content = standard_library(characters) if text is None else read_text(text)[:characters]
    letters = Characters.of(content)
    ids = letters.ids(content)
    held_out = max(len(ids) // 20, 1)
    train, test = ids[:-held_out], ids[-held_out:]
    if len(test) <= length:
        raise ValueError(
            f"language: a text of {len(ids)} characters is too short to hold out pieces of {length}; "
            f"expected more than {20 * (length + 1)}"
        )

    torch.manual_seed(seed)
    model = GPT(len(letters.known), length=length, dim=width, heads=heads, layers=layers, paths=paths)
    optimizer = loop.adamw(model, lr)
    tap = Tap()

    def pieces(source: Tensor, count: int, generator: torch.Generator) -> Tensor:
        begin = torch.randint(len(source) - length, (count, 1), generator=generator)
        return source[begin + torch.arange(length + 1)]

    def losses(piece: Tensor) -> Tensor:
        logits = model(piece[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="none")

    def step(i: int) -> Mapping[str, float]:
        each = losses(pieces(train, batch, loop.generator_of(seed, "piece", i)))
        tap(each.detach())
        return {"loss": loop.update(model, optimizer, each.mean(), loop.learning_rate(lr, i, steps))}

    def evaluate() -> Mapping[str, float]:
        held = pieces(test, 256, loop.generator_of(0, "test"))
        loss = torch.cat([losses(part) for part in held.split(batch)]).mean().item()
        return {"test_loss": loss, "bits_per_character": loss / math.log(2)}

    first = pieces(train, batch, loop.generator_of(seed, "piece", 0))
    parts = weights.apply(model, optimizer, steps=steps, seed=seed, loss=lambda: losses(first).mean())
    paths.follow(model, optimizer)
    return Training(
        model, optimizer, steps, step, evaluate, parts, tap, loop.fingerprint(ids), "bits_per_character"
    )
