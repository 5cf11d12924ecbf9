"""What the page knows of runs that go on: verdicts in the background, news by number, a stream that ends."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.sampling import sample
from sparsight.dynamics.store import Store
from sparsight.report.bench import Bench
from sparsight.report.health import Judgement, judge_all, judge_now, with_findings
from sparsight.report.live import MOST_BYTES, Library
from sparsight.report.server import _stream
from tests.report.stores import FINDING, large, records, small


def wait_for(what, seconds=20):
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)
    return found


@pytest.fixture
def library(tmp_path):
    small(tmp_path / "runs" / "a")
    made = Library(tmp_path / "runs")
    yield made
    made.close()


def test_the_rules_verdict_follows_what_is_recorded(library):
    assert library.runs()[0]["verdict"] == "1 to act on"
    wait_for(lambda: library.runs()[0]["verdict"].startswith("sick: overload in blocks.0.mlp"))
    found = library.run("a")["found"]
    assert {"overload", "drop_rate"} <= {event["rule"] for event in found}
    assert all(event["step"] == event["onset"] for event in found)
    marks = json.loads(library.figure("a", "loss"))["layout"]["shapes"]
    assert {event["step"] for event in found} <= {mark["x0"] for mark in marks}


def test_what_was_recorded_is_not_said_twice(tmp_path):
    run = small(tmp_path / "a")
    judged = judge_all(run)
    assert judged.level == "act"
    overload = next(e for e in judged.events if e.rule == "overload")
    history = with_findings(with_findings(sample(run), judged.events), judged.events)
    assert [e for e in history.events if e.rule == "overload"] == [overload]
    assert FINDING.rule in {e.rule for e in history.events}


def test_a_long_run_is_judged_by_its_end(tmp_path):
    run = large(tmp_path / "long", steps=20_000, moe=2, experts=8)
    now, all_ = judge_now(run), judge_all(run)
    assert (now.level, now.verdict) == (all_.level, all_.verdict)


def test_a_bench_judges_once_for_each_change_and_rests(tmp_path):
    seen = []

    def judge(folder):
        seen.append(folder)
        return Judgement("fine", "healthy")

    bench = Bench(judge)
    assert bench.judgement(tmp_path, (1.0, 1)) is None
    wait_for(lambda: bench.judgement(tmp_path, (1.0, 1)))
    for _ in range(20):
        bench.judgement(tmp_path, (1.0, 1))
        bench.judgement(tmp_path, (2.0, 2))  # changed, and too soon
    time.sleep(0.1)
    assert len(seen) == 1
    bench.close()


def test_a_judge_that_fails_leaves_no_verdict(tmp_path):
    bench = Bench(lambda folder: 1 / 0)
    assert bench.judgement(tmp_path, (1.0, 1)) is None
    wait_for(lambda: tmp_path in bench._known)
    assert bench.judgement(tmp_path, (1.0, 1)) is None
    bench.close()


def test_news_are_what_came_after_and_a_run_that_went_back_is_a_reset(tmp_path):
    store = Store(tmp_path / "runs" / "a")
    for step in range(10, 200, 10):
        store.append(records(step, 1000))
    store.event(FINDING)
    store.flush()
    library = Library(tmp_path / "runs")
    first = library.news("a", 0)
    assert [e["message"] for e in first["events"]] == [FINDING.message]
    assert library.news("a", first["after"])["events"] == []
    store.event(Event(190, "note", "note", "info", "", "Later."))
    store.flush()
    second = library.news("a", first["after"])
    assert [e["message"] for e in second["events"]] == ["Later."]
    assert not second["reset"]
    store.trim(50)
    assert library.news("a", second["after"])["reset"]
    store.close()
    library.close()


def test_no_figure_is_too_large_to_send(tmp_path):
    """A thousand layers of a thousand experts: fewer readings are drawn, or one is told."""
    store = Store(tmp_path / "runs" / "a")
    wide = np.ones(1000, np.float32)
    store.append([Record(s, "moe/tokens_per_expert", f"l{i}", wide) for s in (1, 2, 3) for i in range(300)])
    store.close()
    library = Library(tmp_path / "runs")
    for chart in ("load", "load_layer"):
        assert len(library.figure("a", chart)) <= MOST_BYTES
    library.close()


async def _take(stream, count):
    return [await anext(stream) for _ in range(count)]


def test_the_stream_tells_the_list_then_the_run_and_ends_when_the_server_does(library):
    closing = threading.Event()

    async def follow():
        stream = _stream(library, "a", 0, closing.is_set)
        head, runs, run = await _take(stream, 3)
        assert head == b"retry: 1000\n\n"
        assert runs.startswith(b"event: runs\n")
        assert run.startswith(b"event: run\nid: 2\n")
        told = json.loads(run.split(b"data: ")[1])
        assert [e["id"] for e in told["events"]] == [1, 2]
        closing.set()
        assert [line async for line in stream if not line.startswith((b":", b"event"))] == []

    with ThreadPoolExecutor(1) as thread:  # a loop of its own, whatever runs in this one
        thread.submit(asyncio.run, follow()).result(60)
