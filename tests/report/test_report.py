"""The report, the comparison, `sp.show` and the export, as files and tables."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest

import sparsight as sp
from sparsight.dynamics.history import collect
from sparsight.dynamics.reading import load_run as load
from sparsight.dynamics.records import Record
from sparsight.dynamics.store import Store
from sparsight.report import compare, sides
from sparsight.report.export import export_run
from sparsight.report.single import write_report
from tests.report.stores import FINDING, small


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_report_says_how_the_run_ended_and_has_every_chart(tmp_path):
    run = small(tmp_path / "first")
    text = write_report(run).read_text("utf-8")
    assert "sick: overload in blocks.0.mlp (since step 770)" in text
    assert "times the mean load" in text
    assert FINDING.message in text
    assert "since step 520" in text
    for said in ("FLOPs saved", "78%", "config.lr", "versions.torch", "machine.cpu", "20 s"):
        assert said in text, said
    figures = data_of(text)["figures"]
    assert {"loss-0", "load-0", "topology-0", "topology-1", "flops-0", "timeline-0"} <= set(figures)
    assert text.count("plotly.js v") == 1
    assert "http://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_the_report_goes_where_it_is_told(tmp_path):
    run = small(tmp_path / "first", steps=50)
    assert write_report(run, tmp_path / "deep" / "x.html").read_text("utf-8").startswith("<!doctype html>")
    with pytest.raises(ValueError, match="cannot be written"):
        write_report(run, tmp_path / "first" / "run.sqlite" / "x.html")


def test_a_run_with_nothing_in_it_has_a_report_too(tmp_path):
    Store(tmp_path / "empty").close()
    assert "<h1>empty</h1>" in write_report(tmp_path / "empty").read_text("utf-8")


def test_seeds_are_grouped_and_settings_are_not(tmp_path):
    for name, seed, more in (("a-1", 1, {}), ("a-2", 2, {}), ("b", 1, {"sparse": 0})):
        small(tmp_path / name, seed=seed, steps=200, **more)
    groups = sides.group(compare.read_runs([tmp_path / n for n in ("a-1", "b", "a-2")]))
    assert [(g.label, list(g.runs)) for g in groups] == [("a", ["a-1", "a-2"]), ("b", ["b"])]


def test_runs_that_say_nothing_of_themselves_go_by_their_names():
    nothing = collect([Record(1, "log/loss", "", 1.0)])
    groups = sides.group({"rigl-1": nothing, "dense-1": nothing, "rigl-2": nothing})
    assert [g.label for g in groups] == ["rigl", "dense-1"]


def made(ratio: float, seconds: float, steps: int):
    found = []
    for step in range(10, steps + 1, 10):
        found += [
            Record(step, "log/accuracy", "", step / 1000),
            Record(step, "run/time", "", step * seconds),
            Record(step, "sparse/flops_ratio", "", ratio),
        ]
    return collect(found, {"config": {"ratio": ratio}})


def test_values_at_equal_steps_flops_and_time_by_hand():
    runs = {"sparse": made(0.2, 0.5, 100), "dense": made(1.0, 1.0, 80)}
    groups = sides.group(runs)
    # All have come to 80 steps, to the FLOPs of 20 dense steps (100 × 0.2), to 50 seconds (100 × 0.5).
    expected = {"steps": (80, 0.08, 0.08), "flops": (20, 0.1, 0.02), "time": (50, 0.1, 0.05)}
    for axis in sides.AXES:
        end = sides.common_end(groups, "accuracy", axis)
        reached = [sides.value_at(g, "accuracy", axis, end).mean for g in groups]
        assert (end, *reached) == pytest.approx(expected[axis.id]), axis.id


def test_the_spread_over_seeds_is_the_sample_deviation():
    found = sides.spread([1.0, 2.0, 4.0])
    assert (found.mean, found.deviation) == pytest.approx((7 / 3, np.std([1, 2, 4], ddof=1)))
    assert str(sides.spread([0.5])) == "0.5"


def test_the_comparison_prints_a_table_and_writes_the_overlays(tmp_path):
    for name, seed, more in (("a-1", 1, {}), ("a-2", 2, {}), ("b", 1, {"sparse": 0, "steps": 300})):
        small(tmp_path / name, **{"seed": seed, "steps": 400, **more})
    text = compare.write_comparison([tmp_path / n for n in ("a-1", "a-2", "b")], tmp_path / "c.html")
    lines = text.splitlines()
    assert lines[0] == "accuracy"
    assert "at 300 steps" in lines[1]
    assert re.match(r"a +2 +0\.\d+ ± 0\.\d+", lines[2])
    figures = data_of((tmp_path / "c.html").read_text("utf-8"))["figures"]
    assert set(figures) == {f"{axis}-{i}" for axis in ("steps", "flops", "time") for i in (0, 1)}
    lines_of_first = [t for t in figures["steps-0"]["data"] if t.get("fill") is None]
    assert [t["name"] for t in lines_of_first] == ["a", "b"]


def test_speed_bought_with_quality_is_said():
    def told(seconds, accuracy):
        found = []
        for step in range(10, 501, 10):
            found += [
                Record(step, "log/accuracy", "", accuracy),
                Record(step, "run/time", "", step * seconds),
                Record(step, "run/step_seconds", "", seconds),
            ]
        return collect(found, {"config": {"seconds": seconds}})

    groups = sides.group({"fast": told(0.01, 0.5), "slow": told(0.02, 0.9)})
    (remark,) = compare.remarks(groups)
    assert remark.startswith("fast beside slow: steps are 2.00 times as fast")
    assert remark in compare.text(groups)


def test_a_comparison_needs_two_different_runs(tmp_path):
    run = small(tmp_path / "a", steps=20)
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        compare.read_runs([run])
    with pytest.raises(ValueError, match="named twice"):
        compare.read_runs([run, run])


def test_show_returns_the_figures_by_name(tmp_path):
    run = small(tmp_path / "a", steps=100)
    figures = sp.show(run)
    np.testing.assert_allclose(figures["loss"].data[0].y, load(run).get("log/loss").values, rtol=1e-6)
    assert figures["loss"].layout.title.text == "Loss"
    assert list(sp.show(load(run))) == list(figures)
    with pytest.raises(KeyError, match="this run has"):
        figures["lost"]
    with pytest.raises(ValueError, match="got int"):
        sp.show(3)


def test_csv_holds_every_number(tmp_path):
    run = small(tmp_path / "a", steps=30)
    for _ in range(2):  # a second time replaces the first
        file = export_run(run, "csv")
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    history = load(run)
    assert len(rows) == sum(s.values.size for s in history.series.values()) + 2
    wanted = ("30", "moe/tokens_per_expert", "3")
    third = [r for r in rows if (r["step"], r["name"], r["index"]) == wanted]
    expected = [history.get("moe/tokens_per_expert", f"blocks.{i}.mlp").values[-1, 3] for i in (0, 1)]
    assert [float(r["value"]) for r in third] == pytest.approx(expected)
    assert rows[-2]["value"] == FINDING.message


def test_json_lines_hold_every_record_and_event(tmp_path):
    run = small(tmp_path / "a", steps=30)
    file = export_run(run, "jsonl", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    loss = load(run).get("log/loss").values.tolist()
    assert [x["value"] for x in lines if x.get("name") == "log/loss"] == loss
    assert [x["kind"] for x in lines if "kind" in x] == ["finding", "action"]


def test_a_run_says_which_number_is_its_quality():
    def told(quality):
        return collect(
            [Record(1, f"log/{name}", "", 0.5) for name in ("loss", "accuracy", "bleu")],
            {"config": {"quality": quality}},
        )

    assert sides.metrics(sides.group({"a": told("bleu")})) == ["bleu", "accuracy", "loss"]


def test_reports_need_no_torch(tmp_path):
    run = small(tmp_path / "a", steps=20)
    script = (
        "import sys; from pathlib import Path\n"
        "from sparsight.report import serve, server, single, compare, export\n"
        f"single.write_report(Path({str(run)!r}))\n"
        "assert 'torch' not in sys.modules and 'starlette' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
