"""What the page must not do: tell other sites, read other files, run what a store says."""

import gzip
import json
import os
import shutil
import socket
import sqlite3
import time

import pytest
from starlette.testclient import TestClient

from sparsight.dynamics.records import Event, Record
from sparsight.dynamics.store import FILE, Store, StoreError
from sparsight.report import compare, runs, serve
from sparsight.report.live import Library
from sparsight.report.server import make_app
from sparsight.report.single import write_report
from tests.report.stores import small

EVIL = "<script>alert(1)</script>"
PATHS = ("/", "/page.css", "/page.js", "/charts.js", "/plotly.js", "/themes.json", "/api/runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    small(root / "first", steps=100)
    small(root / "deep" / "second", steps=50)
    return root


def client(folder, *, host="127.0.0.1", token=None, name="127.0.0.1:8765") -> TestClient:
    app = make_app(Library(folder), host=host, token=token)
    return TestClient(app, base_url=f"http://{name}", follow_redirects=False)


# -- whom it answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:8765"])
def test_names_of_this_machine_are_answered(folder, name):
    assert client(folder).get("/", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "", "0x7f.1"],
)
@pytest.mark.parametrize("path", PATHS)
def test_other_names_are_refused_everywhere(folder, name, path):
    answer = client(folder).get(path, headers={"host": name})
    assert answer.status_code == 421
    assert "first" not in answer.text


def test_beyond_this_machine_addresses_are_answered_and_other_sites_names_are_not(folder):
    open_ = client(folder, host="0.0.0.0", token="long enough")
    assert open_.get("/", headers={"host": "192.168.1.7:8765"}).status_code == 401
    assert open_.get("/", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("path", PATHS)
def test_with_a_token_nothing_is_told_without_it(folder, path):
    closed = client(folder, token="right token")
    assert closed.get(path).status_code == 401
    assert closed.get(f"{path}?token=wrong").status_code == 401
    assert closed.get(path, headers={"cookie": "sparsight_token=wrong"}).status_code == 401
    assert closed.get(path, headers={"cookie": "\x00;;=;"}).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address(folder):
    closed = client(folder, token='right "token";')
    answer = closed.get("/", params={"token": 'right "token";', "x": "1"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/?x=1"
    for wanted in ("HttpOnly", "SameSite=Strict"):
        assert wanted in answer.headers["set-cookie"]
    assert closed.get("/api/runs").status_code == 200  # the client keeps the cookie


def test_the_redirect_never_leads_to_another_host(folder):
    closed = client(folder, token="right token")
    answer = closed.request("GET", "http://127.0.0.1:8765//evil.example/?token=right+token")
    assert answer.headers.get("location", "/").startswith("/")
    assert not answer.headers.get("location", "/").startswith("//")


def test_tokens_are_compared_in_constant_time_and_may_be_any_text(folder, monkeypatch):
    asked = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: asked.append((a, b)) or a == b)
    client(folder, token="right token").get("/?token=%C3%A4")
    assert asked == [("ä".encode(), b"right token")]


def test_only_reading_is_possible(folder):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client(folder).request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize("path", [*PATHS, "/nothing", "/api/run?run=first"])
def test_every_answer_tells_the_browser_to_be_strict(folder, path):
    headers = client(folder).get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_beyond_this_machine_a_token_is_made_up_where_none_is_given(tmp_path, monkeypatch, capsys):
    import uvicorn

    seen = {}
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.update(app=self.config.app))
    serve.serve(tmp_path, host="0.0.0.0", port=0)
    assert len(seen["app"].token) >= 20
    assert seen["app"].token in capsys.readouterr().out
    serve.serve(tmp_path, port=0)
    assert seen["app"].token is None
    with pytest.raises(ValueError, match="at least 8"):
        serve.serve(tmp_path, port=0, token="short")


# -- what it reads -----------------------------------------------------------------------------


NOT_RUNS = (
    "..", "../first", "first/..", "first/../first", "/etc", "/etc/passwd", "./first", "first/", "%2e%2e", "",
    "..%2f..", "first\x00", "first/run.sqlite", "outside", "link", "deep", "FIRST",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_RUNS)
def test_only_names_that_were_found_are_runs(folder, tmp_path, name):
    outside = small(tmp_path / "outside", steps=20)
    for link in (folder / "link", folder / "first" / "in"):
        if not link.is_symlink():
            link.symlink_to(outside)
    asked = client(folder)
    for path in ("/api/run", "/api/figure"):
        answer = asked.get(path, params={"run": name, "chart": "loss"})
        assert answer.json() == {"error": "there is no such run here"}


RAW_PATHS = (
    "/../pyproject.toml", "/..%2f..%2fetc/passwd", "/static/page.css", "//etc/passwd", "/first/run.sqlite",
    "/page.css/..", "/%2e%2e/%2e%2e/etc/passwd", "/index.html", "/page.css%00", "/..\\..\\etc\\passwd",
    "file:///etc/passwd", "/api/../../etc/passwd", "/api/run/../../first/run.sqlite",
)  # fmt: skip


def test_no_path_leads_to_a_file_by_raw_http(folder, serve):
    """Clients tidy paths up before they send them; a socket does not."""
    port = serve(folder).port
    for path in RAW_PATHS:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))
        assert answer.split(b" ")[1] in (b"404", b"400"), path
        assert b"root:" not in answer
        assert b"SQLite" not in answer
    for head in ("Host: evil.example", "X: y", "Host: localhost\r\nHost: evil.example"):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(f"GET /api/runs HTTP/1.1\r\n{head}\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda raw=raw: raw.recv(65536), b""))
        assert answer.split(b" ")[1] in (b"421", b"400"), head
        assert b"first" not in answer


def test_a_store_that_is_a_link_is_not_shown(tmp_path):
    outside = small(tmp_path / "outside", steps=20)
    (tmp_path / "runs" / "sly").mkdir(parents=True)
    (tmp_path / "runs" / "sly" / FILE).symlink_to(outside / FILE)
    half = tmp_path / "runs" / "half"
    half.mkdir()
    shutil.copy(outside / FILE, half / FILE)
    (half / f"{FILE}-wal").symlink_to("/etc/passwd")
    assert runs.find_runs(tmp_path / "runs") == {}


def test_a_folder_that_is_a_run_is_the_only_one(tmp_path):
    run = small(tmp_path / "one", steps=20)
    small(tmp_path / "two", steps=20)
    assert list(Library(run).folders()) == ["one"]
    with pytest.raises(StoreError, match="not a folder"):
        Library(tmp_path / "three")


# -- what it makes of what it reads ------------------------------------------------------------


def evil_run(root):
    """A run whose every text is an attack."""
    run = root / EVIL  # with its slash it is a folder in a folder
    store = Store(run, {"config": {EVIL: EVIL}, EVIL: EVIL, "layers": [{"name": EVIL, "family": "sparse"}]})
    for step in (10, 20, 30):
        store.append(
            [
                Record(step, f"log/{EVIL}", "", step / 30),
                Record(step, "log/loss", "", 1 / step),
                Record(step, "sparse/density", EVIL, 0.1),
                Record(step, "sparse/density", f"{EVIL}b", 0.2),
            ]
        )
    store.event(Event(20, "finding", EVIL, "act", EVIL, EVIL))
    store.event(Event(20, EVIL, EVIL, EVIL, EVIL, EVIL))
    store.close()
    return run


def test_reports_hold_no_markup_of_the_store(tmp_path):
    run, other = evil_run(tmp_path), small(tmp_path / "other", steps=20)
    report = write_report(run).read_text("utf-8")
    compare.write_comparison([run, other], tmp_path / "c.html")
    for text in (report, (tmp_path / "c.html").read_text("utf-8")):
        assert "<script>alert" not in text
        assert text.count("<script") == 4  # Plotly, ours, and the data
    assert "&lt;script&gt;alert(1)" in report


def test_a_terminal_is_not_steered_by_a_store():
    assert compare._printable("a\x1b[31mb\r\n") == "a�[31mb��"


@pytest.fixture
def broken(tmp_path):
    """One run that is well among all that can be wrong."""
    root = tmp_path / "runs"
    small(root / "well", steps=50)
    for name in ("empty", "text", "foreign", "newer", "cut", "meta", "types", "vectors", "missing"):
        (root / name).mkdir()
    (root / "empty" / FILE).touch()
    (root / "text" / FILE).write_text("this is no database " * 100)
    foreign = sqlite3.connect(root / "foreign" / FILE)
    foreign.execute("CREATE TABLE series (x)")
    foreign.commit()
    foreign.close()
    whole = (root / "well" / FILE).read_bytes()
    (root / "cut" / FILE).write_bytes(whole[: len(whole) // 3])

    def changed(name: str, *statements: str) -> None:
        shutil.copy(root / "well" / FILE, root / name / FILE)
        with sqlite3.connect(root / name / FILE) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    changed("newer", "PRAGMA user_version = 99")
    changed("meta", "UPDATE meta SET value = '{broken'")
    changed("types", "UPDATE scalar SET value = 'text'", "UPDATE event SET step = 'text', data = '[]'")
    changed("vectors", "UPDATE vector SET value = x'010203'")
    changed("missing", "DROP TABLE scalar")
    return root


def test_broken_stores_are_said_to_be_and_the_others_go_on(broken):
    asked = client(broken)
    told = {run["name"]: run for run in asked.get("/api/runs").json()}
    assert len(told) == 10
    assert told["well"]["level"] == "act"
    assert told["empty"]["verdict"].startswith("the run is starting")
    for name in ("text", "foreign", "newer", "cut", "meta", "missing"):
        assert told[name]["level"] == "broken", name
        assert str(broken) not in told[name]["verdict"], name
    assert "schema 99" in told["newer"]["verdict"]
    for name in told:
        for path in ("/api/run", "/api/figure"):
            answer = asked.get(path, params={"run": name, "chart": "load"})
            assert answer.status_code == 200, (name, path)
            if name in ("text", "foreign", "newer", "cut", "meta", "empty"):
                assert answer.json()["error"], (name, path)
    assert asked.get("/api/figure", params={"run": "well", "chart": "load"}).json()["data"]
    for name, chart in (("missing", "loss"), ("types", "loss"), ("vectors", "load")):
        assert asked.get("/api/figure", params={"run": name, "chart": chart}).json()["error"], name


def test_a_run_that_disappears_while_it_is_looked_at_is_gone(tmp_path):
    small(tmp_path / "runs" / "a", steps=20)
    library = Library(tmp_path / "runs")
    assert list(library.folders()) == ["a"]
    shutil.rmtree(tmp_path / "runs")
    assert "error" in library.run("a")
    assert library.runs()[0]["level"] in ("broken", "fine")
    library._looked = 0
    assert library.runs() == []


def test_the_script_of_plotly_is_sent_compressed_once_and_kept(folder):
    with client(folder).stream("GET", "/plotly.js?v=1", headers={"accept-encoding": "gzip"}) as answer:
        body = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip"
    assert len(body) < 2_000_000
    assert "immutable" in answer.headers["cache-control"]
    assert b"plotly.js v" in gzip.decompress(body)[:500]


def test_figures_that_have_not_changed_are_not_sent_again(folder):
    asked = client(folder)

    def ask(tag: str):
        headers = {"if-none-match": tag}
        return asked.get("/api/figure", params={"run": "first", "chart": "loss"}, headers=headers)

    answer = ask("nothing")
    assert answer.json()["data"]
    for _ in range(100):  # until the rules have looked, which may change the markers
        answer = ask(answer.headers["etag"])
        if answer.status_code == 304:
            break
        time.sleep(0.1)
    assert answer.status_code == 304
    os.utime(folder / "first" / FILE)
    assert ask(answer.headers["etag"]).status_code == 200


def test_an_unknown_chart_is_said_to_be(folder):
    answer = client(folder).get("/api/figure", params={"run": "first", "chart": EVIL})
    assert json.loads(answer.text) == {"error": "there is no such chart"}
