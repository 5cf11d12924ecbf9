"""Convolutions, attention with its packed projection, and a tied embedding: names, densities, FLOPs."""

import torch
from torch import Tensor, nn

import sparsight as sp


class Block(nn.Module):
    """A small image model: two convolutions, one attention layer over the pixels, a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of a batch of images."""
        tokens = self.down(self.stem(image).relu()).relu().flatten(2).transpose(1, 2)
        seen = self.norm(tokens)
        tokens = tokens + self.attention(seen, seen, seen, need_weights=False)[0]
        return self.head(tokens.mean(1))


class TiedLanguageModel(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next word."""
        return self.out(self.mix(self.embed(words)).relu())


def main(*, steps: int = 60, width: int = 32, density: float = 0.2) -> None:
    torch.manual_seed(0)
    model = Block(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sparse = sp.sparsify(
        model,
        optimizer,
        density=density,
        method=sp.rigl(steps=steps, every=max(steps // 10, 1)),
        keep_dense=["stem"],  # nine weights a channel: not worth it
    )
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    # A convolution uses its weights once a pixel: give an input, so that the FLOPs are right.
    sparse.summary(images[:1])

    # A weight tied to an embedding is an embedding: it stays dense unless it is named, and is one layer.
    for include in (None, ["embed", "mix"]):
        tied = TiedLanguageModel(100, width)
        layers = sp.sparsify(tied, density=density, method=sp.static(), include=include).layers
        print(f"\ninclude={include}: {list(layers)}", end="")
    print(f"\nstill tied: {tied.out.weight is tied.embed.weight}")


if __name__ == "__main__":
    main()
