"""ELECTRA's two networks in one module: a small generator, and the discriminator that is kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsight.recipes.knobs import Paths
from sparsight.recipes.text import BEGIN, END, MASK, PAD
from sparsight.recipes.transformer import Encoder


class Twins(nn.Module):
    """Replaced token detection (Clark et al., 2020), and a classifier on top of the discriminator."""

    def __init__(
        self, vocabulary: int, *, classes: int, length: int, dim: int, heads: int, layers: int, paths: Paths
    ) -> None:
        super().__init__()
        self.generator = Encoder(
            vocabulary,
            length=length,
            dim=dim // 2,
            heads=max(heads // 2, 1),
            layers=max(layers // 2, 1),
            paths=paths,
        )
        self.discriminator = Encoder(
            vocabulary, length=length, dim=dim, heads=heads, layers=layers, paths=paths
        )
        self.detector = nn.Linear(dim, 1)
        self.classifier = nn.Linear(dim, classes)

    def losses(self, ids: Tensor, noise: torch.Generator, share: float = 0.15) -> tuple[Tensor, Tensor]:
        """The generator's loss for each gap, and the discriminator's for each subword. `noise` makes both.

        The generator's guesses are drawn, not chosen, and no gradient flows through the draw.
        """
        real = ids != PAD
        word = real & (ids != BEGIN) & (ids != END)
        gap = word & (torch.rand(ids.shape, generator=noise) < share)
        gap[0, 1] = True  # at least one, whatever was drawn: a mean of nothing is no loss
        states = self.generator(ids.masked_fill(gap, MASK), real)[gap]
        logits = self.generator.embedding.logits(states)
        filled = functional.cross_entropy(logits, ids[gap], reduction="none")
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=noise).squeeze(1)
        replaced = ids.masked_scatter(gap, drawn)
        score = self.detector(self.discriminator(replaced, real)).squeeze(-1)[real]
        found = functional.binary_cross_entropy_with_logits(
            score, (replaced != ids)[real].float(), reduction="none"
        )
        return filled, found

    def classify(self, ids: Tensor) -> Tensor:
        """[N, T] → [N, classes], from the mean over the subwords of a sentence."""
        real = ids != PAD
        states = self.discriminator(ids, real) * real[..., None]
        return self.classifier(states.sum(1) / real.sum(1, keepdim=True))  # type: ignore[no-any-return]


def matthews(guesses: Tensor, classes: Tensor) -> float:
    """Matthews' correlation, the measure of CoLA: 0 for chance, whatever the classes' shares.

    >>> matthews(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 1, 0]))
    1.0
    >>> matthews(torch.tensor([1, 1, 1, 1]), torch.tensor([0, 1, 1, 0]))
    0.0
    """
    count = int(torch.max(guesses.max(), classes.max())) + 1
    table = torch.zeros(count, count, dtype=torch.float64)
    table.index_put_((classes, guesses), torch.ones_like(classes, dtype=torch.float64), accumulate=True)
    is_, said, total = table.sum(1), table.sum(0), table.sum()
    top = table.trace() * total - (is_ * said).sum()
    below = ((total**2 - said.square().sum()) * (total**2 - is_.square().sum())).sqrt()
    return float(top / below) if below else 0.0
