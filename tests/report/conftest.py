"""A headless Chromium, the page's server as a process of its own, and a console that must stay silent."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    found = os.environ.get("SPARSIGHT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    return found if found and Path(found).exists() else None


@pytest.fixture(scope="module")  # its event loop must be gone before other modules run theirs
def browser():
    path = chromium()
    if path is None:
        pytest.skip("needs chromium: apt-get install -y chromium (or SPARSIGHT_CHROMIUM=path)")
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs chromium and playwright: pip install playwright"
    )
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@dataclass
class Seen:
    """A page, and everything that it complained about."""

    page: object
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Seen]]:
    contexts = []

    def opened(**options: object) -> Seen:
        context = browser.new_context(viewport={"width": 1300, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        seen = Seen(page)
        page.on("console", lambda m: m.type in ("error", "warning") and seen.errors.append(m.text))
        page.on("pageerror", lambda e: seen.errors.append(str(e)))
        page.on("dialog", lambda d: (seen.errors.append(f"dialog: {d.message}"), d.dismiss()))
        page.on("request", lambda r: seen.requests.append(r.url))
        return seen

    yield opened
    for context in contexts:
        context.close()


class Served:
    """`sparsight watch` as a user starts it."""

    def __init__(self, runs: Path, port: int = 0, *more: str) -> None:
        command = [sys.executable, "-m", "sparsight.cli", "watch", str(runs), "--port", str(port), *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = ""
        while not (found := re.search(r"open (http://\S+:(\d+)/\S*)", self.said)):
            line = self.process.stdout.readline()
            assert line, f"the server ended: {self.process.stderr.read()}"
            self.said += line
        self.url, self.port = found[1], int(found[2])

    def stop(self, how: int = signal.SIGINT) -> tuple[int, str]:
        """End it; its exit code and what it wrote to standard error."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*args: object) -> Served:
        started.append(Served(*args))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()
