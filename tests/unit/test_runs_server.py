"""`lockstep serve`: what it shows to whom, and what it does not."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from click.testing import CliRunner

from lockstep.cli.runs import serve
from lockstep.errors import LaunchError
from lockstep.runs.server import RunsFolder, Server
from run_folders import completed, failed, lines, rows


@contextmanager
def serving(root: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    with Server(RunsFolder(root), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)


def get(server: Server, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    completed(folder / os.fsdecode(b"a\xffname"), count=5)
    completed(folder / "first", count=20)
    failed(folder / "<i>second")
    completed(folder / "sweep" / "trial-1", count=10)
    completed(tmp_path / "outside", count=10)
    (folder / "link").symlink_to(tmp_path / "outside")
    completed(folder / ".hidden", count=10)
    (folder / "no run").mkdir()
    return folder


def test_a_list_of_runs_and_the_data_of_some(root: Path) -> None:
    with serving(root) as server:
        status, text, headers = get(server, "/runs.json")
        found = {each["name"]: each for each in json.loads(text)["list"]}
        assert status == 200 and set(found) == {"first", "<i>second", "sweep/trial-1", "a\\xffname"}
        assert found["first"]["metrics"] == "val/loss 0.1"
        status, text, _ = get(server, "/data.json?run=" + quote("a\\xffname"))
        assert status == 200 and json.loads(text)["runs"][0]["verdict"]["text"].startswith("completed")
        assert found["<i>second"]["status"] == "failed" and found["first"]["step"] == 20
        assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers
        status, text, _ = get(server, f"/data.json?run=first&run={quote('<i>second')}&run=sweep/trial-1")
        assert status == 200 and [each["name"] for each in json.loads(text)["runs"]] == [
            "first",
            "<i>second",
            "trial-1",
        ]
        status, text, headers = get(server, f"/run?run={quote('<i>second')}")
        assert status == 200 and "<i>second" not in text and "connect-src 'self'" in headers["Content-Security-Policy"]
        assert get(server, "/metrics.jsonl")[0] == 404


@pytest.mark.parametrize(
    "name", ["../outside", "link", ".hidden", "no run", "/etc", "first/../../outside", "a\0b", "", "a/b/c"]
)
def test_names_do_not_lead_out_of_the_folder(name: str, root: Path) -> None:
    with serving(root) as server:
        status, text, _ = get(server, f"/data.json?run={quote(name, safe='')}")
        assert status == 404 and "runs" not in json.loads(text)


def test_on_loopback_another_name_is_refused(root: Path) -> None:
    with serving(root) as server:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "192.168.0.1", "[", ""):
            assert get(server, "/runs.json", Host=host)[0] == 403, host
        for host in ("localhost", f"localhost:{server.server_port}", "[::1]:80", "127.0.0.1"):
            assert get(server, "/runs.json", Host=host)[0] == 200, host


def test_off_loopback_a_token_is_asked_for(root: Path) -> None:
    with serving(root, "0.0.0.0") as server:
        assert server.token is not None and len(server.token) >= 32 and server.token in server.url
        for path in ("/", "/runs.json", "/?token=wrong", "/?token=", "/data.json?run=first"):
            status, text, _ = get(server, path)
            assert status == 403 and "first" not in text, path
        assert get(server, "/runs.json", Cookie="lockstep_token=wrong")[0] == 403
        assert get(server, "/runs.json", Authorization=f"Bearer {server.token}")[0] == 200
        where = urlsplit(server.url)
        status, _, headers = get(server, f"//evil.example/run?run=first&{where.query}")
        assert status == 303 and headers["Location"].startswith("/") and not headers["Location"].startswith("//")
        status, _, headers = get(server, f"/run?run=first&{where.query}")
        assert status == 303 and headers["Location"] == "/run?run=first" and server.token not in headers["Location"]
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        assert get(server, "/run?run=first", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200


def test_a_run_that_grows_is_followed_and_one_that_is_written_anew_is_read_anew(root: Path) -> None:
    runs, file = RunsFolder(root), root / "first" / "metrics.jsonl"

    def steps() -> list[float]:
        return list(runs.read("first").curves["train/loss"].steps)

    assert steps() == [*range(1, 21)]
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 21, "train/loss": 1.0}\n{"step": 22, "tra')
    assert steps()[-1] == 21
    with file.open("a", encoding="utf-8") as stream:
        stream.write('in/loss": 2.0}\n')
    assert steps()[-1] == 22 and runs.read("first").curves["train/loss"].values[-1] == 2.0
    lines(file.with_suffix(".new"), *rows(5))
    file.with_suffix(".new").replace(file)
    assert steps() == [1, 2, 3, 4, 5]


def test_the_folder_of_one_run_is_shown_too(root: Path) -> None:
    runs = RunsFolder(root / "first")
    assert list(runs.folders()) == ["first"] and runs.read("first").status == "completed"


def test_a_port_that_is_taken_is_told(root: Path) -> None:
    with serving(root) as server, pytest.raises(LaunchError, match=f"--port {server.server_port}: already in use"):
        Server(RunsFolder(root), "127.0.0.1", server.server_port)
    told = CliRunner().invoke(serve, [str(root / "none")])
    assert "there is no such folder" in str(told.exception)
