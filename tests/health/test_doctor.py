"""`sparsight doctor RUN`, as a person and as a program calls it."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sparsight.dynamics.history import History
from sparsight.dynamics.records import Record
from sparsight.dynamics.store import Store
from sparsight.health.doctor import examine
from tests.health.handmade import CASES, LAYER, history, loss


def stored(history: History, folder: Path) -> Path:
    """A history as a run folder."""
    store = Store(folder, history.meta)
    for (name, where), series in history.series.items():
        values = [v.astype("f4") if v.ndim else float(v) for v in series.values]
        store.append([Record(int(s), name, where, v) for s, v in zip(series.steps, values, strict=True)])
    store.close()
    return folder


def test_a_healthy_run_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(history(log__loss=loss), tmp_path / "run")
    assert examine([run]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{run}: healthy", "  400 steps"]


def test_a_sick_run_is_explained_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(CASES["dead_experts"][0], tmp_path / "run")
    assert examine([run]) == 1
    page = capsys.readouterr().out
    assert page.startswith(
        f"{run}: sick: dead experts in {LAYER} (since step 200)\n  400 steps, 1 expert layer"
    )
    assert "Act on this\n  dead experts, since step 200, found at step 300\n" in page
    assert f"    {LAYER}: 1 of 8 experts (3) had no token for 200 steps or more, since step 200.\n" in page
    assert "    → revive them from the busiest" in page


def test_a_warning_alone_exits_with_0(tmp_path: Path) -> None:
    assert examine([stored(CASES["short_lived_growth"][0], tmp_path / "run")]) == 0


def test_what_has_passed_is_told_and_not_held_against_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sick = history(CASES["gate_saturation"][0].meta, moe__gate_saturation=lambda now: 0.99 * (now < 200))
    assert examine([stored(sick, tmp_path / "run")]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[0].endswith(": healthy")
    assert "Over by the end\n  act  " in page
    assert "Found at step 30, last at 190." in page


def test_json_is_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored(CASES["loss_not_finite"][0], tmp_path / "run")
    assert examine([run], as_data=True) == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert told["act"]
    assert told["steps"] == 400
    (found,) = told["findings"]
    assert (found["rule"], found["onset"], found["found"], found["ongoing"]) == (
        "loss_not_finite",
        210,
        210,
        True,
    )


def test_several_runs_and_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for name, pace, worse in (("fast", 0.01, 2.0), ("slow", 0.02, 1.0)):
        made = history(
            log__loss=lambda now, worse=worse: worse * loss(now),
            run__step_seconds=lambda now, pace=pace: pace,
            run__time=lambda now, pace=pace: pace * now,
        )
        runs.append(stored(made, tmp_path / name))
    assert examine(runs, baseline=runs[1]) == 0
    fast, slow = capsys.readouterr().out.split("\n\n" + str(runs[1]))
    assert "steps are 2.00 times as fast as the baseline's" in fast
    assert "speed over quality" not in slow


def test_a_folder_that_is_no_run_is_one_sentence_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    sqlite3.connect(other / "run.sqlite").execute("CREATE TABLE t (x)").connection.close()
    sick = stored(CASES["dead_experts"][0], tmp_path / "sick")
    for bad in (tmp_path / "missing", other):
        assert examine([bad]) == 2
        assert examine([sick, bad]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"sparsight: {bad}") for line in lines)


def test_a_run_without_readings_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(tmp_path / "run").close()
    assert examine([tmp_path / "run"]) == 0
    assert capsys.readouterr().out.strip().endswith("no readings yet")


def test_the_command_itself(tmp_path: Path) -> None:
    run = stored(CASES["dead_experts"][0], tmp_path / "run")

    def doctor(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sparsight.cli", "doctor", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env)

    told = doctor(str(run), "--json")
    assert told.returncode == 1, told.stderr
    assert json.loads(told.stdout)[0]["verdict"].startswith("sick: dead experts")
    missing = doctor(str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert missing.stderr.strip().count("\n") == 0
    assert "Traceback" not in missing.stderr
    assert "torch" in doctor("--system").stdout
