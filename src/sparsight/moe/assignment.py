"""Balanced assignment: every expert the same number of tokens, the sum of scores as large as can be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def sinkhorn(scores: Tensor, rounds: int = 20, temperature: float = 1.0) -> Tensor:
    """log of a doubly normalised exp(scores): rows add up to 1, columns to T/E (Clark et al., 2022).

    >>> plan = sinkhorn(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).exp()
    >>> [round(v, 3) for v in plan.sum(0).tolist()]
    [1.0, 1.0]
    """
    log = scores / temperature
    share = torch.tensor(scores.shape[0] / scores.shape[1], dtype=log.dtype, device=log.device).log()
    for _ in range(rounds):
        log = log - log.logsumexp(1, keepdim=True)
        log = log - log.logsumexp(0, keepdim=True) + share
    return log


def room(tokens: int, experts: int) -> list[int]:
    """How many tokens each expert takes: as even as integers allow."""
    return [tokens // experts + (e < tokens % experts) for e in range(experts)]


@torch.no_grad()
def balanced_assignment(scores: Tensor) -> Tensor:
    """[T] the expert of each token; the optimum of the linear assignment problem.

    At good prices nearly every token can take the expert it likes best. Such a choice is optimal for the
    loads that it happens to have, and stays so while tokens move, one at a time, along the cheapest chain
    of moves from a full expert to one with room (successive shortest paths).

    >>> balanced_assignment(torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.5], [0.9, 0.0]])).tolist()
    [0, 0, 1, 1]
    """
    tokens, experts = scores.shape
    value = scores.detach().double().cpu()
    limit = np.array(room(tokens, experts))
    prices = _prices(value)
    mine = (value - prices).argmax(1).numpy()
    table = value.numpy()
    load = np.bincount(mine, minlength=experts)
    cost, mover = np.full((experts, experts), np.inf), np.zeros((experts, experts), np.int64)
    for e in range(experts):
        _cheapest_moves(table, mine, e, cost, mover)
    while (load > limit).any():
        path = _shortest(cost, load > limit, load < limit)
        hops = list(pairwise(path))
        for token, to in [(mover[a, b], b) for a, b in hops]:
            mine[token] = to
        load[path[0]] -= 1
        load[path[-1]] += 1
        for e in path:
            _cheapest_moves(table, mine, e, cost, mover)
    return torch.from_numpy(mine).to(scores.device)


def _prices(value: Tensor) -> Tensor:
    """What taking each expert should cost for the loads to come out nearly even."""
    spread = float(value.std()) or 1.0
    tilt = sinkhorn(value, rounds=30, temperature=0.05 * spread)
    # log plan = (value − row term − price) / temperature: the difference to the mean over rows is the price.
    off = value / (0.05 * spread) - tilt
    return (off - off.mean(1, keepdim=True)).mean(0) * 0.05 * spread


def _cheapest_moves(table: Floats, mine: Ints, e: int, cost: Floats, mover: Ints) -> None:
    """For each other expert, the token of e that loses least by going there."""
    own = np.flatnonzero(mine == e)
    cost[e] = np.inf
    if own.size:
        loss = table[own, e][:, None] - table[own]
        best = loss.argmin(0)
        cost[e], mover[e] = loss[best, np.arange(loss.shape[1])], own[best]
        cost[e, e] = np.inf


def _shortest(cost: Floats, full: NDArray[np.bool_], open_: NDArray[np.bool_]) -> list[int]:
    """The cheapest chain from any full expert to any open one (Bellman-Ford; moves may gain)."""
    dist = np.where(full, 0.0, np.inf)
    before = np.full(dist.size, -1)
    slack = 1e-12 * max(1.0, float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0)))
    for _ in range(dist.size):
        through = dist[:, None] + cost
        best = through.argmin(0)
        reach = through[best, np.arange(dist.size)]
        better = reach < dist - slack
        if not better.any():
            break
        dist[better], before[better] = reach[better], best[better]
    goal = int(np.where(open_, dist, np.inf).argmin())
    path = [goal]
    while before[path[-1]] >= 0 and len(path) <= dist.size:
        path.append(int(before[path[-1]]))
    return path[::-1]
