"""`sparsight train` as a person types it: in a terminal, in a pipe, with Ctrl-C, with mistakes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsight as sp
from sparsight.recipes import checkpoint
from sparsight.recipes.command import main
from tests.recipes.conftest import Tiny

MINE = '''
import torch

import sparsight as sp


def mine(
    *, lr: float = 1e-2, width: int = 8, slow: float = 0.0, sick: int = 0, steps: int = 40
) -> sp.Training:
    """Learn to add.

    Args:
        lr: How fast.
    """
    import time

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step(i):
        time.sleep(slow)
        x = torch.rand(32, 2, generator=torch.Generator().manual_seed(i))
        loss = (model(x)[:, 0] - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": float("nan") if 0 < sick <= i else loss.item()}

    return sp.Training(model, optimizer, steps, step, lambda: {"error": step_error(model)})


def step_error(model):
    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(1))
    return (model(x)[:, 0] - x.sum(1)).abs().mean().item()


def positional(lr: float = 1.0):
    return None


def typeless(*, lr=1.0):
    return None


def wrong(*, lr: float = 1.0):
    return 5
'''

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # the suite runs several at once
COMMAND = (sys.executable, "-m", "sparsight.cli", "train")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSIGHT_DATA", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], check=False, capture_output=True, text=True, timeout=120, env=ENV
    )


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_recipe_of_one_s_own_works_like_ours(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["mine.py:mine", "--width", "16", "--lr", "0.02"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mine: error 0\.\d+ after 40 steps, .* in runs/mine$", out, re.MULTILINE)
    assert out.count("\nstep ") >= 9
    assert "\x1b" not in out
    about = json.loads((folder / "runs/mine/run.json").read_text())
    assert about["recipe"] == f"{folder / 'mine.py'}:mine"
    assert about["knobs"] == {"lr": 0.02, "width": 16, "slow": 0.0, "sick": 0, "steps": 40}
    assert sp.load_run(folder / "runs/mine").meta["config"]["width"] == 16


def test_the_verdict_is_shown_and_a_sick_run_is_told_and_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["mine.py:mine", "--steps", "60", "--run", "well"]) == 0
    assert ", healthy, in well" in capsys.readouterr().out
    assert main(["mine.py:mine", "--steps", "60", "--sick", "20", "--run", "sick"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step \d+: .* loss is (NaN|infinite)", out, re.MULTILINE), out
    assert re.search(r"sick: .* in sick$", out, re.MULTILINE), out
    assert "sparsight doctor sick" in out
    events = sp.load_run(folder / "sick").events
    assert any(event.kind == "finding" and event.severity == "act" for event in events)


def test_a_second_run_gets_a_folder_of_its_own_and_quiet_is_quiet(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    for number in ("", "-2"):
        assert main(["mine.py:mine", "--quiet"]) == 0
        assert capsys.readouterr().out.endswith(f"in runs/mine{number}\n")
    assert main(["mine.py:mine", "--quiet", "--run", "else/where", "--watch-every", "0"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(ValueError, match="`sparsight train --resume else/where` goes on with it"):
        main(["mine.py:mine", "--run", "else/where"])


def test_the_command_line_passes_every_kind_of_knob(
    tiny: Tiny, folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--steps", "6", "--density", "0.3", "--method", "set", "--experts", "2", "--capacity", "1.5"]
    assert main(tiny.arguments("image", *words, "--run", "r", "--threads", "1")) == 0
    out = capsys.readouterr().out
    assert re.search(r"step 6/6 loss \S+ density 0.3 busiest expert \d\.\d×$", out, re.MULTILINE)
    about = json.loads((folder / "r/run.json").read_text())
    assert about["knobs"]["weights"] == {"density": 0.3, "method": "set", "every": 0, "storage": "auto"}
    assert about["knobs"]["paths"]["capacity"] == 1.5
    before = checkpoint.read(folder / "r")["model"]
    # A run that has ended has nothing left to do, and says its result again.
    assert main(["--resume", "r"]) == 0
    assert "after 6 steps" in capsys.readouterr().out
    after = checkpoint.read(folder / "r")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_ctrl_c_saves_and_resume_ends_as_if_nothing_had_happened(folder: Path, tmp_path: Path):
    assert main(["mine.py:mine", "--quiet", "--run", "whole"]) == 0
    words = [*COMMAND, "mine.py:mine", "--slow", "0.05", "--run", "parts", "--checkpoint-every", "2"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV
    ) as process:
        wait_for((folder / "parts/checkpoint.pt").exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert re.search(r"stopped after step \d+ of 40; everything is saved. Go on with", out)
    assert "\n  sparsight train --resume parts\n" in out
    assert 2 <= checkpoint.read(folder / "parts")["progress"]["step"] < 40
    about = json.loads((folder / "parts/run.json").read_text())
    about["knobs"]["slow"] = 0.0  # the rest at full speed
    (folder / "parts/run.json").write_text(json.dumps(about))

    done = typed("--resume", "parts")
    assert done.returncode == 0, done.stderr
    whole, parts = (checkpoint.read(folder / name) for name in ("whole", "parts"))
    assert whole["progress"]["metrics"] == parts["progress"]["metrics"]
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


def test_killed_half_way_the_folder_can_be_read_and_resumed(folder: Path):
    words = [*COMMAND, "mine.py:mine", "--slow", "0.02", "--run", "r", "--checkpoint-every", "1"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env=ENV) as process:
        wait_for((folder / "r/checkpoint.pt").exists)
        time.sleep(0.15)
        process.kill()
    step = checkpoint.read(folder / "r")["progress"]["step"]
    assert 1 <= step <= 40
    sp.load_run(folder / "r")
    assert main(["--resume", "r", "--quiet"]) == 0
    assert checkpoint.read(folder / "r")["progress"]["step"] == 40


def test_a_terminal_gets_a_line_that_moves(folder: Path):
    ours, theirs = pty.openpty()
    env = {**ENV, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    words = [*COMMAND, "mine.py:mine", "--slow", "0.02", "--run", "r"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # the other end is closed
                    break
    os.close(ours)
    text = seen.decode()
    assert process.returncode == 0, text
    assert "\x1b[2K" in text  # a line that is drawn again
    moves = [int(done) for done in re.findall(r"step (\d+)/40 ", re.sub(r"\x1b\[[\d;]*m", "", text))]
    assert len(set(moves)) > 3
    assert moves == sorted(moves)
    assert "loss 0." in text
    assert "left" in text
    assert "mine: error" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["imgae"], "there is no recipe 'imgae'; did you mean 'image'? There are image, language"),
        (["nothing-like-it"], "there is no recipe 'nothing-like-it'. There are image"),
        (["nowhere.py:mine"], "there is no file 'nowhere.py'"),
        (["mine.py"], "which function of 'mine.py' is the recipe? Say mine.py:function; it has mine"),
        (["mine.py:mien"], "has no function 'mien'; did you mean 'mine'?"),
        (["mine.py:positional"], "knobs are keyword-only arguments, and 'lr' is not"),
        (["mine.py:typeless"], "knob 'lr' needs a type and a default"),
        (["mine.py:wrong"], "must return a Training, got int"),
        (["image", "--data", "mnist"], "no data for 'mnist': give a path, or set SPARSIGHT_DATA"),
        (["translation"], "it comes from https://github.com/multi30k/dataset"),
        (["--resume", "runs/none"], "there is no run folder 'runs/none'"),
        (["--resume", "."], "has no run.json"),
        (["image", "--evaluations", "0", "--steps", "1"], "expected evaluations >= 1"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(words: list[str], message: str, folder: Path):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        main(words)
    assert "\n" not in str(caught.value)


def test_a_mistake_ends_with_code_2_and_no_traceback(folder: Path):
    done = typed("imgae")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sparsight: there is no recipe 'imgae'; did you mean 'image'?")
    assert done.stderr.count("\n") == 1


def test_an_unknown_knob_suggests_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["image", "--densty", "0.1"])
    assert stopped.value.code == 2
    assert "--density FLOAT" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["image", "--density", "3"])
    assert stopped.value.code == 2
    assert "density must lie in (0, 1], got 3.0" in capsys.readouterr().err


def test_a_run_made_with_a_knob_that_is_gone(folder: Path):
    assert main(["mine.py:mine", "--quiet", "--run", "r"]) == 0
    about = json.loads((folder / "r/run.json").read_text())
    about["knobs"]["widht"] = about["knobs"].pop("width")
    (folder / "r/run.json").write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"has no knob 'widht', which this run was made with .* did you mean"
    ):
        main(["--resume", "r"])
    (folder / "r/run.json").write_text("{half")
    with pytest.raises(ValueError, match="cannot be read"):
        main(["--resume", "r"])


def test_help_lists_recipes_and_knobs_quickly_without_torch():
    script = (
        "import sys, time; begin = time.process_time(); from sparsight.cli import main\n"
        "sys.argv = ['sparsight', 'train', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print('took', time.process_time() - begin)"
    )
    for words, expected in (
        (["--help"], ("image", "language", "translation", "electra", "--resume RUN", "path/to/mine.py")),
        ([], ("image", "electra")),
        (
            ["image", "--help"],
            ("--network {mlp,resnet}", "--density FLOAT", "(default: 1.0)", "--checkpoint-every"),
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *words], check=False, capture_output=True, text=True, env=ENV
        )
        assert done.returncode == 0, done.stderr
        for word in expected:
            assert word in done.stdout
        # Processor time, since the machine may be busy with other tests.
        assert float(done.stdout.rsplit("took", 1)[1]) < 0.5
