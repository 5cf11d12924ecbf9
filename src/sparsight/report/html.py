"""The pieces of an HTML file that opens anywhere: safe text, safe data, scripts that the file vouches for."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go

from sparsight.report.figures import look


def safe(text: object) -> str:
    """Text from a store, as text in HTML or in a quoted attribute."""
    return html.escape(str(text), quote=True)


def static(name: str) -> str:
    """One of the package's own files."""
    return (files("sparsight.report") / "static" / name).read_text("utf-8")


def figure_json(figure: go.Figure) -> dict[str, Any]:
    """A figure as JSON, without its theme: the page that shows it has two."""
    plain: dict[str, Any] = json.loads(figure.to_json())
    plain["layout"].pop("template", None)
    return plain


@lru_cache(maxsize=1)
def templates() -> dict[str, Any]:
    """The two themes, as Plotly's JavaScript takes them."""
    return {
        "light": look.template(dark=False).to_plotly_json(),
        "dark": look.template(dark=True).to_plotly_json(),
    }


def embedded(value: Any) -> str:
    """JSON that no browser can mistake for the end of its script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def document(title: str, body: str, data: Mapping[str, Any]) -> str:
    """A whole page with styles, Plotly and figures inside; nothing is fetched and no other script runs."""
    import plotly.offline

    scripts = [plotly.offline.get_plotlyjs(), static("charts.js"), static("report.js")]
    if any("</script" in script.lower() for script in scripts):
        raise AssertionError("a script of the report would end its own element")
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    inner = "\n".join(f"<script>{script}</script>" for script in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{safe(title)}</title>\n<style>{static('page.css')}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{embedded(data)}</script>\n{inner}\n</body>\n</html>\n'
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def bar(name: str) -> str:
    """The strip at the top."""
    return (
        f'<header class="bar"><span class="name">{safe(name)}</span>'
        '<button id="theme" type="button">Light / dark</button></header>'
    )


def card(
    node: str, title: str, note: str, *, figure: str, layers: Sequence[tuple[str, str]] = (), **flags: bool
) -> str:
    """A chart's place: heading, how to read it, a choice of (figure, layer) where there are several."""
    options = "".join(f'<option value="{safe(key)}">{safe(name)}</option>' for key, name in layers)
    choice = f'<select aria-label="Layer" data-for="{node}">{options}</select>' if len(layers) > 1 else ""
    kind = "card wide" if flags.get("wide") else "card"
    steps = ' data-steps="1"' if flags.get("steps") else ""
    return (
        f'<figure class="{kind}"><div class="top"><figcaption><h3>{safe(title)}</h3></figcaption>'
        f"{choice}</div>"
        f'<p class="note">{safe(note)}</p>'
        f'<div class="plot" id="{node}" data-figure="{safe(figure)}"{steps}></div></figure>'
    )


def numbers(pairs: Iterable[tuple[str, str]]) -> str:
    """Big numbers with small names."""
    inner = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="numbers">{inner}</dl>'


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values, nested ones flattened."""
    flat = [pair for key, value in rows for pair in _flat(key, value)]
    inner = "".join(f'<tr><th scope="row">{safe(key)}</th><td>{safe(value)}</td></tr>' for key, value in flat)
    return f'<div class="scroll"><table>{inner}</table></div>'


def _flat(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for inner, v in value.items() for pair in _flat(f"{key}.{inner}", v)]
    text = value if isinstance(value, str) else json.dumps(value)
    return [(key, text if len(text) <= 300 else text[:299] + "…")]
