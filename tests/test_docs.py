"""Every page in docs/ is run: its Python blocks in order, in one namespace, and its links are followed.

A ```text block right after a Python block is what that block prints.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import sparsight as sp

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
METHOD_PAGES = sorted(path.stem for path in (DOCS / "methods").glob("*.md") if path.stem != "index")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@dataclass(frozen=True)
class Snippet:
    code: str
    line: int
    prints: str | None


def snippets(text: str) -> list[Snippet]:
    found: list[Snippet] = []
    fences = list(FENCE.finditer(text))
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        shown = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
        line = text.count("\n", 0, fence.start(2))
        found.append(Snippet(fence[2], line, after[2] if shown and after else None))
    return found


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def run_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, object] = {"__name__": "docs"}
    for snippet in snippets(page.read_text()):
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * snippet.line + snippet.code, str(page), "exec")
        exec(code, space)
        printed = capsys.readouterr().out
        if snippet.prints is not None:
            assert printed.strip() == snippet.prints.strip(), f"{page.name}, line {snippet.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_snippet_runs_and_prints_what_the_page_says(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert snippets(page.read_text()), "a page without a snippet"
    run_page(page, capsys)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page.read_text())):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{name_of(page)}: {link}"


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_a_method_page_has_its_sections_and_is_in_the_index(page: str) -> None:
    text = (DOCS / "methods" / f"{page}.md").read_text()
    heads = re.findall(r"^## (.+)$", prose(text), re.MULTILINE)
    assert heads == [
        "Use",
        "What it does",
        "Arguments",
        "What it costs",
        "When to use something else",
        "Reference",
    ]
    assert f"({page}.md)" in (DOCS / "methods" / "index.md").read_text()


def test_every_public_method_has_a_page() -> None:
    home = "sparsight.dst.methods"
    methods = {name for name in sp.__all__ if getattr(getattr(sp, name), "__module__", "") == home}
    assert methods, "no methods found: did they move?"
    assert {name.strip("_") for name in methods} | {"prune", "lottery_ticket"} == set(METHOD_PAGES)


@pytest.mark.parametrize(
    "broken",
    ["```python\nraise RuntimeError('broken')\n```\n", "```python\nprint(1)\n```\n\n```text\n2\n```\n"],
    ids=["raises", "prints something else"],
)
def test_a_broken_snippet_is_noticed(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(broken)
    with pytest.raises((RuntimeError, AssertionError)):
        run_page(page, capsys)
