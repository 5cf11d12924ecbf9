"""The rules. Each is a pure function of a history; a new one is a function and a line in `ALL`."""

from collections.abc import Callable

from sparsight.dynamics.history import History
from sparsight.health.findings import Finding
from sparsight.health.rules.comparison import speed_over_quality
from sparsight.health.rules.gates import (
    entropy_crash,
    experts_alike,
    gate_saturation,
    path_behind,
    router_not_learning,
    singletons,
)
from sparsight.health.rules.gradients import (
    capacity_without_competence,
    exploding_gradient,
    non_finite_gradient,
    starved_parameters,
)
from sparsight.health.rules.paths import (
    collapse_onset,
    dead_experts,
    dominance,
    drop_rate,
    expert_collapse,
    overload,
)
from sparsight.health.rules.quality import falls_under_shift, loss_diverging, loss_not_finite, not_learning
from sparsight.health.rules.topology import (
    dead_neurons,
    frozen_topology,
    low_exploration,
    over_sparsified,
    pruned_too_fast,
    short_lived_growth,
)

Rule = Callable[[History], list[Finding]]
"""What a rule is. Its thresholds are keyword arguments: `functools.partial(drop_rate, too_much=0.4)`."""

Comparison = Callable[[History, History], list[Finding]]
"""A rule over a run and the run it is compared with."""

ALL: tuple[Rule, ...] = (
    expert_collapse,
    collapse_onset,
    dead_experts,
    overload,
    dominance,
    drop_rate,
    gate_saturation,
    singletons,
    router_not_learning,
    entropy_crash,
    experts_alike,
    path_behind,
    non_finite_gradient,
    exploding_gradient,
    starved_parameters,
    capacity_without_competence,
    frozen_topology,
    short_lived_growth,
    low_exploration,
    dead_neurons,
    over_sparsified,
    pruned_too_fast,
    loss_not_finite,
    loss_diverging,
    not_learning,
    falls_under_shift,
)

COMPARISONS: tuple[Comparison, ...] = (speed_over_quality,)
