"""`sparsight watch` and its neighbours at a terminal."""

import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from sparsight import cli
from tests.report.stores import small

COMMAND = (sys.executable, "-m", "sparsight.cli")
# Makes the pseudo-terminal the one that Ctrl-C comes from, then becomes the command.
IN_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def refused(monkeypatch, capsys, *arguments: object) -> str:
    """What the command says before it ends with an error."""
    monkeypatch.setattr(sys, "argv", ["sparsight", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code
    code = ended.value.code
    return capsys.readouterr().err + (f"{code}\n" if isinstance(code, str) else "")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def read_until(end: int, pattern: str, seconds: float = 30) -> str:
    text, limit = "", time.monotonic() + seconds
    while not re.search(pattern, text) and time.monotonic() < limit:
        if select.select([end], [], [], 0.2)[0]:
            try:
                text += os.read(end, 4096).decode()
            except OSError:  # the other end was closed
                break
    return text


def test_in_a_terminal_it_says_where_and_ctrl_c_ends_it_without_a_word(tmp_path):
    small(tmp_path / "runs" / "one", steps=20)
    mine, its = pty.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, *COMMAND, "watch", str(tmp_path / "runs"), "--port", "0"]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its)
    os.close(its)
    try:
        said = read_until(mine, r"http://\S+")
        assert "runs in" in said
        address = re.search(r"http://\S+", said)[0]
        with urllib.request.urlopen(f"{address}api/runs", timeout=30) as answer:
            assert b'"name": "one"' in answer.read()
        stream = urllib.request.urlopen(f"{address}api/stream?run=one", timeout=30)
        stream.readline()  # someone is looking while it ends
        os.write(mine, b"\x03")
        assert process.wait(20) == 0
        after = read_until(mine, r"Traceback|ERROR", 1)
        assert "Traceback" not in after
        assert "ERROR" not in after
        stream.close()
    finally:
        if process.poll() is None:
            process.kill()
        os.close(mine)


def test_a_port_in_use_is_one_sentence(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(monkeypatch, capsys, "watch", tmp_path, "--port", taken.getsockname()[1])
    assert re.fullmatch(r"sparsight: watch: port \d+ is in use; take another with --port.*\n", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("watch", "nowhere"), "nowhere is not a folder; expected one with runs in it"),
        (("watch", ".", "--host", "no.such.host.invalid"), "there is no address no.such.host.invalid"),
        (("watch", ".", "--token", "short"), "the token must have at least 8"),
        (("report", "nowhere"), "nowhere does not exist: expected a folder with run.sqlite"),
        (("compare", "nowhere"), "nowhere does not exist"),
        (("export", "nowhere"), "nowhere does not exist"),
    ],
    ids=lambda x: " ".join(x)[:24] if isinstance(x, tuple) else "",
)
def test_what_is_wrong_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    told = refused(monkeypatch, capsys, *arguments)
    assert said in told
    assert len(told.splitlines()) == 1


def test_report_compare_and_export_say_what_they_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "a", steps=40)
    small(tmp_path / "b", steps=40, sparse=0)
    assert run("report", "a").stdout.strip().endswith("report.html")
    done = run("compare", "a", "b")
    assert done.stdout.startswith("accuracy\n")
    assert done.stdout.endswith("written: compare.html\n")
    assert "\x1b" not in done.stdout
    assert run("export", "a", "--to", "jsonl").stdout == "written: a/records.jsonl\n"
    for file in ("a/report.html", "compare.html", "a/records.jsonl"):
        assert (tmp_path / file).stat().st_size
