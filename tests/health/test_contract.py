"""What every rule must do, whatever it looks for."""

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from sparsight.dynamics.history import History, Series, collect
from sparsight.health.advice import ADVICE
from sparsight.health.diagnose import diagnose, replay
from sparsight.health.findings import SEVERITIES
from sparsight.health.rules import ALL, COMPARISONS, Rule
from tests.health.handmade import CASES, LAYER

RULES = {rule.__name__: rule for rule in ALL}
each_rule = pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.__name__)


@each_rule
def test_speaks_where_it_must(rule: Rule) -> None:
    found = rule(CASES[rule.__name__][0])
    assert found
    for finding in found:
        assert finding.rule == rule.__name__
        assert finding.severity in SEVERITIES
        assert finding.message.startswith((finding.where or "the model") + ": ")
        assert finding.message.endswith(".")
        assert re.search(r"\d", finding.message.removeprefix(LAYER)), "a sentence without a number"
        assert 0 <= finding.onset <= finding.step
        json.dumps(finding.as_json(), allow_nan=False)


@each_rule
def test_says_one_thing_about_one_place(rule: Rule) -> None:
    for sick, _ in CASES.values():
        keys = [finding.key for finding in rule(sick)]
        assert len(keys) == len(set(keys))


@each_rule
def test_is_silent_where_it_must(rule: Rule) -> None:
    assert rule(CASES[rule.__name__][1]) == []


@each_rule
def test_needs_more_than_nothing_and_more_than_noise(rule: Rule) -> None:
    assert rule(collect([])) == []
    sick = CASES[rule.__name__][0]
    nan = {key: Series(s.steps, np.full_like(s.values, np.nan)) for key, s in sick.series.items()}
    expected = ("loss_not_finite", "non_finite_gradient")
    assert bool(rule(History(nan, sick.meta))) == (rule.__name__ in expected)
    one = History({key: s.tail(1) for key, s in sick.series.items()}, sick.meta)
    assert all(finding.rule == rule.__name__ for finding in rule(one))


@each_rule
def test_is_pure(rule: Rule) -> None:
    sick = CASES[rule.__name__][0]
    before = {key: (s.steps.copy(), s.values.copy()) for key, s in sick.series.items()}
    assert rule(sick) == rule(sick)
    for key, (steps, values) in before.items():
        np.testing.assert_array_equal(sick.series[key].steps, steps)
        np.testing.assert_array_equal(sick.series[key].values, values)


@each_rule
def test_does_without_metadata(rule: Rule) -> None:
    for meta in ({}, {"layers": None, "method": None}, {"layers": ["x", {}], "method": 3, "steps": "many"}):
        assert isinstance(rule(History(CASES[rule.__name__][0].series, meta)), list)


def test_each_rule_has_its_row_its_advice_and_its_line_in_the_docs() -> None:
    names = {rule.__name__ for rule in (*ALL, *COMPARISONS)}
    assert set(CASES) == set(RULES)
    assert set(ADVICE) == names
    page = (Path(__file__).parents[2] / "docs" / "health.md").read_text()
    assert {name for name in names if f"| `{name}` |" in page} == names


NAMES = sorted({key for sick, well in CASES.values() for h in (sick, well) for key in h.series})
number = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 1e30, float("nan"), float("inf"), -float("inf")]),
    st.floats(-10, 10, width=32),
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    series = {}
    for key in draw(st.lists(st.sampled_from(NAMES), max_size=8, unique=True)):
        count, width = draw(st.integers(0, 30)), draw(st.sampled_from([None, 0, 1, 2, 5]))
        steps = np.cumsum(draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)))
        few = draw(st.lists(number, min_size=1, max_size=12))
        values = np.resize(np.array(few, np.float64), count if width is None else (count, width))
        series[key] = Series(steps.astype(np.int64), values)
    meta = draw(st.sampled_from([sick.meta for sick, _ in CASES.values()]))
    return History(series, meta)


@settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(histories())
def test_no_history_makes_a_rule_fail(history: History) -> None:
    for finding in diagnose(history):
        assert finding.onset <= finding.step
        json.dumps(finding.as_json(), allow_nan=False)
    replay(history)
