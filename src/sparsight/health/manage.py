"""`sp.manage`: one line that keeps a watched run healthy, or says what would."""

from __future__ import annotations

from collections.abc import Sequence

from sparsight.dynamics.records import Severity
from sparsight.dynamics.watch import Watch
from sparsight.health import policies
from sparsight.health.checkpoints import Checkpoints
from sparsight.health.findings import SEVERITIES
from sparsight.health.manager import Limits, Manager
from sparsight.health.policies import Policy
from sparsight.health.rules import ALL, Rule


def manage(
    watch: Watch,
    policy: Policy = policies.default,
    *,
    act: bool = False,
    every: int = 50,
    budget: int = 20,
    cooldown: int = 200,
    on: Severity = "act",
    rules: Sequence[Rule] = ALL,
    keep: int = 0,
    keep_every: int = 100,
    seed: int = 0,
) -> Manager:
    """Judge the run every `every` steps, record what is found, and say what `policy` would do about it.

    With `act=True` it is done, where a finding is as severe as `on`: at most `budget` times in a run, and
    the same kind of action at the same layer not again within `cooldown` steps. Actions come after an
    optimizer step, never within one. `keep` checkpoints are held in memory, one every `keep_every` steps, for
    `Rewind` to go back to; gradients are then looked at in each step. Under several processes call it on all.
    A healthy run is the same, bit for bit, with the manager on.

    >>> import sparsight as sp, tempfile, torch
    >>> moe = sp.MoE(8, 16, experts=4)
    >>> optimizer = torch.optim.Adam(moe.parameters())
    >>> with tempfile.TemporaryDirectory() as folder, sp.watch(moe, optimizer, f"{folder}/run") as watch:
    ...     manager = sp.manage(watch, act=True)
    ...     done = manager.apply(sp.actions.ExpertsPerToken(k=2))
    ...     print(done.message, moe.k)
    ...     action = manager.undo()
    ...     print(moe.k)
    2 experts a token 2
    1
    """
    if not isinstance(watch, Watch):
        raise ValueError(f"manage: expected what sp.watch returned, got {type(watch).__name__}")
    for name, value, least in (
        ("every", every, 1),
        ("budget", budget, 0),
        ("cooldown", cooldown, 0),
        ("keep", keep, 0),
        ("keep_every", keep_every, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"manage: {name} must be an integer >= {least}, got {value!r}")
    if on not in SEVERITIES or not callable(policy):
        raise ValueError(f"manage: expected a policy and a severity of {SEVERITIES}, got {policy!r}, {on!r}")
    limits = Limits(act, every, budget, cooldown, on, keep_every, seed)
    kept = Checkpoints(watch.model, watch.optimizer, watch.sparsifier, keep) if keep else None
    return Manager(watch, policy, limits, tuple(rules), kept)
