"""Mixture of depths: tokens routed around whole blocks, with the same parts (adaptive computation depth)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsight.dst.schedules import Schedule
from sparsight.moe.balancers import State, at
from sparsight.moe.estimators import GatingOnly
from sparsight.moe.ledger import Ledger, recomputing
from sparsight.moe.routers import LinearLogits
from sparsight.moe.routing import Routing


class PredictTop:
    """coef · BCE(z, was selected): teaches σ(z) > ½ to say what the top of the sequence would have said."""

    def __init__(self, coef: float | Schedule) -> None:
        self.coef = coef

    def state(self, experts: int) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def loss(self, routing: Routing, state: State, step: int) -> Tensor | None:
        """See the class."""
        taken = torch.zeros_like(routing.logit)
        taken[routing.token] = 1
        return at(self.coef, step) * functional.binary_cross_entropy_with_logits(routing.logit, taken)

    def update(self, state: State, load: Tensor, tokens: int) -> None:
        """Nothing."""


def _width(block: nn.Module) -> int:
    """The width of a block's input, told by its first norm or Linear layer."""
    for module in block.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            return int(module.normalized_shape[-1])
        if isinstance(module, nn.MultiheadAttention):
            return int(module.embed_dim)
        if isinstance(module, nn.Linear):
            return module.in_features
    raise ValueError(
        f"MixtureOfDepths: {type(block).__name__} has no norm or Linear layer to tell its width by; pass dim"
    )


class MixtureOfDepths(nn.Module):
    """Only the `capacity` share of a sequence's tokens goes through `block`; the rest pass by.

    y_t = x_t + g_t·(block(x)_t − x_t) for the tokens with the largest logits, y_t = x_t for the others
    (Raposo et al., 2024). `block` has its own residual connection. The gate g is the logit, or σ of it. The
    choice looks at the whole sequence, so a causal model cannot make it at inference: with `causal=True`
    inference takes the tokens with a positive logit, which a loss (`predict`, collected by
    `sp.balance_loss`) teaches to mean the same.

    >>> import sparsight as sp
    >>> block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> sp.MixtureOfDepths(block, capacity=0.25)(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """

    def __init__(
        self,
        block: nn.Module,
        dim: int | None = None,
        *,
        capacity: float = 0.125,
        gate: Literal["logit", "sigmoid"] = "logit",
        causal: bool = False,
        predict: float | Schedule = 0.01,
        gathered: Sequence[str] = (),
        name: str = "",
    ) -> None:
        if not 0 < capacity <= 1:
            raise ValueError(
                f"MixtureOfDepths: capacity must be a share of the tokens in (0, 1], got {capacity}"
            )
        if gate not in ("logit", "sigmoid"):
            raise ValueError(f"MixtureOfDepths: gate must be 'logit' or 'sigmoid', got '{gate}'")
        super().__init__()
        dim = _width(block) if dim is None else dim
        self.block, self.dim, self.capacity, self.gate = block, dim, capacity, gate
        self.causal, self.name = causal, name
        self.gathered = tuple(gathered)
        """Keyword arguments that are cut to the chosen tokens: [B, S, ...] tensors such as position ids."""
        self.router = LinearLogits(dim, 1)
        self.ledger = Ledger(dim, 1, (PredictTop(predict),) if causal else (), GatingOnly())
        self.routing: Routing | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any) -> Any:
        """[B, S, dim] → [B, S, dim]. `mask` [B, S] is False for padding, which is never chosen."""
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(
                f"MixtureOfDepths '{self.name}': expected [batch, sequence, {self.dim}], got {tuple(x.shape)}"
            )
        with torch.autocast(x.device.type, enabled=False):
            logit = self.router(x.to(torch.promote_types(x.dtype, torch.float32))).squeeze(-1)
        if bad := int((~torch.isfinite(logit)).sum()):
            raise ValueError(f"MixtureOfDepths '{self.name}': the logits of {bad} tokens are NaN or infinite")
        rank = logit.detach() if mask is None else logit.detach().masked_fill(~mask.bool(), -torch.inf)
        if self.causal and not self.training:
            return self._one_by_one(x, logit, rank > 0, args, kwargs)
        count = max(1, math.ceil(round(x.shape[1] * self.capacity, 9)))
        chosen = rank.topk(count, dim=1).indices.sort(1).values
        self._record(logit, chosen, mask)
        return self._through(x, logit, chosen, rank, args, kwargs)

    def _through(
        self, x: Tensor, logit: Tensor, chosen: Tensor, rank: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        cut = {k: v[rows, chosen] if k in self.gathered else v for k, v in kwargs.items()}
        part = x[rows, chosen]
        out = self.block(part, *args, **cut)
        out = out[0] if isinstance(out, tuple) else out
        gate = logit[rows, chosen]
        gate = gate.sigmoid() if self.gate == "sigmoid" else gate
        # A sequence shorter than its share has padding among the chosen; it passes by.
        gate = torch.where(rank[rows, chosen] > -torch.inf, gate, 0).to(x.dtype)
        return x.index_put((rows, chosen), gate[..., None] * (out - part).to(x.dtype), accumulate=True)

    def _one_by_one(
        self, x: Tensor, logit: Tensor, wanted: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Sequences differ in how many tokens they send, so each goes through by itself."""
        outs = []
        for i in range(x.shape[0]):
            chosen = wanted[i].nonzero().squeeze(1)[None]
            one = {k: v[i : i + 1] if k in self.gathered else v for k, v in kwargs.items()}
            row, z = x[i : i + 1], logit[i : i + 1]
            outs.append(self._through(row, z, chosen, z, args, one) if chosen.numel() else row)
        return torch.cat(outs)

    def _record(self, logit: Tensor, chosen: Tensor, mask: Tensor | None) -> None:
        if recomputing():
            return
        batch, length = logit.shape
        token = (torch.arange(batch, device=chosen.device)[:, None] * length + chosen).reshape(-1)
        z = logit.reshape(-1, 1)
        sequence = torch.arange(batch * length, device=z.device) // length
        routing = Routing(token, torch.zeros_like(token), z[token, 0], z.sigmoid(), z, sequence=sequence)
        if mask is not None:
            real = mask.reshape(-1).bool()
            place = real.cumsum(0) - 1
            kept = routing.keep(real[token])
            routing = Routing(
                place[kept.token],
                kept.expert,
                kept.weight,
                routing.prob[real],
                z[real],
                sequence=sequence[real],
            )
        self.routing = routing.detach()
        if self.training:
            self.ledger.record(routing, f"MixtureOfDepths '{self.name}'", self.router.weight)

    def after_step(self) -> None:
        """Move the schedule. `sp.follow_steps` calls it after each optimizer step."""
        self.ledger.after_step(f"MixtureOfDepths '{self.name}'")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "routing": None}
