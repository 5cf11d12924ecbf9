"""Studies: judged by paired differences, run for real at a tiny size, taken up where they stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsight.studies import questions
from sparsight.studies.command import OURS, main
from sparsight.studies.trial import Claim, Result, judge, report, run

CLAIM = Claim("b beats a", "b", "a", "loss", higher=False)


def _results(a: list[float], b: list[float]) -> list[Result]:
    found = [Result("a", seed, {"loss": value}) for seed, value in enumerate(a)]
    return found + [Result("b", seed, {"loss": value}) for seed, value in enumerate(b)]


def test_a_steady_gain_supports_a_claim_however_much_seeds_differ() -> None:
    judged = judge(CLAIM, _results([1.0, 5.0, 9.0], [0.9, 4.89, 8.91]))
    assert judged.verdict == "supported"
    assert judged.difference == pytest.approx(0.1)


def test_a_steady_loss_contradicts_it() -> None:
    assert judge(CLAIM, _results([1.0, 5.0, 9.0], [1.1, 5.11, 9.1])).verdict == "contradicted"


@pytest.mark.parametrize(("a", "b"), [([1.0, 2.0, 3.0], [0.5, 2.4, 3.1]), ([1.0], [0.1]), ([], [])])
def test_noise_one_seed_or_nothing_decide_nothing(a: list[float], b: list[float]) -> None:
    assert judge(CLAIM, _results(a, b)).verdict == "undecided"


def test_a_claim_about_an_arm_that_is_not_there_is_refused() -> None:
    study = questions.connections()
    with pytest.raises(ValueError, match="names no arm 'b'"):
        type(study)("x", "?", "", study.arms, (CLAIM,), ("loss",))


def test_a_study_runs_every_arm_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    study = questions.connections(width=32, steps=40)
    said: list[str] = []
    results = run(study, 2, tmp_path, say=said.append)
    assert len(said) == len(results) == 2 * len(study.arms)
    assert all(0 <= r.metrics["accuracy"] <= 1 for r in results)
    again = run(study, 3, tmp_path, say=said.append)
    assert len(said) == len(again) == 3 * len(study.arms), "what was finished is not run again"
    assert again[: len(results)] == results
    text = report(study, again)
    assert study.question in text
    assert sum(line.startswith(("supported", "contradicted", "undecided")) for line in text.splitlines()) == 3
    assert len(json.loads((tmp_path / "study.json").read_text())) == len(again)


def test_the_command_runs_a_study_of_paths_and_reads_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("what goes around comes around. " * 200)
    small = "--width 32 --experts 4 --steps 20 --batch 4 --seeds 1"
    assert main(["balance", "--text", str(text), *small.split(), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "load_cv" in told
    assert "–" not in told.split("load_cv")[1].split("\n\n")[0]
    assert "undecided: a bias evens the load" in told


def test_an_unknown_study_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'balance'"):
        main(["balanse"])


@pytest.mark.parametrize("name", OURS)
def test_every_study_lists_its_knobs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    told = capsys.readouterr().out
    assert "--steps" in told
    assert "--seeds" in told
