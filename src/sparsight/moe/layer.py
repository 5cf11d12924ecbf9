"""MoE: router ∘ estimator ∘ capacity ∘ dispatch ∘ experts ∘ combine, as one plain module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsight.kernels.handles import handle
from sparsight.moe import routers
from sparsight.moe.balancers import Balancer
from sparsight.moe.capacity import Capacity
from sparsight.moe.dispatch import dispatch
from sparsight.moe.estimators import Estimator, GatingOnly, needs_of
from sparsight.moe.experts import Factory, build_experts, plain_form
from sparsight.moe.ledger import Ledger, recomputing
from sparsight.moe.operator import check_finite, traced_dispatch
from sparsight.moe.pool import Pool
from sparsight.moe.routers import Router
from sparsight.moe.routing import Routing
from sparsight.moe.sense import check_parts, check_sizes
from sparsight.moe.stretch import stretch


class MoE(nn.Module):
    """Sends each token through k of `experts` experts and adds up what they say.

    `router` emits logits (`sp.routers`), `estimator` decides what is selected and what flows back,
    `balance` keeps the load even (add `sp.balance_loss(model)` to your loss), `capacity` limits an expert's
    tokens: a factor, a `Capacity`, or None for no limit. `shared` experts see every token. `expert` is
    "mlp", "glu" or a function (dim, hidden) → module. Noise comes from torch's generator, as in dropout.

    >>> import sparsight as sp
    >>> moe = sp.MoE(dim=16, hidden=32, experts=4, k=2, balance=[sp.SwitchLoss(), sp.ZLoss()])
    >>> moe(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        k: int = 1,
        *,
        router: Router | None = None,
        estimator: Estimator | None = None,
        balance: Balancer | Sequence[Balancer] = (),
        capacity: float | Capacity | None = None,
        shared: int = 0,
        expert: str | Factory = "mlp",
        causal: bool | None = None,
        pool: Pool | None = None,
        name: str = "",
    ) -> None:
        check_sizes(dim, hidden, experts, k)
        if shared < 0:
            raise ValueError(f"MoE: shared must be a number of experts >= 0, got {shared}")
        router = routers.softmax() if router is None else router
        balance = tuple(balance) if isinstance(balance, Sequence) else (balance,)
        capacity = Capacity(float(capacity)) if isinstance(capacity, (int, float)) else capacity
        check_parts(router, estimator, balance, capacity, k, causal)
        super().__init__()
        self.dim, self.hidden, self.k, self.name = dim, hidden, k, name
        self.router_kind = router
        self.estimator: Estimator = router.select or estimator or GatingOnly()
        self.capacity = capacity
        self.router = router.logits(dim, experts)
        self.experts = build_experts(expert, dim, hidden, experts)
        self.shared = build_experts(expert, dim, hidden * shared, 1)[0] if shared else None
        self.omega = nn.Parameter(torch.ones(dim)) if needs_of(self.estimator).omega else None
        own = () if router.companion is None else (router.companion(k),)
        self.ledger = Ledger(dim, experts, (*balance, *own), self.estimator)
        self.pool = Pool() if pool is None else pool
        self.routing: Routing | None = None
        """The last decision, before anything was dropped, without history."""
        self._dropped: int | Tensor = 0
        self._handle = torch.tensor([handle(self.pool)])

    @property
    def dropped(self) -> int:
        """How many assignments the last forward pass dropped."""
        return int(self._dropped)

    def forward(self, x: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """[..., dim] → [..., dim]. `mask` [...] is False for padding, which comes out as 0."""
        if torch.compiler.is_compiling() and not self._traceable(mask):
            return self._apart(x, mask, ids)  # type: ignore[no-any-return]
        return self._forward(x, mask, ids)

    def _traceable(self, mask: Tensor | None) -> bool:
        """Whether torch.compile can take the layer into a graph: no size in it may depend on the data."""
        static = getattr(self.estimator, "static", True) and needs_of(self.estimator).defaults is None
        return mask is None and static and plain_form(self.experts) is not None

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="sizes in this MoE layer depend on the data (a padding mask, experts of another kind than MLP "
        "and GLU, DefaultMoE, or a router that says how many experts a token has): it runs between graphs"
    )
    def _apart(self, x: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
        return self._forward(x, mask, ids)

    def _forward(self, x: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
        lead = x.shape[:-1]
        if x.shape[-1] != self.dim:
            raise ValueError(f"{self._where()}: expected inputs of width {self.dim}, got {tuple(x.shape)}")
        for what, tensor in (("mask", mask), ("ids", ids)):
            if tensor is not None and tensor.shape != lead:
                raise ValueError(
                    f"{self._where()}: {what} must have the shape {tuple(lead)}, got {tuple(tensor.shape)}"
                )
        flat = x.reshape(-1, self.dim)
        real = None if mask is None else mask.reshape(-1).bool().nonzero().squeeze(1)
        rows = flat if real is None else flat.index_select(0, real)
        if rows.shape[0] == 0:
            return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
        named = None if ids is None else ids.reshape(-1)
        y = self._route(rows, lead, real, named if named is None or real is None else named[real])
        if real is not None:
            y = y.new_zeros(flat.shape).index_copy(0, real, y)
        return y.view(x.shape)

    def _route(self, rows: Tensor, lead: torch.Size, real: Tensor | None, ids: Tensor | None) -> Tensor:
        traced = torch.compiler.is_compiling()
        again = not traced and recomputing()
        routing = self._decide(self._logits(rows, ids), lead, real)
        if not again:
            self.routing = routing.detach()
            if self.training:
                self.ledger.record(routing, self._where(), next(self.router.parameters(), None))
        y = self._traced(rows, routing) if traced else self._dispatched(rows, routing, again)
        if routing.rest is not None:
            y = torch.addmm(y, routing.rest.to(y.dtype), self.ledger.defaults.to(y.dtype))
        if self.omega is not None:
            y = stretch(y, self.omega, self.pool)
        return y if self.shared is None else y + self.shared(rows)

    def _dispatched(self, rows: Tensor, routing: Routing, again: bool) -> Tensor:
        kept, dropped = routing, 0
        if self.capacity is not None:
            kept, dropped = self.capacity.keep(routing, self.k, self.training)
        if not again:
            self._dropped = dropped
        collect = self.ledger.outputs(kept) if self.training and not again else None
        return dispatch(rows, kept, self.experts, self.pool, collect)

    def _traced(self, rows: Tensor, routing: Routing) -> Tensor:
        kept = None if self.capacity is None else self.capacity.mask(routing, self.k, self.training)
        self._dropped = 0 if kept is None else (~kept).sum()
        plain = plain_form(self.experts)
        assert plain is not None
        return traced_dispatch(rows, routing, kept, plain, self._handle, self._where())

    def _logits(self, rows: Tensor, ids: Tensor | None) -> Tensor:
        """In float32 at least, whatever autocast says."""
        with torch.autocast(rows.device.type, enabled=False):
            seen = rows.to(torch.promote_types(rows.dtype, torch.float32))
            if self.training and self.router_kind.jitter:
                low, high = 1 - self.router_kind.jitter, 1 + self.router_kind.jitter
                seen = seen * torch.empty_like(seen).uniform_(low, high)
            logits: Tensor = self.router(seen, ids)
        if not torch.compiler.is_compiling():  # where it is, the operator looks
            check_finite(logits.detach(), self._where())
        return logits

    def _decide(self, logits: Tensor, lead: torch.Size, real: Tensor | None) -> Routing:
        with torch.autocast(logits.device.type, enabled=False):
            routing = self.estimator(
                logits,
                self.k,
                score=self.router_kind.score,
                bias=self.ledger.bias(),
                training=self.training,
            )
        if len(lead) < 2:
            return routing
        place = torch.arange(logits.shape[0], device=logits.device) if real is None else real
        return replace(routing, sequence=place // lead[-1])

    def after_step(self) -> None:
        """Move biases, penalties and running means. `sp.follow_steps` calls it after each optimizer step."""
        self.ledger.after_step(self._where())

    def _where(self) -> str:
        return f"MoE '{self.name}'" if self.name else f"MoE(dim={self.dim}, experts={len(self.experts)})"

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"dim={self.dim}, hidden={self.hidden}, k={self.k}, router={self.router_kind.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "routing": None, "_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = torch.tensor([handle(self.pool)])
