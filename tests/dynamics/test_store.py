"""The store under bad input and bad luck: foreign files, full disks, two writers, kills, slow readers."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsight as sp
from sparsight.dynamics.reading import read_meta, read_series
from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.store import FILE, Store, StoreError

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def loss(step: int, value: float = 0.5) -> Record:
    return Record(step, "log/loss", "", value)


def begin(folder: Path, **options: object) -> sp.Watch:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="watch: nothing in this model is sparse")
        return sp.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder, **options)


def foreign(folder: Path) -> bytes:
    folder.mkdir()
    with sqlite3.connect(folder / FILE) as other:
        other.execute("CREATE TABLE songs (title TEXT)")
    other.close()
    return (folder / FILE).read_bytes()


# -- whose folder is it ----------------------------------------------------------------------------


def test_another_programs_database_is_refused_and_left_as_it_was(tmp_path: Path):
    before = foreign(tmp_path / "run")
    for use in (
        lambda: Store(tmp_path / "run"),
        lambda: sp.load_run(tmp_path / "run"),
        lambda: begin(tmp_path / "run", resume=True),
    ):
        with pytest.raises(StoreError, match="belongs to another program; expected the store of a Sparsight"):
            use()
    assert (tmp_path / "run" / FILE).read_bytes() == before
    assert [f.name for f in (tmp_path / "run").iterdir()] == [FILE]
    with begin(tmp_path / "run") as watch:
        assert watch.run == tmp_path / "run-2"


def test_a_file_that_is_no_database_is_refused(tmp_path: Path):
    (tmp_path / FILE).write_text("Dear diary, " * 100)
    for use in (lambda: Store(tmp_path), lambda: sp.load_run(tmp_path)):
        with pytest.raises(StoreError, match="is not the store of a run"):
            use()


def test_a_path_that_is_a_file_and_one_below_a_file_are_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(StoreError, match=r"notes\.txt is a file; expected the name of a folder"):
        begin(tmp_path / "notes.txt")
    with pytest.raises(StoreError, match=r"cannot be made: .*Not a directory"):
        begin(tmp_path / "notes.txt" / "run")
    (tmp_path / "odd" / FILE).mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "odd")


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path):
    """As a user without rights: root may write anywhere."""
    (tmp_path / "run").mkdir(mode=0o555)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sparsight.dynamics.store import Store, StoreError\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: Store(Path(sys.argv[1]))\n"
        "except StoreError as error: print(error)\n"
    )
    for folder in (tmp_path / "run", Path("/proc/run")):
        os.chmod(tmp_path, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=ENV, check=False
        )
        assert f"the run folder {folder} cannot be" in done.stdout, done.stderr


def test_a_newer_schema_is_refused_with_advice(tmp_path: Path):
    Store(tmp_path / "run").close()
    with sqlite3.connect(tmp_path / "run" / FILE) as newer:
        newer.execute("PRAGMA user_version = 7")
    newer.close()
    for use in (lambda: Store(tmp_path / "run"), lambda: sp.load_run(tmp_path / "run")):
        with pytest.raises(StoreError, match=r"has schema 7, .* up to 1; update Sparsight to read it"):
            use()


def test_a_folder_without_a_run_says_what_was_expected(tmp_path: Path):
    with pytest.raises(StoreError, match=r"has no run in it: expected a folder with run\.sqlite"):
        sp.load_run(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        sp.load_run(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="has no run to resume"):
        begin(tmp_path, resume=True)


# -- two writers -----------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from sparsight.dynamics.records import Record
from sparsight.dynamics.store import Store
store = Store(Path(sys.argv[1]))
store.append([Record(1, "log/loss", "", 0.5)])
store.flush()
print("holding", flush=True)
time.sleep(60)
"""


def test_a_second_process_may_not_write_and_may_once_the_first_has_died(tmp_path: Path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=ENV
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "holding\n"
        with pytest.raises(StoreError, match="is being written by another process or watch"):
            begin(tmp_path / "run", resume=True)
        assert sp.load_run(tmp_path / "run").get("log/loss").values.tolist() == [0.5]
        with begin(tmp_path / "run") as beside:  # without resume there is no quarrel
            assert beside.run == tmp_path / "run-2"
    finally:
        first.kill()
        first.communicate()
    with begin(tmp_path / "run", resume=True) as second:
        assert second.step == 1
        second.step = 2
        second.log(loss=0.25)
    assert sp.load_run(tmp_path / "run").get("log/loss").values.tolist() == [0.5, 0.25]


def test_a_second_watch_in_one_process_is_refused_too(tmp_path: Path):
    with begin(tmp_path / "run"), pytest.raises(StoreError, match="another process or watch"):
        begin(tmp_path / "run", resume=True)


# -- bad luck --------------------------------------------------------------------------------------

WRITE = """
import sys
from pathlib import Path
import numpy as np
from sparsight.dynamics.records import Record
from sparsight.dynamics.store import Store
store = Store(Path(sys.argv[1]))
for step in range(1, 10**9):
    store.append([Record(step, f"log/{i}", "", float(step)) for i in range(20)])
    store.append([Record(step, "moe/load", "a", np.full(64, step, np.float32))])
    if step % 5 == 0:
        store.flush()
        print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment_the_file_opens_and_lacks_at_most_the_last_batch(tmp_path: Path, seed: int):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "5\n"
    time.sleep(random.Random(seed).uniform(0, 0.4))
    writer.send_signal(signal.SIGKILL)
    said = [5, *(int(line) for line in writer.communicate()[0].splitlines() if line)]
    history = sp.load_run(tmp_path / "run")
    for key, series in history.series.items():
        steps = series.steps.tolist()
        assert steps == list(range(1, steps[-1] + 1)), key
        assert said[-1] <= steps[-1] <= said[-1] + 5  # a batch may be in and not yet announced
        assert (series.values.reshape(len(steps), -1)[:, 0] == steps).all()
    store = Store(tmp_path / "run")  # and the run can go on
    store.append([Record(10**6, "log/0", "", 1.0)])
    store.close()
    assert sp.load_run(tmp_path / "run").last_step == 10**6


FULL = """
import json, resource, signal, sys, warnings
import torch
from torch import nn
import sparsight as sp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = sp.MoE(8, 16, experts=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch = sp.watch(model, optimizer, sys.argv[1], every=1)
watch.store.patience = 0.0
said = []
def step():
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(5): step()
    size = (watch.run / "run.sqlite-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, resource.RLIM_INFINITY))
    for _ in range(30): step()
    full = [str(w.message) for w in caught]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for _ in range(5): step()
    watch.close()
    print(json.dumps({"full": full, "all": [str(w.message) for w in caught]}))
"""


def test_when_no_more_can_be_written_training_goes_on_and_the_records_come_later(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=ENV,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["full"]) == 1
    assert "Training goes on; records are kept in memory" in said["full"][0]
    assert len(said["all"]) == 2
    assert "writing again; 0 records were lost" in said["all"][1]
    history = sp.load_run(tmp_path / "run")
    assert history.get("moe/load_cv").steps.tolist() == list(range(1, 41))


def fill(store: Store, steps: int) -> None:
    for step in range(1, steps + 1):
        store.append([loss(step), Record(step, "moe/x", "a", np.zeros(4096, np.float32))])
        store.flush()


def test_a_full_disk(tmp_path: Path):
    """A file system of its own, two hundred kilobytes small, where this user may mount one; else the store's
    own limit on pages, which raises the same error."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        store = Store(disk / "run")
        ballast = disk / "ballast"
        if mounted:
            with pytest.raises(OSError, match="No space left"):
                ballast.write_bytes(bytes(10**6))
        else:
            store._connection.execute("PRAGMA max_page_count = 1")
        with pytest.warns(UserWarning, match=r"(disk is full|disk I/O error).*Training goes on"):
            fill(store, 19)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.flush()  # one warning is enough
        if mounted:
            ballast.unlink()
            subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        else:
            store._connection.execute("PRAGMA max_page_count = 100000")
        with pytest.warns(UserWarning, match="writing again; 0 records were lost"):
            store.flush()
        store.close()
        assert read_series(disk / "run", "log/loss").steps.tolist() == list(range(1, 20))
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_waits_for_a_full_disk_is_bounded_and_the_loss_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sparsight.dynamics.store._MOST_KEPT", 10)
    store = Store(tmp_path / "run")
    store._connection.execute("PRAGMA max_page_count = 1")
    with pytest.warns(UserWarning, match="Training goes on"):
        fill(store, 30)
    store._connection.execute("PRAGMA max_page_count = 100000")
    with pytest.warns(UserWarning, match="writing again; 50 records were lost"):
        store.flush()
    store.close()
    assert read_series(tmp_path / "run", "log/loss").steps.tolist() == list(range(26, 31))


def test_a_file_damaged_under_way_does_not_end_the_training(tmp_path: Path):
    store = Store(tmp_path / "run")
    store.append([loss(step) for step in range(1000)])
    store.flush()
    store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = store.file.stat().st_size
    store.file.write_bytes(b"\xff" * size)
    store._connection.execute("PRAGMA shrink_memory")
    store.append([loss(2000)])
    with pytest.warns(UserWarning, match="Training goes on"):
        store.flush()
    store._records = []
    store.close()


# -- readers, forks, odd values --------------------------------------------------------------------


def test_a_reader_in_the_middle_of_its_work_does_not_hold_the_writer_up(tmp_path: Path):
    store = Store(tmp_path / "run")
    store.append([loss(1)])
    store.flush()
    reader = sqlite3.connect(f"file:{store.file}?mode=ro", uri=True)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM scalar").fetchone() == (1,)
    began = time.perf_counter()
    for step in range(2, 50):
        store.append([loss(step)])
        store.flush()
    assert time.perf_counter() - began < 2  # a lock would wait for five seconds
    assert reader.execute("SELECT count(*) FROM scalar").fetchone() == (1,)  # one moment, as it began
    assert len(sp.load_run(tmp_path / "run").get("log/loss")) == 49
    reader.close()
    store.close()


def test_workers_that_are_forked_while_a_run_is_written_leave_it_alone(tmp_path: Path):
    model = sp.MoE(8, 16, experts=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 8))
    with sp.watch(model, optimizer, tmp_path / "run", every=1) as watch:
        watch.store.patience = 0.0
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")
                workers = DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork")
                for (x,) in workers:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
    history = sp.load_run(tmp_path / "run")
    assert history.get("moe/load_cv").steps.tolist() == list(range(1, 9))
    with sqlite3.connect(tmp_path / "run" / FILE) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()


def test_a_forked_child_neither_writes_nor_hoards(tmp_path: Path):
    store = Store(tmp_path / "run", patience=0.0)
    child = os.fork()
    if child == 0:
        store.append([loss(7)])
        kept = len(store._records)
        store.close()
        os._exit(kept)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.append([loss(1)])
    store.close()
    assert sp.load_run(tmp_path / "run").get("log/loss").steps.tolist() == [1]


def test_odd_numbers_come_back_as_they_went_in(tmp_path: Path):
    store = Store(tmp_path / "run", {"config": {"lr": np.float32(0.5), "shape": torch.Size([2]), "f": len}})
    values = [float("nan"), float("inf"), float("-inf"), -0.0, 1e-300]
    store.append([loss(step, value) for step, value in enumerate(values)])
    store.append([Record(0, "moe/x", "a", np.array([np.nan, np.inf, 1.0], np.float32))])
    store.event(Event(1, "finding", "r", "warn", "a", "m", {"share": np.float32(0.25), "by": np.arange(2)}))
    store.close()
    history = sp.load_run(tmp_path / "run")
    np.testing.assert_array_equal(history.get("log/loss").values, values)
    np.testing.assert_array_equal(history.get("moe/x", "a").last, [np.nan, np.inf, 1.0])
    assert history.events[0].data == {"share": 0.25, "by": [0, 1]}
    config = read_meta(tmp_path / "run")["config"]
    assert (config["lr"], config["shape"]) == (0.5, [2])
