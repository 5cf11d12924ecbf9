"""Start the live page: a socket of our own, so that a port in use is one sentence, and a clean end."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import quote

from sparsight.report.guard import is_loopback

SHORTEST_TOKEN = 8


def serve(runs: Path, *, host: str = "127.0.0.1", port: int = 8765, token: str | None = None) -> None:
    """Serve the page until Ctrl-C. Beyond this machine only with a token, made up where none is given."""
    import uvicorn

    from sparsight.report.live import Library
    from sparsight.report.server import make_app, plotly_script

    library = Library(runs)
    token = (
        token
        or os.environ.get("SPARSIGHT_TOKEN")
        or (None if is_loopback(host) else secrets.token_urlsafe(18))
    )
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
        raise ValueError(f"watch: the token must have at least {SHORTEST_TOKEN} plain characters")
    listening = listen(host, port)
    plotly_script()  # compressed now, not while someone waits
    config = uvicorn.Config(
        make_app(library, host=host, token=token, closing=lambda: server.should_exit),
        log_level="warning",
        access_log=False,  # addresses may carry the token
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    print(f"runs in {runs}: {len(library.folders())}", flush=True)
    print(f"open {address(host, listening.getsockname()[1], token)}   (Ctrl-C ends)", flush=True)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
        library.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, or one sentence why there is none."""
    try:
        family, kind, proto, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError) as error:
        raise ValueError(f"watch: there is no address {host}, port {port}: {error}") from None
    listening = socket.socket(family, kind, proto)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"watch: port {port} is in use; take another with --port, or --port 0 for any that is free"
            ) from None
        raise ValueError(f"watch: cannot listen on {host}, port {port}: {error.strerror}") from None
    return listening


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?token={quote(token)}" if token else "")
