"""The comparison of runs: a table for the terminal, and one file with overlays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsight.dynamics.history import History
from sparsight.dynamics.reading import store_of
from sparsight.dynamics.sampling import sample
from sparsight.health.diagnose import compare_runs
from sparsight.report import html, words
from sparsight.report.figures.comparing import overlay
from sparsight.report.runs import progress
from sparsight.report.sides import (
    AXES,
    Group,
    common_end,
    differences,
    final,
    group,
    metrics,
    spread,
    value_at,
)


def _needed(name: str) -> bool:
    return name.startswith("log/") or name in ("run/time", "run/step_seconds", "sparse/flops_ratio")


def read_runs(runs: Sequence[Path | str]) -> dict[str, History]:
    """What a comparison needs of each run, under names that tell them apart."""
    folders = [store_of(run).parent.resolve() for run in runs]
    if len(folders) < 2:
        raise ValueError(f"compare: expected two runs or more, got {len(folders)}")
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ValueError(f"compare: {twice} is named twice")
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return {
        # Whole series: the running mean of a thinned one, which keeps extremes, would not be theirs.
        name: sample(folder, _needed, points=None)
        for name, folder in zip(names, folders, strict=True)
    }


def tables(groups: Sequence[Group]) -> list[tuple[str, list[list[str]]]]:
    """For each metric, a head and a row for each group."""
    found = []
    for metric in metrics(groups):
        ends = {axis.id: common_end(groups, metric, axis) for axis in AXES}
        head = ["", "runs", "final"]
        head += [f"at {_amount(axis.id, end)}" for axis in AXES if (end := ends[axis.id]) is not None]
        rows = [[*head, "time"]]
        for one in groups:
            row = [one.label, str(len(one.runs)), str(final(one, metric))]
            for axis in AXES:
                if (end := ends[axis.id]) is not None:
                    row.append(str(value_at(one, metric, axis, end)))
            seconds = spread([s for h in one.runs.values() if (s := progress(h)[1]) is not None])
            rows.append([*row, words.duration(None if seconds is None else seconds.mean)])
        found.append((metric, rows))
    return found


def _amount(axis: str, end: float) -> str:
    if axis == "steps":
        return f"{end:,.0f} steps"
    return f"FLOPs of {words.number(end)} dense steps" if axis == "flops" else words.duration(end)


def text(groups: Sequence[Group]) -> str:
    """The tables for a terminal, in columns."""
    parts = []
    for metric, rows in tables(groups):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        parts.append("\n".join([_printable(metric), *map(_printable, lines)]))
    parts += [_printable(remark) for remark in remarks(groups)]
    return "\n\n".join(parts) if parts else "these runs have logged nothing in common"


def remarks(groups: Sequence[Group]) -> list[str]:
    """What the rules over two runs say about each group beside each other one, by their first runs."""
    firsts = [(g.label, next(iter(g.runs.values()))) for g in groups]
    return [
        f"{label} beside {other}: {finding.message.removeprefix('the model: ')}"
        for label, history in firsts
        for other, baseline in firsts
        if label != other
        for finding in compare_runs(history, baseline)
    ]


def _printable(line: str) -> str:
    """Names come from a store: nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in line)


def compare_html(runs: Mapping[str, History]) -> str:
    """The whole file."""
    figures: dict[str, Any] = {}
    inner = f"<h1>{len(runs)} runs</h1>{comparison(runs, figures)}"
    body = f"{html.bar('Sparsight comparison')}<main>{inner}</main>"
    return html.document("Comparison – Sparsight", body, {"templates": html.templates(), "figures": figures})


def comparison(runs: Mapping[str, History], figures: dict[str, Any], prefix: str = "") -> str:
    """Tables and charts; their figures go into `figures`, under names that begin with `prefix`."""
    groups = group(runs)
    sections = []
    for m, (metric, rows) in enumerate(tables(groups)):
        cards = []
        for axis in AXES:
            figure = overlay(groups, metric, axis)
            if figure is not None:
                key = f"{prefix}{axis.id}-{m}"
                figures[key] = html.figure_json(figure)
                cards.append(
                    html.card(f"chart-{key}", f"{metric} at {axis.title}", f"Over {axis.unit}.", figure=key)
                )
        sections.append(
            f"<section><h2>{html.safe(metric)}</h2>{_table(rows)}"
            f'<div class="cards thirds">{"".join(cards)}</div></section>'
        )
    seeds = any(len(g.runs) > 1 for g in groups)
    said = "Bands are one standard deviation over seeds. " if seeds else ""
    warnings = "".join(f'<p class="trouble">{html.safe(remark)}</p>' for remark in remarks(groups))
    return (
        f'<p class="note">{said}The dotted line is as far as all runs have come. '
        "FLOPs are counted in steps of each run's own dense model.</p>"
        f"{warnings}{''.join(sections)}{_differences(groups)}"
    )


def _table(rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col" class="number">{html.safe(cell)}</th>' for cell in rows[0])
    lines = []
    for row in rows[1:]:
        cells = "".join(f'<td class="number">{html.safe(cell)}</td>' for cell in row[1:])
        lines.append(f'<tr><th scope="row">{html.safe(row[0])}</th>{cells}</tr>')
    body = "".join(lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _differences(groups: Sequence[Group]) -> str:
    rows = differences(groups)
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{html.safe(g.label)}</th>' for g in groups)
    inner = "".join(
        f'<tr><th scope="row">{html.safe(key)}</th>{"".join(f"<td>{html.safe(v)}</td>" for v in values)}</tr>'
        for key, values in rows
    )
    return (
        '<section><h2>In what they differ</h2><div class="scroll"><table>'
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{inner}</tbody></table></div></section>"
    )


def write_comparison(runs: Sequence[Path | str], out: Path) -> str:
    """Write the file and return the tables as text."""
    found = read_runs(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(compare_html(found), "utf-8")
    except OSError as error:
        raise ValueError(f"the comparison cannot be written to {out}: {error.strerror or error}") from None
    return text(group(found))
