"""The report of one run: a file to keep, to send, to open without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsight.dynamics.history import History
from sparsight.dynamics.reading import store_of
from sparsight.dynamics.records import Event
from sparsight.dynamics.sampling import sample
from sparsight.report import html, words
from sparsight.report.figures import CHARTS, EVENTS, SECTIONS, Chart
from sparsight.report.figures.cost import spent
from sparsight.report.figures.events import RANK, onset
from sparsight.report.health import Judgement, judge_all, with_findings
from sparsight.report.runs import numbers_of, progress

POINTS = 400
MOST_LAYERS = 24
MOST_EVENTS = 500


def write_report(run: Path | str, out: Path | None = None) -> Path:
    """Write the report of a run; into its folder as report.html where no other place is named."""
    folder = store_of(run).parent.resolve()
    target = folder / "report.html" if out is None else out
    content = report_html(folder.name, sample(folder, points=POINTS), judge_all(folder))
    return write_html(target, content)


def write_html(target: Path, content: str) -> Path:
    """Write a file; where that cannot be, say why in a sentence."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, "utf-8")
    except OSError as error:
        raise ValueError(f"the report cannot be written to {target}: {error.strerror or error}") from None
    return target


def report_html(name: str, history: History, judged: Judgement) -> str:
    """The whole file."""
    figures: dict[str, Any] = {}
    inner = run_parts(name, history, judged, figures)
    body = f"{html.bar('Sparsight report')}<main>{inner}</main>"
    return html.document(f"{name} – Sparsight", body, {"templates": html.templates(), "figures": figures})


def run_parts(
    name: str, history: History, judged: Judgement, figures: dict[str, Any], prefix: str = ""
) -> str:
    """Summary and charts of a run; its figures go into `figures`, under names that begin with `prefix`."""
    history = with_findings(history, judged.events)
    sections = [_section(section, history, figures, prefix) for section in SECTIONS]
    return f"{_summary(name, history, judged)}{''.join(sections)}"


def _summary(name: str, history: History, judged: Judgement) -> str:
    step, seconds = progress(history)
    pairs = [("steps", f"{step:,}"), ("time", words.duration(seconds))]
    pairs += [(key, words.number(value)) for key, value in numbers_of(history).items()]
    for label, key in (("density", "sparse/density"), ("ITOP rate", "sparse/itop_rate")):
        if len(found := history.get(key)):
            pairs.append((label, f"{float(found.last):.1%}"))
    ratio = history.get("sparse/flops_ratio")
    if len(ratio) and step:
        pairs.append(
            ("FLOPs saved", f"{1 - float(spent(ratio, ratio.steps)[-1]) / int(ratio.steps[-1]):.0%}")
        )
    about = [(key, value) for key, value in history.meta.items() if key != "layers"]
    layers = history.meta.get("layers")
    if isinstance(layers, list):
        about.append(("layers", f"{len(layers)} watched"))
    return (
        f'<div class="lead"><h1>{html.safe(name)}</h1>'
        f'<span class="level {judged.level}">{html.safe(judged.verdict)}</span></div>{html.numbers(pairs)}'
        f"<details><summary>Configuration, versions, machine</summary>{html.table(about)}</details>"
    )


def _events(events: Sequence[Event]) -> list[str]:
    if not events:
        return []
    urgent = sorted(events, key=lambda e: (RANK.get(e.severity, 3), e.step))[:MOST_EVENTS]
    inner = "".join(map(_event, urgent))
    return [f'<div class="card wide"><h3>What</h3><ul class="events">{inner}</ul></div>']


def _event(event: Event) -> str:
    finding = event.kind == "finding" and event.severity in RANK  # the store may say anything
    level = event.severity if finding else "fine" if event.kind == "action" else "info"
    kind = event.severity if finding else event.kind
    since = f" since step {onset(event):,}" if onset(event) != event.step else ""
    return (
        f'<li><span class="step">step {event.step:,}</span>'
        f'<span class="level {level}">{html.safe(kind)}</span>'
        f'<span class="what">{html.safe(event.message)} '
        f'<span class="where">{html.safe(event.rule)}{html.safe(since)}</span></span></li>'
    )


def _section(section: str, history: History, figures: dict[str, Any], prefix: str) -> str:
    own = [chart for chart in CHARTS if chart.section == section]
    cards = [card for chart in own if (card := _card(chart, history, figures, prefix))]
    if section == EVENTS:
        cards += _events(history.events)
    if not cards:
        return ""
    return f'<section><h2>{html.safe(section)}</h2><div class="cards">{"".join(cards)}</div></section>'


def _card(chart: Chart, history: History, figures: dict[str, Any], prefix: str) -> str:
    places = layers_of(chart, history)[:MOST_LAYERS] if chart.layered else []
    shown = []
    for i, layer in enumerate(places or [""]):
        figure = chart.figure(history, layer or None)
        if figure is not None:
            shown.append((f"{prefix}{chart.id}-{i}", layer))
            figures[f"{prefix}{chart.id}-{i}"] = html.figure_json(figure)
    if not shown:
        return ""
    return html.card(
        f"chart-{prefix}{chart.id}",
        chart.title,
        chart.note,
        figure=shown[0][0],
        layers=shown,
        wide=chart.wide,
        steps=chart.over_steps,
    )


def layers_of(chart: Chart, history: History) -> list[str]:
    """The layers that a chart can show."""
    return [where for name in chart.needs for where in history.places(name)]
