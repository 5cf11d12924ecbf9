"""The public surface, what importing it costs, and the command line as a person types it."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

import sparsight as sp


def test_every_public_name_resolves_and_is_listed():
    for name in sp.__all__:
        assert getattr(sp, name) is not None
    assert set(sp.__all__) == set(sp._HOME)
    with pytest.raises(AttributeError, match="no attribute 'rigel'"):
        sp.rigel  # noqa: B018


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # the suite runs several at once
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env)


def test_the_core_imports_torch_and_numpy_alone():
    script = (
        "import sys, torch, torch._dynamo, torch.distributed.nn, numpy; before = set(sys.modules)\n"
        "import sparsight as sp\n"
        "[getattr(sp, name) for name in sp.__all__]\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "outside = {m for m in new if m not in sys.stdlib_module_names and m != 'sparsight'}\n"
        "print(sorted(outside - {'torch', 'numpy'}))"
    )
    assert run(sys.executable, "-c", script).stdout.strip() == "[]"


def test_help_does_not_import_torch():
    script = (
        "import sys; from sparsight.cli import main; sys.argv = ['sparsight', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_a_mistyped_option_suggests_the_right_one():
    done = run(sys.executable, "-m", "sparsight.cli", "bench", "--repaets", "2")
    assert done.returncode == 2
    assert "--repeats" in done.stderr


def test_a_bad_value_is_one_sentence_and_not_a_traceback():
    done = run(sys.executable, "-m", "sparsight.cli", "train", "image", "--density", "3")
    assert done.returncode == 2
    assert "density must lie in (0, 1], got 3.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_prints_its_tables_and_leaves_one_report(tmp_path):
    done = run(sys.executable, "-m", "sparsight.cli", "demo", "--quick", "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    for expected in ("RigL 90 %", "MB to train", "SparseMixer", "bits a character", "healed"):
        assert expected in done.stdout
    # Piped output carries no progress bar and no colours.
    assert "\x1b" not in done.stdout
    report = tmp_path / "demo" / "report.html"
    assert str(report) in done.stdout
    text = report.read_text()
    assert text.count("plotly.js v") == 1
    for chapter in ("Sparse weights", "Sparse paths", "A collapse, caught and healed"):
        assert chapter in text
    again = run(sys.executable, "-m", "sparsight.cli", "demo", "--quick", "--out", str(tmp_path / "demo"))
    assert again.returncode == 2
    assert "an earlier demo" in again.stderr


def test_versions_agree():
    from importlib.metadata import version

    assert import_module("sparsight").__version__ == version("sparsight")
