"""The live page: a few read-only answers about the runs of a folder, and a stream of what is new in them."""

from __future__ import annotations

import asyncio
import gzip
import json
import mimetypes
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sparsight.report import html
from sparsight.report.guard import App, Guard, allowed_hosts
from sparsight.report.live import Library

PAGES = {"/": "index.html", "/page.css": "page.css", "/charts.js": "charts.js", "/page.js": "page.js"}
PULSE = 1.0
QUIET_PULSES = 15
Answer = Callable[[Request], Response]


def make_app(
    library: Library,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    closing: Callable[[], bool] = lambda: False,
) -> App:
    """The page's application. `closing` ends the streams, which otherwise have no end."""

    async def stream(request: Request) -> Response:
        # A browser that comes back says what it has seen; what it has not follows.
        seen = request.headers.get("last-event-id") or request.query_params.get("after", "0")
        after = int(seen) if seen.isdecimal() and len(seen) < 16 else 0
        lines = _stream(library, request.query_params.get("run"), after, closing)
        return StreamingResponse(lines, media_type="text/event-stream", headers={"cache-control": "no-store"})

    def themes(request: Request) -> Response:
        return _json(request, html.templates())

    def runs(request: Request) -> Response:
        return _json(request, library.runs())

    def run(request: Request) -> Response:
        return _json(request, library.run(request.query_params.get("run", "")))

    def figure(request: Request) -> Response:
        ask = request.query_params
        stamp = library.stamp(ask.get("run", ""))
        tag = f'"{stamp}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        body = library.figure(ask.get("run", ""), ask.get("chart", ""), ask.get("layer"))
        return _json(request, body, etag=tag)

    routes = [
        *(Route(path, _static(name)) for path, name in PAGES.items()),
        Route("/plotly.js", _plotly),
        Route("/themes.json", themes),
        Route("/api/runs", runs),
        Route("/api/run", run),
        Route("/api/figure", figure),
        Route("/api/stream", stream),
    ]
    return Guard(Starlette(routes=routes), allowed_hosts(host), token)


async def _stream(
    library: Library, name: str | None, after: int, closing: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """What is new, about once a second: the list of runs where it changed, and the run that is looked at."""
    yield b"retry: 1000\n\n"
    listed: dict[str, Any] | None = None
    known = ""
    quiet = 0
    while not closing():
        found = {about["name"]: about for about in await run_in_threadpool(library.runs)}
        if listed is None:
            yield _event("runs", list(found.values()))
        elif found != listed:
            changed = [about for name, about in found.items() if listed.get(name) != about]
            yield _event("changes", {"changed": changed, "gone": [n for n in listed if n not in found]})
        quiet = 0 if found != listed else quiet
        listed = found
        if name is not None and (stamp := await run_in_threadpool(library.stamp, name)) != known:
            known = stamp
            news = await run_in_threadpool(library.news, name, after)
            after = news["after"]
            yield _event("run", news, after)
            quiet = 0
        quiet += 1
        if quiet % QUIET_PULSES == 0:
            yield b": still here\n\n"  # a line that browsers ignore, and that tells a dead connection
        await asyncio.sleep(PULSE)


def _event(kind: str, value: Any, number: int | None = None) -> bytes:
    head = f"event: {kind}\n" + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(value, allow_nan=False)}\n\n".encode()


def _json(request: Request, value: Any, *, etag: str | None = None) -> Response:
    body = value if isinstance(value, bytes) else json.dumps(value, allow_nan=False).encode()
    headers = {"cache-control": "no-cache" if etag else "no-store", "vary": "accept-encoding"}
    if etag:
        headers["etag"] = etag
    if len(body) > 1000 and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 4)
        headers["content-encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)


def _static(name: str) -> Answer:
    kind = mimetypes.guess_type(name)[0] or "text/plain"

    def answer(request: Request) -> Response:
        text = html.static(name).replace("__PLOTLY__", _plotly_version())
        return Response(text, media_type=kind, headers={"cache-control": "no-cache"})

    return answer


def _plotly(request: Request) -> Response:
    """Plotly's JavaScript as the installed package has it; a third of its size when compressed."""
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(plotly_script()), media_type="text/javascript", headers=headers)
    headers["content-encoding"] = "gzip"
    return Response(plotly_script(), media_type="text/javascript", headers=headers)


@lru_cache(maxsize=1)
def plotly_script() -> bytes:
    """The compressed script."""
    import plotly.offline

    return gzip.compress(plotly.offline.get_plotlyjs().encode(), 6)


def _plotly_version() -> str:
    import plotly

    return str(plotly.__version__)
