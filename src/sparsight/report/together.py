"""Several comparisons in one file: chapters, each with its runs side by side and one of them in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsight.dynamics.sampling import sample
from sparsight.dynamics.store import FILE
from sparsight.report import html
from sparsight.report.compare import comparison, read_runs
from sparsight.report.health import judge_all
from sparsight.report.single import POINTS, run_parts, write_html


@dataclass(frozen=True)
class Chapter:
    """The runs of a folder, compared."""

    title: str
    said: str
    """One sentence below the title."""
    folder: Path
    whole: str = ""
    """The name of a run that is shown with all its charts as well."""

    def runs(self) -> list[Path]:
        """In the order in which they were begun."""
        found = [file.parent for file in self.folder.glob(f"*/{FILE}")]
        return sorted(found, key=lambda run: (run / FILE).stat().st_ctime)


def write_together(out: Path, title: str, chapters: Sequence[Chapter]) -> Path:
    """Write the file and return its path."""
    figures: dict[str, Any] = {}
    inner = []
    for number, chapter in enumerate(chapters):
        inner.append(f'<h1>{html.safe(chapter.title)}</h1><p class="note">{html.safe(chapter.said)}</p>')
        inner.append(comparison(read_runs(chapter.runs()), figures, f"c{number}-"))
        if chapter.whole:
            run = chapter.folder / chapter.whole
            history, judged = sample(run, points=POINTS), judge_all(run)
            inner.append(run_parts(chapter.whole, history, judged, figures, f"r{number}-"))
    body = f"{html.bar(title)}<main>{''.join(inner)}</main>"
    data = {"templates": html.templates(), "figures": figures}
    return write_html(out, html.document(title, body, data))
