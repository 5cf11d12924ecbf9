"""Diagnosis and replay: the order of findings, when each was first made, and what that costs."""

import time
from functools import partial

import numpy as np
import pytest

import sparsight as sp
from sparsight.dynamics.history import History, Series
from sparsight.health.findings import Finding
from sparsight.health.rules import drop_rate
from tests.health.handmade import CASES, LAYER, after, history, moe


def test_the_most_urgent_comes_first() -> None:
    both = {**CASES["short_lived_growth"][0].series, **CASES["dead_experts"][0].series}
    meta = {**CASES["short_lived_growth"][0].meta, **moe()}
    found = sp.diagnose(History(both, meta))
    assert [f.severity for f in found] == sorted(
        (f.severity for f in found), key=["act", "warn", "info"].index
    )
    assert found[0].rule == "dead_experts"


def test_a_severity_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rule 'mine': severity must be one of .* got 'bad'"):
        Finding("mine", "bad", "", 0, 0, "")  # type: ignore[arg-type]


def test_a_finding_becomes_an_event_with_its_onset() -> None:
    (found,) = sp.diagnose(CASES["dead_experts"][0])
    event = found.as_event()
    assert (event.kind, event.rule, event.where, event.severity) == ("finding", "dead_experts", LAYER, "act")
    assert event.data == {"experts": [3], "idle_steps": [200], "onset": 200}


def test_thresholds_are_arguments() -> None:
    sick = CASES["drop_rate"][0]
    assert drop_rate(sick)[0].severity == "act"
    assert partial(drop_rate, too_much=0.9)(sick)[0].severity == "warn"
    assert drop_rate(sick, worth_a_look=0.6) == []


def test_replay_tells_when_each_was_first_found() -> None:
    (episode,) = sp.replay(CASES["dead_experts"][0])
    assert (episode.first.step, episode.first.onset) == (300, 200)
    assert (episode.last.step, episode.ongoing) == (400, True)


def test_replay_looks_closer_where_a_long_run_changed() -> None:
    sick = history(
        moe(), 1000, moe__gate_saturation=after(5000, 0.95, 0.1), moe__tokens_per_expert=lambda now: [9.0] * 8
    )
    (episode,) = sp.replay(sick, looks=20)
    assert (episode.first.onset, episode.first.step) == (5010, 5030)


def test_what_has_passed_comes_last() -> None:
    passed = history(moe(), moe__gate_saturation=lambda now: 0.99 * (now < 200)).series
    ongoing = CASES["short_lived_growth"][0]
    found = sp.replay(History({**passed, **ongoing.series}, {**ongoing.meta, **moe()}))
    assert [(e.first.rule, e.ongoing) for e in found] == [
        ("short_lived_growth", True),
        ("gate_saturation", False),
    ]


@pytest.mark.parametrize("where", ["", LAYER])
def test_the_verdict_is_one_line(where: str) -> None:
    made = [
        Finding(rule, level, where, 9, 5, "…")
        for rule, level in (("a_b", "warn"), ("c", "info"), ("d", "warn"))
    ]
    assert sp.verdict(made) == f"watch: a b in {where or 'the model'} (since step 5), and 1 more"
    assert sp.verdict(made[1:2]) == "healthy"


def long_run(readings: int, layers: int, experts: int) -> History:
    rng = np.random.default_rng(0)
    steps = np.arange(1, readings + 1) * 10
    series = {("log/loss", ""): Series(steps, np.exp(-steps / 5e3) + 0.01 * rng.random(readings))}
    flat = ("max_vio", "drop_rate", "router_entropy", "gate_saturation", "router_grad_norm", "similarity")
    for layer in range(layers):
        where = f"blocks.{layer}"
        series["moe/effective_experts", where] = Series(steps, 0.8 * experts + rng.random(readings))
        for name in flat:
            series[f"moe/{name}", where] = Series(steps, 0.05 * rng.random(readings))
        for name in ("tokens_per_expert", "idle_steps", "update_freq", "grad_norm", "expert_loss"):
            series[f"moe/{name}", where] = Series(steps, 1 + rng.random((readings, experts)))
        for part in ("q", "k", "v", "o"):
            series["dense/grad_norm", f"{where}.{part}"] = Series(steps, 1 + rng.random(readings))
    about = [{"name": f"blocks.{i}", "family": "moe", "experts": experts, "k": 2} for i in range(layers)]
    return History(series, {"layers": about})


def test_a_run_of_100_000_steps_is_replayed_in_seconds_and_a_small_one_judged_in_milliseconds() -> None:
    large, small = long_run(10_000, 12, 64), long_run(30, 3, 8)
    began = time.process_time()
    assert sp.replay(large) == []
    assert time.process_time() - began < 20  # 3 s on an idle machine; the suite shares it
    began = time.process_time()
    for _ in range(10):
        sp.diagnose(small)
    assert (time.process_time() - began) / 10 < 0.03  # 3 ms likewise
