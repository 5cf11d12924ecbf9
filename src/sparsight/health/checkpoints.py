"""A few checkpoints in memory, to go back to: weights, optimizer state and topologies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsight.dst.sparsifier import Sparsifier
from sparsight.health.actions.optimizing import copied


@dataclass(frozen=True)
class Checkpoint:
    """A moment of a run."""

    step: int
    model: dict[str, Any]
    optimizer: list[dict[str, Any]]
    """What the optimizer remembers, parameter by parameter."""
    sparsifier: dict[str, Tensor] | None


class Checkpoints:
    """The last `most` moments that were kept."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier | None, most: int
    ) -> None:
        self.model, self.optimizer, self.sparsifier = model, optimizer, sparsifier
        self.kept: deque[Checkpoint] = deque(maxlen=most)

    def _params(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def keep(self, step: int) -> bool:
        """Keep this moment, unless a weight is not finite: nobody wants to go back to that."""
        params = self._params()
        sizes = [param.detach().float().abs().sum() for param in params]
        if sizes and not bool(torch.isfinite(torch.stack(sizes)).all()):
            return False
        model = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.model.state_dict().items()}
        state = [copied(self.optimizer.state.get(param, {})) for param in params]
        sparse = None if self.sparsifier is None else self.sparsifier.state_dict()
        self.kept.append(Checkpoint(step, model, state, sparse))
        return True

    @torch.no_grad()
    def restore(self, latest: int) -> int:
        """Go back to the last moment at or before `latest`, else to the first there is; returns its step."""
        old = [c for c in self.kept if c.step <= latest]
        chosen = old[-1] if old else self.kept[0]
        # What came after it is not to be gone back to.
        self.kept = deque([c for c in self.kept if c.step <= chosen.step], self.kept.maxlen)
        self.model.load_state_dict(chosen.model)
        for param, state in zip(self._params(), chosen.optimizer, strict=True):
            self.optimizer.state.pop(param, None)
            if state:
                self.optimizer.state[param] = copied(state)
        if self.sparsifier is not None and chosen.sparsifier is not None:
            now = torch.tensor(self.sparsifier.step, dtype=torch.int64)  # its clock goes on
            self.sparsifier.load_state_dict({**chosen.sparsifier, "step": now})
        return chosen.step
