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

from tests.report.stores import small

COMMAND = (sys.executable, "-m", "sparsight.cli")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


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
    process = subprocess.Popen(
        [*COMMAND, "watch", str(tmp_path / "runs"), "--port", "0"],
        stdin=its, stdout=its, stderr=its, start_new_session=True,
        preexec_fn=lambda: os.set_inheritable(0, True) or __import__("fcntl").ioctl(0, 0x540E, 0),
    )  # fmt: skip
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


def test_a_port_in_use_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("watch", tmp_path, "--port", taken.getsockname()[1])
    assert done.returncode != 0
    assert re.fullmatch(r"sparsight: watch: port \d+ is in use; take another with --port.*\n", done.stderr)


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
def test_what_is_wrong_is_one_sentence(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
