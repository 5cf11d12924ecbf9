"""Single rules at their edges: what looks like an illness and is none, and how severe one is."""

import numpy as np
import pytest

import sparsight as sp
from sparsight.dynamics.history import History, collect
from sparsight.dynamics.records import Record
from sparsight.health import rules
from sparsight.health.rules.comparison import direction
from tests.health.handmade import CASES, EVEN, LAYER, always, among, history, loss, moe, sparse


def test_few_tokens_are_no_death() -> None:
    """64 tokens in 100 steps over 8 experts: an expert without one for 150 steps may just be unlucky."""
    rare = history(
        moe(), moe__idle_steps=always(among(3, 150.0, 0.0)), moe__tokens_per_expert=always([0.8] * 8)
    )
    assert rules.dead_experts(rare) == []


def test_with_k_experts_a_token_k_effective_experts_are_a_collapse() -> None:
    series = {"moe__effective_experts": always(2.3), "moe__tokens_per_expert": always(EVEN)}
    assert rules.expert_collapse(history(moe(k=2), **series))
    assert rules.expert_collapse(history(moe(k=8), **series)) == [], "with k = E there is nothing to choose"


def test_an_even_load_and_a_decided_router_are_specialisation() -> None:
    decided = history(
        moe(),
        moe__effective_experts=always(7.6),
        moe__router_entropy=always(0.1),
        moe__gate_saturation=always(0.6),
        moe__tokens_per_expert=always(EVEN),
    )
    assert sp.diagnose(decided) == []


@pytest.mark.parametrize(("share", "severity"), [(0.15, "warn"), (0.4, "act")])
def test_severity_follows_the_size(share: float, severity: str) -> None:
    (found,) = rules.drop_rate(
        history(moe(), moe__drop_rate=always(share), moe__tokens_per_expert=always(EVEN))
    )
    assert found.severity == severity


def test_one_odd_reading_is_no_illness() -> None:
    spike = history(
        moe(),
        moe__gate_saturation=lambda now: 0.99 if now % 50 == 0 else 0.1,
        moe__max_vio=lambda now: 7.0 if now % 50 == 0 else 0.2,
        moe__grad_norm=lambda now: among(2, 90.0 if now % 200 == 0 else 0.2, 0.2),
        moe__router_grad_norm=lambda now: 0.0 if now % 50 == 0 else 0.1,
        moe__tokens_per_expert=always(EVEN),
    )
    assert sp.replay(spike) == []


@pytest.mark.parametrize("method", ["static", "gmp", "acdc", "top_kast", "nm", "snip"])
def test_who_does_not_search_is_not_frozen(method: str) -> None:
    still = history(
        sparse(method),
        sparse___updates=always(0.0),
        sparse___drop_fraction=always(0.0),
        sparse___itop_rate=always(0.1),
        sparse___density=always(0.1),
    )
    assert sp.diagnose(still) == []


def test_a_search_that_ends_at_three_quarters_is_not_frozen() -> None:
    usual = history(
        sparse(steps=400),
        sparse___updates=lambda now: min(now, 300) // 20,
        sparse___drop_fraction=lambda now: max(0.0, 0.3 * (1 - now / 300)),
    )
    assert sp.replay(usual, [rules.frozen_topology]) == []


def test_long_periods_between_updates_are_not_a_frozen_search() -> None:
    slow = history(
        sparse(steps=4000), sparse___updates=lambda now: now // 100, sparse___drop_fraction=always(0.3)
    )
    assert sp.replay(slow, [rules.frozen_topology]) == []


@pytest.mark.parametrize("steps", [4000, None])
def test_a_first_update_that_is_far_off_is_waited_for(steps: int | None) -> None:
    early = history(sparse(steps=steps), sparse___updates=always(0.0), sparse___drop_fraction=always(0.3))
    assert sp.replay(early, [rules.frozen_topology]) == []
    assert sp.replay(History(early.series, sparse(steps=500)), [rules.frozen_topology])[0].first.step == 250


def test_a_search_of_unknown_length_is_frozen_once_it_rests_three_times_as_long() -> None:
    ended = history(
        sparse("set", steps=None),
        sparse___updates=lambda now: min(now, 80) // 20,
        sparse___drop_fraction=always(0.3),
    )
    (episode,) = sp.replay(ended, [rules.frozen_topology])
    assert (episode.first.onset, episode.first.step) == (80, 320)


def test_a_flat_part_of_a_run_does_not_mean_that_nothing_was_learned() -> None:
    """The manager looks at the latest readings alone."""
    flat = history(log__loss=lambda now: 0.5 + 0.01 * float(np.sin(now)))
    late = History({key: s.since(250) for key, s in flat.series.items()})
    assert rules.not_learning(flat)
    assert rules.not_learning(late) == []


def test_numbers_logged_between_readings_do_not_make_layers_silent() -> None:
    meta = {"layers": [{"name": "fc", "family": "dense"}]}
    read = [Record(step, "dense/grad_norm", "fc", 1.0) for step in (200, 400)]
    logged = [Record(step, "log/loss", "", loss(step)) for step in range(1, 600)]
    assert rules.starved_parameters(collect(read + logged, meta)) == []


def test_a_layer_without_a_gradient_is_found_by_its_absence() -> None:
    meta = {"layers": [{"name": "fc", "family": "dense"}, {"name": "spare", "family": "dense"}]}
    read = [Record(step, "dense/grad_norm", "fc", 1.0) for step in range(10, 210, 10)]
    (found,) = rules.starved_parameters(collect(read, meta))
    assert (found.where, found.onset) == ("spare", 0)


def test_a_gradient_that_grows_everywhere_is_not_one_layers() -> None:
    records = [
        Record(step, "dense/grad_norm", layer, 50.0 if step > 300 else 0.5)
        for step in range(10, 410, 10)
        for layer in ("a", "b", "c")
    ]
    assert rules.exploding_gradient(collect(records)) == []


def test_a_layer_that_wakes_up_to_what_is_usual_does_not_explode() -> None:
    def level(layer: str, step: int, high: float) -> float:
        return 0.5 if layer != "late" else (high if step > 300 else 0.001)

    def run(high: float) -> History:
        steps, layers = range(10, 410, 10), ("a", "b", "late")
        return collect([Record(s, "dense/grad_norm", x, level(x, s, high)) for s in steps for x in layers])

    assert rules.exploding_gradient(run(0.1)) == []
    assert [finding.where for finding in rules.exploding_gradient(run(5.0))] == ["late"]


def test_a_router_told_not_to_learn_is_worth_a_look() -> None:
    frozen = history(moe(), moe__grad_norm=always([0.2] * 8), moe__tokens_per_expert=always(EVEN))
    (found,) = rules.router_not_learning(frozen)
    assert found.severity == "warn"


def test_copies_that_part_are_left_alone() -> None:
    parting = history(moe(), moe__similarity=lambda now: 1 - now / 5000, moe__tokens_per_expert=always(EVEN))
    assert sp.replay(parting, [rules.experts_alike]) == []


def test_a_loss_that_comes_back_is_told_while_it_is_away() -> None:
    bump = history(log__loss=lambda now: loss(now) + (2.0 if 250 < now <= 330 else 0.0))
    (episode,) = sp.replay(bump, [rules.loss_diverging])
    assert not episode.ongoing
    assert 250 <= episode.first.onset <= episode.first.step <= 300


def test_names_tell_what_is_better() -> None:
    told = {"log/val_loss": -1, "log/perplexity": -1, "log/top1_acc": 1, "log/accuracy": 1, "log/lr": 0}
    assert {name: direction(name) for name in told} == told


def test_speed_is_no_fault_where_quality_holds() -> None:
    def run(pace: float, scale: float) -> History:
        return history(
            log__loss=lambda now: scale * loss(now),
            run__step_seconds=always(pace),
            run__time=lambda now: pace * now,
        )

    assert sp.compare_runs(run(0.01, 1.0), run(0.02, 1.0)) == []
    assert sp.compare_runs(run(0.02, 3.0), run(0.01, 1.0)) == [], "slower and worse is another matter"
    (found,) = sp.compare_runs(run(0.01, 3.0), run(0.02, 1.0))
    assert found.evidence["speed"] == pytest.approx(2.0)
    assert sp.compare_runs(collect([]), run(0.01, 1.0)) == sp.compare_runs(run(0.01, 1.0), collect([])) == []


def test_the_whole_set_agrees_with_each_rule_alone() -> None:
    for name, (sick, _) in CASES.items():
        alone = getattr(rules, name)(sick)
        assert [f for f in sp.diagnose(sick) if f.rule == name] == alone


def test_layers_are_told_apart() -> None:
    records = [
        Record(step, "moe/gate_saturation", layer, value)
        for step in range(10, 200, 10)
        for layer, value in ((LAYER, 0.1), ("blocks.1.mlp", 0.97))
    ]
    layers = [{"name": n, "family": "moe", "experts": 4, "k": 1} for n in (LAYER, "blocks.1.mlp")]
    assert [f.where for f in sp.diagnose(collect(records, {"layers": layers}))] == ["blocks.1.mlp"]
