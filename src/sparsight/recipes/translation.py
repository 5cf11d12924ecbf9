"""Translation: an encoder and a decoder on any pair of line-aligned files, Multi30k by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparsight.recipes.knobs import Paths, Weights
from sparsight.recipes.training import Training


def translation(
    *,
    source: Path | None = None,
    target: Path | None = None,
    test_source: Path | None = None,
    test_target: Path | None = None,
    vocabulary: int = 3000,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    longest: int = 40,
    steps: int = 300,
    batch: int = 32,
    lr: float = 3e-3,
    sentences: int = 100,
    seed: int = 0,
    weights: Weights = Weights(),
    paths: Paths = Paths(),
) -> Training:
    """Translate sentences with an encoder-decoder Transformer.

    Args:
        source: Sentences to translate, one a line; by default the English of Multi30k.
        target: Their translations, line by line; by default the German of Multi30k.
        test_source: Sentences to test on; by default the last twentieth of the source, or Multi30k's test.
        test_target: Their translations.
        vocabulary: Subwords that are learned from both files together.
        width: Numbers that describe a subword.
        layers: Transformer blocks of the encoder, and of the decoder.
        heads: Heads of each attention.
        longest: Subwords of a sentence; what is longer is cut.
        steps: Optimizer steps.
        batch: Pairs of sentences of a step.
        lr: Highest learning rate of AdamW.
        sentences: How many test sentences are translated to measure BLEU.
        seed: Of the weights, the topology and the order of the data.
        weights: Sparse weights.
        paths: Sparse paths.
    """
    import torch
    from torch import Tensor
    from torch.nn import functional

    from sparsight.recipes import loop
    from sparsight.recipes.text import BEGIN, END, PAD, aligned, numbered, subwords, trimmed
    from sparsight.recipes.transformer import Translator

    loop.check_positive(
        "translation", width=width, layers=layers, steps=steps, batch=batch, lr=lr, sentences=sentences
    )
    pairs, test_pairs = aligned(source, target, test_source, test_target)
    tokenizer = subwords([line for pair in pairs for line in pair], vocabulary)
    train_s, train_t = (numbered(tokenizer, [pair[side] for pair in pairs], longest) for side in (0, 1))
    test_s, test_t = (numbered(tokenizer, [pair[side] for pair in test_pairs], longest) for side in (0, 1))

    torch.manual_seed(seed)
    model = Translator(
        tokenizer.get_vocab_size(), length=longest, dim=width, heads=heads, layers=layers, paths=paths
    )
    optimizer = loop.adamw(model, lr)

    def losses(source_ids: Tensor, target_ids: Tensor, smooth: float) -> Tensor:
        """One for each written subword that is not padding."""
        source_ids, target_ids = trimmed(source_ids), trimmed(target_ids)
        seen, written = source_ids != PAD, target_ids[:, :-1]
        real = target_ids[:, 1:] != PAD
        memory = model.read(source_ids, seen)
        states = model.write(written, real, memory, seen)[real]
        logits = model.embedding.logits(states)
        return functional.cross_entropy(
            logits, target_ids[:, 1:][real], reduction="none", label_smoothing=smooth
        )

    def of_step(i: int) -> Tensor:
        rows = loop.rows_of(len(train_s), batch, seed, i)
        return losses(train_s[rows], train_t[rows], 0.1)

    def step(i: int) -> Mapping[str, float]:
        return {"loss": loop.update(model, optimizer, of_step(i).mean(), loop.learning_rate(lr, i, steps))}

    def evaluate() -> Mapping[str, float]:
        from sacrebleu import corpus_bleu

        first = slice(None, sentences)
        loss = torch.cat([losses(s, t, 0.0) for s, t in zip(test_s.split(64), test_t.split(64), strict=True)])
        asked = trimmed(test_s[first])
        written = model.greedy(asked, asked != PAD, begin=BEGIN, end=END, longest=longest).tolist()
        ended = [row[: row.index(END)] if END in row else row for row in written]
        answers = tokenizer.decode_batch(ended)
        bleu = corpus_bleu(answers, [[pair[1] for pair in test_pairs[first]]]).score
        return {"BLEU": bleu, "test_loss": loss.mean().item()}

    parts = weights.apply(model, optimizer, steps=steps, seed=seed, loss=lambda: of_step(0).mean())
    paths.follow(model, optimizer)
    known = loop.fingerprint(train_s, train_t, test_s, test_t)
    # No per-token losses: a written subword says nothing of any one token that the encoder read.
    return Training(model, optimizer, steps, step, evaluate, parts, data=known, main="BLEU")
