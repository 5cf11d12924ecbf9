"""Transformers of a few layers, whose feed-forward blocks may be mixtures of experts.

Shapes: N sequences of T tokens, D wide. A mask [N, T] is False for padding, which no attention sees and no
expert is given.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsight as sp
from sparsight.recipes.knobs import Paths


class Attention(nn.Module):
    """Attention of `heads` heads to the sequence itself, or to another one."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"a width of {dim} cannot be divided among {heads} heads")
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(
        self, x_NTD: Tensor, to_NSD: Tensor, mask_NS: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """[N, T, D] → [N, T, D]. A causal one takes no mask: padding at the end is never looked at."""
        key, value = self.key_value(to_NSD).chunk(2, dim=-1)
        query, key, value = (self._split(x) for x in (self.query(x_NTD), key, value))
        seen = None if mask_NS is None or causal else mask_NS[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(query, key, value, seen, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """Attention to itself, to `memory` where it has one, then feed-forward; each x + f(norm(x))."""

    def __init__(
        self, dim: int, heads: int, paths: Paths, *, causal: bool = False, across: bool = False
    ) -> None:
        super().__init__()
        self.causal = causal
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.across_norm = nn.LayerNorm(dim) if across else None
        self.across = Attention(dim, heads) if across else None
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = paths.block(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """[N, T, D] → [N, T, D]."""
        y = self.norm(x)
        x = x + self.attention(y, y, mask, self.causal)
        if self.across is not None:
            assert self.across_norm is not None
            assert memory is not None
            x = x + self.across(self.across_norm(x), memory, memory_mask)
        y = self.mlp_norm(x)
        return x + (self.mlp(y, mask=mask) if isinstance(self.mlp, sp.MoE) else self.mlp(y))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Tokens and their places; the same matrix gives the logits at the end."""

    def __init__(self, vocabulary: int, length: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.place = nn.Embedding(length, dim)
        nn.init.normal_(self.token.weight, std=dim**-0.5)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """[N, T] → [N, T, D]."""
        if ids.shape[1] > self.place.num_embeddings:
            raise ValueError(f"{ids.shape[1]} tokens are more than the {self.place.num_embeddings} places")
        return self.token(ids) + self.place.weight[: ids.shape[1]]  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """[..., D] → [..., vocabulary]."""
        return functional.linear(x, self.token.weight)


class Stack(nn.Module):
    """Blocks and a last norm."""

    def __init__(
        self, layers: int, dim: int, heads: int, paths: Paths, *, causal: bool = False, across: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(dim, heads, paths, causal=causal, across=across) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """[N, T, D] → [N, T, D]."""
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask)
        return self.norm(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Predicts the next token."""

    def __init__(
        self, vocabulary: int, *, length: int, dim: int, heads: int, layers: int, paths: Paths
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, dim)
        self.stack = Stack(layers, dim, heads, paths, causal=True)

    def forward(self, ids: Tensor) -> Tensor:
        """[N, T] → [N, T, vocabulary]."""
        return self.embedding.logits(self.stack(self.embedding(ids)))


class Encoder(nn.Module):
    """Reads a sequence in both directions."""

    def __init__(
        self, vocabulary: int, *, length: int, dim: int, heads: int, layers: int, paths: Paths
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, dim)
        self.stack = Stack(layers, dim, heads, paths)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[N, T] → [N, T, D]."""
        return self.stack(self.embedding(ids), mask)  # type: ignore[no-any-return]


class Translator(nn.Module):
    """Reads one sequence, writes another."""

    def __init__(
        self, vocabulary: int, *, length: int, dim: int, heads: int, layers: int, paths: Paths
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, dim)
        self.encoder = Stack(layers, dim, heads, paths)
        self.decoder = Stack(layers, dim, heads, paths, causal=True, across=True)

    def read(self, source: Tensor, mask: Tensor) -> Tensor:
        """[N, S] → [N, S, D]."""
        return self.encoder(self.embedding(source), mask)  # type: ignore[no-any-return]

    def write(self, target: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """[N, T] → [N, T, D]; `embedding.logits` makes words of it."""
        return self.decoder(self.embedding(target), mask, memory, memory_mask)  # type: ignore[no-any-return]

    @torch.no_grad()
    def greedy(self, source: Tensor, mask: Tensor, *, begin: int, end: int, longest: int) -> Tensor:
        """The most likely next token, again and again, until every sequence has ended. [N, ≤ longest]."""
        memory = self.read(source, mask)
        written = source.new_full((len(source), 1), begin)
        while written.shape[1] < longest and not (written == end).any(1).all():
            seen = torch.ones_like(written, dtype=torch.bool)
            last = self.write(written, seen, memory, mask)[:, -1]
            written = torch.cat([written, self.embedding.logits(last).argmax(-1, keepdim=True)], 1)
        return written[:, 1:]
