"""What a training step costs in FLOPs, beside the dense model: counted in the first step, then followed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparsight.dst.flops import UseCounter, Uses, count_flops
from sparsight.dst.sparsifier import Sparsifier
from sparsight.dynamics.routes import Route


class Cost:
    """Counts how often the first step uses each weight.

    Experts are not hooked, since hooks would take them off their fast path; each counts for its even share of
    what is routed to them.
    """

    def __init__(self, model: nn.Module, sparsifier: Sparsifier, routes: Sequence[Route]) -> None:
        self.model, self.sparsifier = model, sparsifier
        self._routes = [route for route in routes if route.parts]
        routed = {id(m) for route in self._routes for m in route.module.modules()}
        # Under torch.compile a hook would be traced; every weight then counts as used once.
        compiled = any(name.split(".")[-1] == "_orig_mod" for name, _ in model.named_modules())
        free = [] if compiled else [module for module in model.modules() if id(module) not in routed]
        self._counter: UseCounter | None = UseCounter(free)
        self._uses: Uses | None = None
        self._known: tuple[int, ...] | None = None
        self._ratio = 1.0

    @property
    def counting(self) -> bool:
        """Whether the first step is still to come."""
        return self._counter is not None

    def stepped(self, assignments: Sequence[float]) -> None:
        """The first step is over; `assignments` were made on each route that has experts."""
        assert self._counter is not None
        self._counter.stop()
        uses, self._counter = self._counter.uses, None
        if not uses:
            return
        for route, count in zip(self._routes, assignments, strict=True):
            for module in route.module.modules():
                for name, _ in module.named_parameters(recurse=False):
                    uses[id(module), name] = count / route.experts
        self._uses = uses

    def ratio(self) -> float:
        """FLOPs of a step now over those of the dense model."""
        layers = list(self.sparsifier.layers.values())
        known = tuple(layer.topology.nnz for layer in layers)
        if known != self._known:
            self._known = known
            method = self.sparsifier.method
            self._ratio = count_flops(self.model, layers, method, uses=self._uses, instant=True).step_ratio
        return self._ratio

    def stop(self) -> None:
        """Let go of the model."""
        if self._counter is not None:
            self._counter.stop()
