"""Serves the pages of runs, which follow their runs, to one user: on loopback unless asked otherwise.

On loopback, a request must name this machine as its host, so that a foreign page whose name was made to resolve to it
is refused. On any other address, a request must bring the token that was printed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlencode, urlsplit

from lockstep import run_files
from lockstep.config.plain import finite
from lockstep.errors import ConfigError, LaunchError
from lockstep.record.run_folder import SUMMARY_FILE
from lockstep.record.timeline import newest_row
from lockstep.runs.data import page_data
from lockstep.runs.findings import kind_of
from lockstep.runs.reader import Run, holder_is_there, is_run, read_run, status_of
from lockstep.runs.records import number, read_json, read_live, read_timeline
from lockstep.runs.report import policy, served_page

_LISTED = 500
_KEPT = 16  # runs whose rows are kept
_SHOWN = 4  # metrics of a run in the list


@dataclass
class _Rows:
    """The rows of a growing file, up to where it was read."""

    file: tuple[int, int] = (0, 0)
    offset: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


class RunsFolder:
    """The runs in a folder and, for sweeps, in the folders below it. Names never lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.alone = is_run(self.root)  # it is itself the folder of a run
        self._rows: dict[str, _Rows] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        if self.alone:
            return [self.root.name]
        found = [(_changed(folder), str(folder.relative_to(self.root))) for folder in self._folders()]
        return [name for _, name in sorted(found, reverse=True)]

    def read(self, name: str) -> Run:
        folder = self.path(name)
        with self._lock:
            return read_run(folder, rows=list(self._newest_rows(name, folder / "metrics.jsonl")))

    def path(self, name: str) -> Path:
        if self.alone and name == self.root.name:
            return self.root
        parts = Path(name).parts
        folder = (self.root / name).resolve() if parts and "\0" not in name else self.root
        hidden = any(part.startswith(".") for part in parts)  # `..` too
        outside = folder == self.root or not folder.is_relative_to(self.root)
        if hidden or outside or len(parts) > 2 or not is_run(folder):
            raise ConfigError(f"there is no run {name!r} in {self.root}")
        return folder

    def listed(self) -> dict[str, Any]:
        names = self.names()
        return {
            "title": f"Runs in {self.root.name}",
            "list": [self._brief(name) for name in names[:_LISTED]],
            "more": max(len(names) - _LISTED, 0),
            "link": "run",
        }

    def _brief(self, name: str) -> dict[str, Any]:
        folder = self.path(name)
        summary, live = read_json(folder / SUMMARY_FILE), read_live(folder)
        status = status_of(summary, read_timeline(folder), live, time.time(), holder_is_there(folder))
        row = newest_row(folder / "metrics.jsonl") or {}
        metrics = summary.get("metrics") if status != "running" else row
        known = metrics if isinstance(metrics, dict) and metrics else row
        values = [(key, number(value)) for key, value in known.items() if key not in ("step", "epoch")]
        words = [f"{key} {value:.4g}" for key, value in values if value is not None]
        steps = [number(summary.get("step")), number(row.get("step"))]
        return {
            "name": name,
            "status": status,
            "kind": kind_of(status),
            "step": int(max((each for each in steps if each is not None), default=0)),
            "metrics": " · ".join(words[:_SHOWN]),
            "at": round(_changed(folder)),
        }

    def _folders(self) -> Iterator[Path]:
        for folder in _below(self.root):
            if is_run(folder):
                yield folder
            else:
                yield from (each for each in _below(folder) if is_run(each))

    def _newest_rows(self, name: str, file: Path) -> list[dict[str, Any]]:
        """Returns all rows; of a file that only grew, the new ones are read."""
        known = self._rows.pop(name, None) or _Rows()
        self._rows[name] = known
        while len(self._rows) > _KEPT:
            del self._rows[next(iter(self._rows))]
        with contextlib.suppress(OSError), run_files.open_file(file) as stream:
            about = os.fstat(stream.fileno())
            same = (about.st_dev, about.st_ino)
            if known.file != same or about.st_size < known.offset:  # it was written anew, as by a restart
                known.file, known.offset, known.rows = same, 0, []
            _read_on(stream, known)
        return known.rows


def _read_on(stream: BinaryIO, known: _Rows) -> None:
    stream.seek(known.offset)
    for length, line in run_files.lines(stream):
        if not line.endswith(b"\n"):
            return  # still being written
        known.offset += length
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and number(row.get("step")) is not None:
                known.rows.append(row)


def _below(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.is_dir() and not each.is_symlink() and not each.name.startswith("."):
                yield each


def _changed(folder: Path) -> float:
    times = []
    for name in ("live.json", "metrics.jsonl", "summary.json", "config.yaml"):
        with contextlib.suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=0.0)


_COOKIE = "lockstep_token"
_MOST_RUNS = 20  # on one page
_SECONDS = 30.0  # limit of a request


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server(ThreadingHTTPServer):
    """Serves the runs of a folder at `url` from the moment it is made."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: RunsFolder, host: str, port: int) -> None:
        self.runs, self.host = runs, host
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise LaunchError(_refused(host, port, error)) from None
        except OverflowError:
            raise ConfigError(f"--port {port}: a port is a number from 0 to 65535") from None

    def server_bind(self) -> None:
        """Binds without a name server lookup, which http.server does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.host, self.server_address[1]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        query = f"?{urlencode({'token': self.token})}" if self.token is not None else ""
        return f"http://{host}:{self.server_port}/{query}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that went away."""


def _refused(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: already in use on {host}. Name another one; 0 is any that is free"
    if error.errno == errno.EACCES:
        return f"--port {port}: only root may listen there. Name one from 1024 on; 0 is any that is free"
    return f"--host {host} --port {port}: nothing can listen there: {error.strerror or error}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _SECONDS
    protocol_version = "HTTP/1.0"  # a connection is one question
    server_version, sys_version = "lockstep", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query, max_num_fields=100)
        if not self._host_is_this():
            self._say(HTTPStatus.FORBIDDEN, "this server is asked by its own name alone: http://localhost or 127.0.0.1")
            return
        if self.server.token is not None and not self._brings_token():
            self._take_token(address.path, query)
            return
        names = query.get("run", [])[:_MOST_RUNS]
        answers: dict[str, Callable[[], None]] = {
            "/": lambda: self._page("Runs", "runs.json"),
            "/run": lambda: self._page(", ".join(names), f"data.json?{urlencode({'run': names}, doseq=True)}"),
            "/runs.json": lambda: self._data(self.server.runs.listed()),
            "/data.json": partial(self._runs, names),
        }
        answer = answers.get(address.path)
        if answer is None:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        answer()

    def _runs(self, names: list[str]) -> None:
        try:
            if not names:
                raise ConfigError("no run was named")
            found = [self.server.runs.read(name) for name in names]
        except ConfigError as error:
            self._data({"error": str(error)}, HTTPStatus.NOT_FOUND)
            return
        self._data(page_data(found))

    def _host_is_this(self) -> bool:
        if self.server.token is not None:
            return True
        try:
            named = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            return False
        return is_loopback(named)

    def _brings_token(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _take_token(self, path: str, query: dict[str, list[str]]) -> None:
        """Moves the token from the address to a cookie."""
        if not any(self._is_token(each) for each in query.pop("token", [])):
            self._say(
                HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that lockstep serve printed"
            )
            return
        rest = urlencode(query, doseq=True)
        self.send_response(HTTPStatus.SEE_OTHER)
        # One slash only: two would lead to another host.
        self.send_header("Location", f"/{path.strip('/')}{f'?{rest}' if rest else ''}")
        self.send_header("Set-Cookie", f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self._end()

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.server.token or "").encode())

    def _page(self, title: str, source: str) -> None:
        self._send(HTTPStatus.OK, "text/html", served_page(title, source))

    def _data(self, found: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, "application/json", json.dumps(finite(found), separators=(",", ":")))

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain", f"{text}\n")

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self._end()
        self.wfile.write(body)

    def _end(self) -> None:
        for name, value in (
            ("Content-Security-Policy", policy("'self'")), ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"), ("X-Frame-Options", "DENY"), ("Cache-Control", "no-store"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: an address may contain the token."""
