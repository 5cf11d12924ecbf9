"""Each sink against the real package's own files, read back by the package itself."""

import csv
import json
import math
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import sparsight as sp
from sparsight.dynamics.records import Event, Record
from tests.dynamics.common import batches, recorded, train

READINGS = [
    Record(10, "moe/load_cv", "", 0.25),
    Record(10, "moe/load_cv", "blocks.0.mlp", 0.5),
    Record(10, "moe/tokens_per_expert", "blocks.0.mlp", np.array([3, 0, 5, 8], np.float32)),
    Record(10, "log/loss", "", math.nan),
    Record(20, "moe/load_cv", "", 0.125),
    Record(20, "sparse/topology_map", "head", np.zeros(1024, np.float32)),
]
FOUND = Event(
    20, "finding", "collapse", "act", "blocks.0.mlp", "one expert takes it all", {"share": 0.9}, 1.5
)


def send(sink) -> None:
    sink.write(READINGS[:4])
    sink.write(READINGS[4:])
    sink.event(FOUND)
    sink.close()


def events_of(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0, "tensors": 0})
    read.Reload()
    return read


def test_tensorboard_reads_scalars_histograms_and_events_back(tmp_path: Path):
    send(sp.sinks.TensorBoard(tmp_path, layers=True))
    read = events_of(tmp_path)
    assert [(e.step, e.value) for e in read.Scalars("moe/load_cv")] == [(10, 0.25), (20, 0.125)]
    assert [(e.step, e.value) for e in read.Scalars("moe/blocks.0.mlp/load_cv")] == [(10, 0.5)]
    assert math.isnan(read.Scalars("log/loss")[0].value)
    (bars,) = read.Histograms("moe/blocks.0.mlp/tokens_per_expert")
    assert bars.step == 10
    assert list(bars.histogram_value.bucket) == [3, 0, 5, 8]
    assert list(bars.histogram_value.bucket_limit) == [1, 2, 3, 4]
    (text,) = read.Tensors("events/finding/text_summary")
    assert text.tensor_proto.string_val[0] == b"act: **blocks.0.mlp** one expert takes it all"
    assert "sparse/head/topology_map" not in read.Tags()["histograms"]


def test_only_the_whole_model_by_default(tmp_path: Path):
    send(sp.sinks.TensorBoard(tmp_path))
    tags = events_of(tmp_path).Tags()
    assert sorted(tags["scalars"]) == ["log/loss", "moe/load_cv"]
    assert tags["histograms"] == []


def wandb_records(file: Path) -> list:
    """The records of a .wandb file: a LevelDB log of the package's own protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, part, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            found.append(record)
    return found


def wandb_history(file: Path) -> list[dict[str, object]]:
    """Its history, once the run's end is in the file: wandb's own process writes it, and takes its time."""
    until = time.monotonic() + 60
    records = wandb_records(file)
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < until, "no end of the run in the file"
        time.sleep(0.1)
        records = wandb_records(file)
    lines = [record.history.item for record in records if record.HasField("history")]
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in line} for line in lines]


def test_wandb_keeps_an_offline_run_with_the_step_as_axis(tmp_path: Path):
    # In a process of its own, as users have it: its service does not mix with the forks and event loops of
    # other tests.
    script = (
        "import sys, wandb, sparsight as sp\n"
        "from tests.dynamics.test_sinks import send\n"
        "quiet = wandb.Settings(silent=True, console='off', x_disable_stats=True, x_disable_meta=True, "
        "save_code=False)\n"
        "send(sp.sinks.WandB(layers=True, mode='offline', dir=sys.argv[1], project='test', settings=quiet))"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True, timeout=120)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    first, second, event = wandb_history(file)
    assert (first["step"], first["moe/load_cv"], first["moe/blocks.0.mlp/load_cv"]) == (10, 0.25, 0.5)
    bars = "moe/blocks.0.mlp/tokens_per_expert"
    assert first[f"{bars}/_type"] == "histogram"
    assert (first[f"{bars}/values"], first[f"{bars}/bins"]) == ([3, 0, 5, 8], [0, 1, 2, 3, 4])
    assert (second["step"], second["moe/load_cv"]) == (20, 0.125)
    assert event["events/finding"] == "act: blocks.0.mlp: one expert takes it all"


def test_wandb_refuses_options_that_could_have_no_effect():
    with pytest.raises(ValueError, match=r"a run was given, so \['project'\] can have no effect"):
        sp.sinks.WandB(object(), project="test")


def test_mlflow_reads_metrics_and_events_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its plain files need no database packages
    import mlflow

    uri = (tmp_path / "store").as_uri()
    sink = sp.sinks.MLflow("first", uri=uri, name="a run", layers=True)
    send(sink)
    client = mlflow.MlflowClient(tracking_uri=uri)
    history = client.get_metric_history(sink.run_id, "moe/load_cv")
    assert sorted((m.step, m.value) for m in history) == [(10, 0.25), (20, 0.125)]
    run = client.get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["moe/blocks.0.mlp/tokens_per_expert/3"] == 8
    assert "log/loss" not in run.data.metrics  # not a number
    assert run.data.tags["event.20.finding.collapse"] == "act: blocks.0.mlp: one expert takes it all"
    again = sp.sinks.MLflow("first", uri=uri)
    send(again)
    assert client.get_run(again.run_id).info.experiment_id == run.info.experiment_id


def test_csv_has_a_row_for_each_number(tmp_path: Path):
    send(sp.sinks.CSV(tmp_path / "deep" / "run.csv"))
    with (tmp_path / "deep" / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {"step": "10", "name": "moe/load_cv", "where": "", "index": "", "value": "0.25"}
    vector = [(int(r["index"]), float(r["value"])) for r in rows if r["name"] == "moe/tokens_per_expert"]
    assert vector == [(0, 3), (1, 0), (2, 5), (3, 8)]
    assert math.isnan(float(next(r["value"] for r in rows if r["name"] == "log/loss")))
    assert rows[-1]["name"] == "events/finding"
    send(sp.sinks.CSV(tmp_path / "deep" / "run.csv"))
    with (tmp_path / "deep" / "run.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * len(rows)


def test_json_lines_are_json(tmp_path: Path):
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    send(sp.sinks.JSONL(tmp_path / "run.jsonl"))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    told = [json.loads(line, parse_constant=no_constant) for line in lines]
    assert told[2]["value"] == [3, 0, 5, 8]
    assert told[3] == {"step": 10, "name": "log/loss", "where": "", "value": None}
    assert (told[-1]["rule"], told[-1]["data"]) == ("collapse", {"share": 0.9})


def moe_run(tmp_path: Path, *sinks):
    model = sp.MoE(8, 16, experts=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, sp.watch(model, optimizer, tmp_path / "run", every=2, sinks=sinks)


def test_a_watch_sends_what_it_stores_and_an_export_sends_it_again(tmp_path: Path):
    model, optimizer, watch = moe_run(tmp_path, sp.sinks.JSONL(tmp_path / "live.jsonl"))
    with watch:
        train(model, optimizer, batches(4, 16, 8))
        watch.log(loss=0.5)
        watch.note("halfway")
    sp.sinks.export(tmp_path / "run", sp.sinks.JSONL(tmp_path / "later.jsonl"))

    def key(line: dict[str, object]) -> str:
        return json.dumps({k: v for k, v in line.items() if k != "time"}, sort_keys=True)

    live, later = (
        sorted(key(json.loads(line)) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines())
        for name in ("live", "later")
    )
    assert live == later
    assert len(live) > 20


class Broken:
    closed = False

    def write(self, records):
        raise ConnectionError("the network is down")

    def event(self, event): ...

    def close(self):
        self.closed = True


def test_a_sink_that_fails_is_named_once_and_training_goes_on(tmp_path: Path):
    good = sp.sinks.JSONL(tmp_path / "good.jsonl")
    model, optimizer, watch = moe_run(tmp_path, Broken(), good)
    with watch:
        with pytest.warns(UserWarning, match="sink Broken failed and gets no more records: ConnectionError"):
            train(model, optimizer, batches(2, 16, 8))
        train(model, optimizer, batches(2, 16, 8))
        assert recorded(watch).last_step == 4
    assert '"step": 4' in (tmp_path / "good.jsonl").read_text()


@pytest.mark.parametrize(
    ("sink", "module", "package"),
    [
        ("TensorBoard('x')", "tensorboard", "tensorboard"),
        ("WandB()", "wandb", "wandb"),
        ("MLflow()", "mlflow", "mlflow-skinny"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(sink: str, module: str, package: str):
    script = f"import sys; sys.modules['{module}'] = None\nimport sparsight as sp\nsp.sinks.{sink}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"ImportError: sinks.{sink.split('(')[0]} needs {package}: pip install {package}" in done.stderr
