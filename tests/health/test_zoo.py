"""Every sickness is named by its rule within 200 steps; healthy runs raise no alarm."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsight as sp
from sparsight.dynamics.history import History, Series
from sparsight.health.diagnose import replay
from sparsight.health.rules import ALL
from tests.health.healthy import HEALTHY
from tests.health.sick import SICK
from tests.health.zoo import Plain, adam, train

WITHIN = 200


@pytest.mark.parametrize("name", SICK)
def test_a_sickness_is_named_within_200_steps_of_its_onset(name: str, tmp_path: Path) -> None:
    case = SICK[name]
    found = [episode.first for episode in replay(case.make(tmp_path)) if episode.first.rule == case.rule]
    assert found, f"{case.rule} was not found"
    first = min(found, key=lambda finding: finding.step)
    assert case.onset <= first.step <= case.onset + WITHIN
    # What it says about the beginning is right to within a few readings of where it was given.
    assert abs(first.onset - case.onset) <= 60


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm_at_any_time(name: str, tmp_path: Path) -> None:
    alarms = [e.worst for e in replay(HEALTHY[name](tmp_path)) if e.worst.severity != "info"]
    assert not alarms, [(f.rule, f.message) for f in alarms]


def test_the_zoo_is_large_enough() -> None:
    assert len(SICK) >= 20
    assert len(HEALTHY) >= 20
    assert {case.rule for case in SICK.values()} == {rule.__name__ for rule in ALL}, (
        "a rule without a patient"
    )


def at_pace(history: History, seconds: float) -> History:
    """With a clock of its own: how long a step takes here hangs on who else uses the machine."""
    steps = history.get("run/time").steps
    clock = {
        ("run/step_seconds", ""): Series(steps, np.full(len(steps), seconds)),
        ("run/time", ""): Series(steps, seconds * steps),
    }
    return replace(history, series={**history.series, **clock})


def test_a_speed_up_bought_with_quality_is_named(tmp_path: Path) -> None:
    histories = []
    for hidden, seconds in ((2, 0.001), (128, 0.002)):
        torch.manual_seed(0)
        model = Plain(hidden)
        history = train(model, adam(model), tmp_path / str(hidden), steps=150)
        histories.append(at_pace(history, seconds))
    small, large = histories
    (found,) = sp.compare_runs(small, large)
    assert found.rule == "speed_over_quality"
    assert found.evidence["speed"] == pytest.approx(2.0)
    assert not sp.compare_runs(large, small), "the slower and better run is no bargain gone wrong"
    assert not sp.compare_runs(small, small)


def test_a_run_is_as_healthy_read_again(tmp_path: Path) -> None:
    """The same run, made twice, gives the same findings: recipes are seeded and rules are pure."""
    case = SICK["T_end at 5 %"]
    torch.manual_seed(0)
    first = replay(case.make(tmp_path / "a"))
    torch.manual_seed(0)
    assert replay(case.make(tmp_path / "b")) == first
    assert replay(sp.load_run(tmp_path / "a" / "run")) == first
