"""Traffic on one route: which experts the tokens go to, step by step, and what the router thinks of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsight.dynamics.records import Record
from sparsight.dynamics.routes import Route, Seen
from sparsight.moe.balancers import world_sum

DEAD_AFTER = 100
"""Steps without a token after which an expert counts as dead."""
SATURATED = 0.99
"""Top probability above which a gate counts as saturated."""


class Traffic:
    """Counts the passes of one route between two readings."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.idle: NDArray[np.int64] = np.zeros(route.experts, np.int64)
        self._step_loads: list[Tensor] = []
        self._current: Tensor | None = None
        self._sums: Tensor | None = None
        self._dropped = 0
        self.latest: list[Seen] = []
        """The passes of the step under way, where it ends in a reading."""
        self.losses: tuple[Tensor, Tensor] | None = None

    def passed(self, seen: Seen, reading: bool) -> None:
        """Count a forward pass; look closer if the step ends in a reading."""
        load = seen.load()
        self._current = load if self._current is None else self._current + load
        self._dropped += int(seen.dropped.sum()) if isinstance(seen.dropped, Tensor) else seen.dropped
        if reading:
            sums = _sums(seen)
            self._sums = sums if self._sums is None else self._sums + sums
            self.latest.append(seen)

    def assignments(self) -> float:
        """How many were made in the step under way."""
        return 0.0 if self._current is None else float(self._current.sum())

    def stepped(self) -> None:
        """An optimizer step came: what was counted belongs to it."""
        if self._current is None:
            self._current = torch.zeros(self.route.experts, dtype=torch.int64)
        self._step_loads.append(self._current)
        self._current = None

    @property
    def tokens(self) -> int:
        """How many the latest pass routed."""
        return self.latest[-1].logit.shape[0]

    def serve(self, losses: Tensor) -> bool:
        """Give each expert the losses of the tokens it served last; False if they are other tokens'."""
        seen = self.latest[-1]
        values = _of_tokens(losses.detach().reshape(-1).float(), seen)
        if values is None:
            return False
        served = values[seen.token]
        total = torch.zeros(self.route.experts, device=served.device).index_add_(0, seen.expert, served)
        count = torch.bincount(seen.expert, minlength=self.route.experts)
        old = self.losses
        self.losses = (total, count) if old is None else (old[0] + total, old[1] + count)
        return True

    def read(self, step: int) -> list[Record]:
        """The records of the interval that ends here, over all ranks; then begin a new one."""
        # That of the router and not of the loads, which are on the CPU where nothing ran: ranks must agree.
        device = next((p.device for p in self.route.router), self._step_loads[0].device)
        loads = world_sum(torch.stack([load.to(device) for load in self._step_loads])).cpu().numpy()
        dropped = int(world_sum(torch.tensor(self._dropped, device=device)))
        width = 8 + self.route.experts
        own = torch.zeros(width, device=device, dtype=torch.float64) if self._sums is None else self._sums
        sums = world_sum(own.clone()).cpu().numpy()
        served = self._served_everywhere(device)
        self._step_loads, self._dropped, self._sums = [], 0, None
        self.latest, self.losses = [], None
        for load in loads[loads.any(1)]:  # a step in which the layer did not run is held against nobody
            self.idle = np.where(load > 0, 0, self.idle + 1)
        if self.route.family == "depth":
            return self._depth(step, loads.sum(0), sums)
        if not loads.any():
            return []
        return [
            *self._load(step, loads, dropped),
            *self._gates(step, loads.sum(0), sums),
            *self._served(step, *served),
        ]

    def _load(self, step: int, loads: NDArray[np.int64], dropped: int) -> list[Record]:
        load = loads.sum(0)
        total, mean = int(load.sum()), load.mean()
        found: dict[str, float | NDArray[np.float32]] = {
            "tokens_per_expert": load.astype(np.float32),
            "idle_steps": self.idle.astype(np.float32),
            "update_freq": (loads > 0).mean(0).astype(np.float32),
            "dead_expert_frac": float((self.idle >= DEAD_AFTER).mean()),
        }
        entropy = _entropy(load / total)
        found |= {
            "load_entropy": entropy / math.log(max(len(load), 2)),
            "effective_experts": math.exp(entropy),
            "load_cv": float(load.std() / mean),
            "max_vio": float((load.max() - mean) / mean),
            "drop_rate": dropped / total,
        }
        return self._named(step, found)

    def _gates(self, step: int, load: NDArray[np.int64], sums: NDArray[np.float64]) -> list[Record]:
        tokens = sums[0]
        if not tokens:
            return []
        mean_p = sums[8:] / tokens
        scale = math.log(max(len(load), 2))
        found = {
            "router_entropy": sums[1] / tokens / scale,
            "routing_mi": _entropy(mean_p) - sums[1] / tokens,
            "gate_top1_prob": sums[2] / tokens,
            "gate_saturation": sums[3] / tokens,
            "z_loss": sums[4] / tokens,
            "load_balancing_loss": len(load) * float(mean_p @ (load / max(load.sum(), 1))),
        }
        if sums[6]:
            found["singleton_frac"] = sums[5] / tokens
        return self._named(step, found)

    def _served_everywhere(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Sum and number of the losses of each expert's tokens over all ranks, told on each or not."""
        told = self.losses or (torch.zeros(self.route.experts), torch.zeros(self.route.experts))
        return world_sum(told[0].to(device, torch.float64)), world_sum(told[1].to(device, torch.float64))

    def _served(self, step: int, total: Tensor, count: Tensor) -> list[Record]:
        if not count.any():
            return []
        return self._named(step, {"expert_loss": (total / count).cpu().numpy().astype(np.float32)})

    def _depth(self, step: int, load: NDArray[np.int64], sums: NDArray[np.float64]) -> list[Record]:
        tokens = sums[0]
        if not tokens:
            return []
        found = {
            "taken": sums[7] / tokens,
            "gate_mean": sums[2] / tokens,
            "gate_saturation": sums[3] / tokens,
        }
        return self._named(step, found)

    def _named(self, step: int, found: Mapping[str, float | NDArray[np.float32]]) -> list[Record]:
        family, where = self.route.family, self.route.name
        return [
            Record(step, f"{family}/{name}", where, v if isinstance(v, np.ndarray) else float(v))
            for name, v in found.items()
        ]


def _entropy(shares: NDArray[np.float64]) -> float:
    kept = shares[shares > 0]
    return float(-(kept * np.log(kept)).sum())


@torch.no_grad()
def _sums(seen: Seen) -> Tensor:
    """What adds up over passes and ranks: tokens, Σ H(p), Σ top p, saturated, Σ lse², alone, whether alone
    was counted, assignments, Σ p."""
    logit = seen.logit.float()
    prob = seen.shares() if logit.shape[-1] > 1 else logit.sigmoid()
    top = prob.amax(-1)
    entropy = torch.special.entr(prob).sum()
    tokens = prob.new_tensor(float(prob.shape[0]))
    alone = prob.new_tensor([float(seen.alone or 0), float(seen.alone is not None)])
    served = prob.new_tensor(float(seen.expert.numel()))
    squared = torch.logsumexp(logit, -1).square().sum()
    saturated = (top > SATURATED).sum().float()
    parts = torch.stack([tokens, entropy, top.sum(), saturated, squared, *alone, served])
    return torch.cat([parts, prob.sum(0)]).double()


def _of_tokens(losses: Tensor, seen: Seen) -> Tensor | None:
    """One loss for each routed token, from losses of tokens, of padded positions or of whole sequences; None
    if there are neither as many."""
    tokens = seen.logit.shape[0]
    if losses.numel() == tokens:
        return losses
    if seen.real is not None and int(seen.real[-1]) < losses.numel():
        return losses[seen.real]
    if losses.numel() and tokens % losses.numel() == 0:
        return losses.repeat_interleave(tokens // losses.numel())
    return None
