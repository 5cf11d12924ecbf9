"""What the live page knows: the runs of one folder, their charts, what is new. Reads stores alone."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsight.dynamics.history import History
from sparsight.dynamics.reading import read_events, read_keys
from sparsight.dynamics.records import Event
from sparsight.dynamics.sampling import latest, sample
from sparsight.report import html
from sparsight.report.bench import Bench
from sparsight.report.figures import CHARTS, Chart, available
from sparsight.report.figures.events import onset
from sparsight.report.health import with_findings
from sparsight.report.runs import Summary, find_runs, reason, stamp, summarise

POINTS = 300
MOST_BYTES = 1_500_000
MOST_EVENTS = 500
LOOK_AGAIN = 2.0
_TIME = "run/time"


class Library:
    """The runs of a folder, by the names under which they were found: no path is ever made from a request."""

    def __init__(self, root: Path) -> None:
        find_runs(root)  # says at once what is wrong with the folder
        self.root = root.resolve()
        self._runs: dict[str, Path] = {}
        self._looked = 0.0
        self._summaries: dict[str, tuple[tuple[float, int], Summary]] = {}
        self._lock = threading.Lock()
        self._bench = Bench()

    def folders(self) -> dict[str, Path]:
        """Runs by name; the folder is searched again every few seconds."""
        with self._lock:
            if time.monotonic() - self._looked > LOOK_AGAIN:
                try:
                    self._runs = find_runs(self.root)
                except ValueError:
                    self._runs = {}  # the folder is gone; it may come back
                self._looked = time.monotonic()
            return self._runs

    def runs(self) -> list[dict[str, Any]]:
        """All runs in a line each, the latest first."""
        found = [self.summary(name, folder) for name, folder in self.folders().items()]
        found.sort(key=lambda s: (-round(s.changed), s.name))
        return [s.as_json() for s in found]

    def summary(self, name: str, folder: Path) -> Summary:
        """A run in a line, read again only when its store has changed; the rules' verdict follows later."""
        now = stamp(folder)
        kept = self._summaries.get(name)
        if kept is None or kept[0] != now:
            kept = (now, summarise(name, folder))
            self._summaries[name] = kept
        if kept[1].level == "broken" or not kept[1].step:
            return kept[1]
        judged = self._bench.judgement(folder, now)
        return kept[1] if judged is None else replace(kept[1], level=judged.level, verdict=judged.verdict)

    def _found(self, folder: Path) -> tuple[Event, ...]:
        """What the rules find now."""
        judged = self._bench.judgement(folder, stamp(folder))
        return () if judged is None else judged.events

    def _events(self, folder: Path) -> tuple[list[tuple[int, Event]], list[dict[str, Any]]]:
        """What was recorded, with numbers; and what the rules find besides."""
        numbered = read_events(folder)
        known = {(e.rule, e.where) for _, e in numbered if e.kind == "finding"}
        found = [e for e in self._found(folder) if (e.rule, e.where) not in known][:MOST_EVENTS]
        return numbered, [_event(f"{e.rule} {e.where}", e) for e in found]

    def close(self) -> None:
        """Judge no more."""
        self._bench.close()

    def stamp(self, name: str) -> str:
        """Changes when the run's store does, or the judgement on it."""
        folder = self.folders().get(name)
        if folder is None:
            return "gone"
        return "-".join(map(str, (*stamp(folder), zlib.crc32(repr(self._found(folder)).encode()))))

    def run(self, name: str) -> dict[str, Any]:
        """A run's charts, events and description; why there are none, where it cannot be read."""

        def read(folder: Path) -> dict[str, Any]:
            keys = [key for key, _ in read_keys(folder)]
            numbered, found = self._events(folder)
            names = list(dict.fromkeys(name for name, _ in keys))
            charts = [
                {
                    "id": chart.id,
                    "section": chart.section,
                    "title": chart.title,
                    "note": chart.note,
                    "wide": chart.wide,
                    "steps": chart.over_steps,
                    "layers": [w for n, w in keys if w and chart.wants(n)] if chart.layered else [],
                }
                for chart in available(names, any_event=bool(numbered or found))
            ]
            meta = latest(folder, lambda _: False).meta
            return {
                "summary": self.summary(name, folder).as_json(),
                "charts": charts,
                "events": [_event(i, e) for i, e in numbered[-MOST_EVENTS:]],
                "found": found,
                "after": numbered[-1][0] if numbered else 0,
                "meta": {key: _short(value) for key, value in meta.items() if key != "layers"},
            }

        return self._guarded(name, read)

    def news(self, name: str, after: int) -> dict[str, Any]:
        """What has changed since event number `after`; `reset` where the run went back behind it."""

        def read(folder: Path) -> dict[str, Any]:
            numbered, found = self._events(folder)
            last = numbered[-1][0] if numbered else 0
            fresh = [_event(i, e) for i, e in numbered if i > after][-MOST_EVENTS:]
            names = {name for (name, _), _ in read_keys(folder)}
            return {
                "summary": self.summary(name, folder).as_json(),
                "events": fresh,
                "found": found,
                "after": last,
                "reset": last < after,
                "charts": [c.id for c in available(names, any_event=bool(numbered or found))],
            }

        return {"after": after, **self._guarded(name, read)}

    def figure(self, name: str, chart: str, layer: str | None = None) -> bytes:
        """A chart as JSON; drawn from fewer readings where it would be too large to send."""
        found = next((c for c in CHARTS if c.id == chart), None)
        if found is None:
            return json.dumps({"error": "there is no such chart"}).encode()

        def read(folder: Path) -> dict[str, Any]:
            return {"body": _fitting(folder, found, layer, self._found(folder))}

        answer = self._guarded(name, read)
        body = answer.get("body")
        return body if isinstance(body, bytes) else json.dumps(answer).encode()

    def _guarded(self, name: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        folder = self.folders().get(name)
        if folder is None:
            return {"error": "there is no such run here"}
        try:
            return read(folder)
        except Exception as error:  # a foreign or half-written store may be wrong in any way
            return {"error": reason(error, folder)}


def _fitting(folder: Path, chart: Chart, layer: str | None, found: Sequence[Event]) -> bytes:
    points = POINTS
    while True:
        history = with_findings(_history(folder, chart, layer, points), found)
        figure = chart.figure(history, layer)
        body = b"{}" if figure is None else json.dumps(html.figure_json(figure)).encode()
        if len(body) <= MOST_BYTES or points <= 10:
            return body if len(body) <= MOST_BYTES else b'{"error": "this chart is too large to be shown"}'
        points //= 2


def _history(folder: Path, chart: Chart, layer: str | None, points: int) -> History:
    """What the chart needs, and the run's clock: all charts then end at the same step."""

    def wanted(key: tuple[str, str]) -> bool:
        name, where = key
        return name == _TIME or not (chart.layered and layer and where and where != layer)

    return sample(folder, lambda name: name == _TIME or chart.wants(name), points=points, wanted=wanted)


def _event(number: int | str, event: Event) -> dict[str, Any]:
    return {
        "id": number,
        "step": event.step,
        "onset": onset(event),
        "kind": event.kind,
        "rule": event.rule,
        "severity": event.severity,
        "where": event.where,
        "message": str(event.message)[:1000],
    }


def _short(value: Any) -> Any:
    text = json.dumps(value, default=str)
    return value if len(text) < 4000 else text[:4000] + "…"
