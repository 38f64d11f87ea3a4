"""Serves the pages of runs, which follow their runs, to one user: on loopback unless asked otherwise.

On loopback, a request must name this machine as its host, so that a foreign page whose name was made to resolve to it
is refused. On any other address, a request must bring the token that was printed.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from lockstep.config.plain import finite
from lockstep.errors import ConfigError, LaunchError
from lockstep.runs.data import page_data
from lockstep.runs.findings import kind_of
from lockstep.runs.reader import Run, is_run, last_change, read_run, run_folders
from lockstep.runs.report import policy, served_page
from lockstep.runs.table import Listed, listed

_LISTED = 500
_SHOWN = 4  # metrics of a run in the list


class RunsFolder:
    """The runs in a folder and, for sweeps, in the folders below it. Names never lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def folders(self) -> dict[str, Path]:
        """Returns all runs by name, the one that was written to last first."""
        if is_run(self.root):
            return {_name(Path(self.root.name)): self.root}
        found = sorted(run_folders(self.root), key=last_change, reverse=True)
        return {_name(folder.relative_to(self.root)): folder for folder in found}

    def read(self, name: str) -> Run:
        folder = self.folders().get(name)
        if folder is None:
            raise ConfigError(f"there is no run {name!r} in {self.root}")
        return read_run(folder)

    def listed(self) -> dict[str, Any]:
        found = list(self.folders().items())
        return {
            "title": f"Runs in {self.root.name}",
            "list": [_brief(listed(folder, name)) for name, folder in found[:_LISTED]],
            "more": max(len(found) - _LISTED, 0),
            "link": "run",
        }


def _name(path: Path) -> str:
    """Returns a path as text that a page can hold: a name on a disk is any bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _brief(run: Listed) -> dict[str, Any]:
    words = [f"{name} {value:.4g}" for name, value in run.metrics.items()]
    return {
        "name": run.name,
        "status": run.status,
        "kind": kind_of(run.status),
        "step": run.step or 0,
        "metrics": " · ".join(words[:_SHOWN]),
        "at": round(run.changed),
    }


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
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"--port {port}: already in use on {host}. Name another one; 0 is any that is free"
                ) from None
            raise LaunchError(
                f"--host {host} --port {port}: nothing can listen there: {error.strerror or error}"
            ) from None

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
