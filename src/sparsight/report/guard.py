"""Who may ask the page: the right host name, the token where one is set; what browsers are to refuse."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

COOKIE = "sparsight_token"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

# Plotly sets styles on the elements it draws, and heatmaps are images made on the spot.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def allowed_hosts(host: str) -> Callable[[str], bool]:
    """Which names of this server a request may carry: a name that another site points at us is not one.

    On other than loopback addresses that is any literal address, which nobody can rebind, and this
    machine's own names.
    """
    if is_loopback(host):
        return lambda name: name in LOOPBACK_NAMES or name == host.lower().strip("[]")
    own = {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower(), *LOOPBACK_NAMES}
    return lambda name: name in own or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_of(header: str) -> str:
    """The name in a Host header, without the port.

    >>> host_of("LocalHost:8765"), host_of("[::1]:80"), host_of("127.0.0.1")
    ('localhost', '::1', '127.0.0.1')
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header


@dataclass(frozen=True)
class Guard:
    """Around an application: refuses what must not reach it, and puts the headers on what leaves it."""

    app: App
    allowed: Callable[[str], bool]
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not self.allowed(host_of(hosts[0].decode("latin-1"))):
            await _answer(send, 421, "this name is not one of this server's: use the address it printed")
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "nothing can be changed here")
            return
        if self.token is not None:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            if any(self._same(value) for value in query.pop("token", [])):
                await _redirect(send, scope["path"], query, self.token)
                return
            if not any(self._same(value) for value in _cookies(headers.get(b"cookie", []))):
                await _answer(send, 401, "this page needs its token: open the address with ?token=… once")
                return
        await self.app(scope, receive, _with_headers(send))

    def _same(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def _cookies(headers: list[bytes]) -> list[str]:
    found = []
    for header in headers:
        try:
            jar = SimpleCookie(header.decode("latin-1"))
        except CookieError:
            continue
        found += [morsel.value for name, morsel in jar.items() if name == COOKIE]
    return found


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *HEADERS]
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str, *more: tuple[bytes, bytes]) -> None:
    kind = (b"content-type", b"text/plain; charset=utf-8")
    headers = [kind, (b"cache-control", b"no-store"), *HEADERS, *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _redirect(send: Send, path: str, query: dict[str, list[str]], token: str) -> None:
    """To the same address without the token, which a cookie carries from now on."""
    jar = SimpleCookie()
    jar[COOKIE] = token
    jar[COOKIE].update({"httponly": "1", "samesite": "Strict", "path": "/"})
    # One slash: "//elsewhere" would be another host.
    target = "/" + path.lstrip("/\\") + (f"?{urlencode(query, doseq=True)}" if query else "")
    more = (
        (b"location", target.encode("ascii", "ignore")),
        (b"set-cookie", jar[COOKIE].OutputString().encode()),
    )
    await _answer(send, 303, "go on", *more)
