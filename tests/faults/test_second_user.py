"""Another user of the machine: can neither read, nor end, nor disturb a run. Needs root, to become that user."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, losses, rank_pids, wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux"), reason="becoming another user needs root on Linux"
)
STRANGER = 64999  # an account that does not exist has all the rights that another user has
ROW_OF_SEQUENCE_NUMBERS = b"".join(struct.pack("<q", number) for number in range(64))
VERDICT = "lockstep/attempt-0/meeting-0/stalled"
GARBAGE = (
    b"",
    b"\0" * 4096,
    ROW_OF_SEQUENCE_NUMBERS,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    # What torch's own store would take for: hello, set the verdict, and what is the config?
    b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + struct.pack("<Q", len(VERDICT)) + VERDICT.encode()
    + struct.pack("<Q", 4) + b"over" + b"\x03" + struct.pack("<Q", len(VERDICT)) + VERDICT.encode(),
)  # fmt: skip


@pytest.fixture
def open_project() -> Iterator[Project]:
    """In a folder that everybody may enter, as a home often is."""
    folder = Path(tempfile.mkdtemp(prefix="second-user-", dir="/tmp"))
    folder.chmod(0o755)
    yield Project(folder)
    shutil.rmtree(folder)


def listening(pids: list[int]) -> tuple[list[tuple[str, int]], list[str]]:
    """Where the processes of a run listen: TCP, and the paths of Unix sockets."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    tcp, unix = [], []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for words in map(str.split, Path(table).read_text().splitlines()[1:]):
            if words[9] in inodes and words[3] == "0A":
                text, port = words[1].split(":")
                packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
                address = ipaddress.ip_address(packed)
                tcp.append((str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)))
    for words in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:]):
        if words[6] in inodes and len(words) > 7:
            unix.append(words[7])
    return tcp, unix


def attack(tcp: list[tuple[str, int]], unix: list[str], pids: list[int], run: Path) -> dict[str, Any]:
    """Everything that comes to mind; what came of it. Imports nothing: Python itself may be out of reach."""
    found: dict[str, Any] = {"read": [], "written": [], "heard": [], "signalled": [], "let in": [], "connected": 0}
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1):
            with contextlib.suppress(PermissionError):
                os.kill(pid, number)
                found["signalled"].append(pid)
    secrets = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "maps")]
    private = [str(Path(path).parent) for path in unix if path.startswith("/")]
    for path in [*secrets, *private]:
        with contextlib.suppress(OSError):
            reader = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                os.read(reader, 1)
            found["read"].append(path)
    for path in unix:
        stranger = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            stranger.settimeout(1)
            stranger.connect("\0" + path[1:] if path.startswith("@") else path)
            found["let in"].append(path)
    for path in (run / "config.yaml", run / "metrics.jsonl", run / "summary.json", run / "logs" / "rank-0.log"):
        with contextlib.suppress(OSError):
            os.open(path, os.O_RDWR | os.O_APPEND)
            found["written"].append(str(path))
    for name in ("checkpoints", "logs", "."):
        with contextlib.suppress(OSError):
            os.mkdir(run / name / "mine")  # noqa: PTH102
            found["written"].append(str(run / name))
    held = []
    for place in tcp:
        for attempt in range(300):  # more than enough for the files that a process may have
            stranger = socket.socket()
            try:
                stranger.settimeout(0.3)
                stranger.connect(place)
                stranger.sendall(GARBAGE[attempt % len(GARBAGE)])
            except OSError:
                if attempt < len(GARBAGE):
                    continue
                break
            held.append(stranger)
    found["connected"] = len(held)
    for stranger in held:
        stranger.settimeout(0.01)
        with contextlib.suppress(OSError):
            if said := stranger.recv(4096):
                found["heard"].append(said[:200].hex())
    return found


def as_another_user(*arguments: Any) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ.clear()
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(writer, json.dumps(attack(*arguments)).encode())
        except BaseException as error:
            os.write(writer, json.dumps({"failed": repr(error)}).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said = b""
    while more := os.read(reader, 65536):
        said += more
    os.waitpid(child, 0)
    os.close(reader)
    return dict(json.loads(said))


@pytest.mark.parametrize("umask", [pytest.param(0o077, marks=pytest.mark.long), 0o022], ids=oct)
def test_a_second_user_can_neither_read_nor_end_nor_disturb_a_run(open_project: Project, umask: int) -> None:
    project = open_project
    values: dict[str, Any] = {
        "train": {"epochs": 6, "batch_size": 12},
        "data": {"split": {"train": 0.8, "val": 0.2}, "workers": 1},
    }
    undisturbed = losses(project.train(out="before", **values))
    # Slow enough to be attacked in many steps, and in its last ones until the attack is over, however long that takes.
    over = project.folder / "the-attack-is-over"
    task = {"sleep": 0.15, "fail_at": {"how": "wait", "step": 6 * 7 - 2, "until": str(over)}}
    slow = {**values, "task": {"type": f"{TASK_FILE}:Tiny", **task}}
    before = os.umask(umask)
    try:
        command = project.start("train", project.config(profile={"steps": 0}, **slow))
    finally:
        os.umask(before)
    run = Path(wait_until(lambda: list(project.folder.glob("runs/*")), what="the run's folder")[0])
    ranks = rank_pids(run)
    wait_until(lambda: (run / "metrics.jsonl").exists() and losses(run), what="the first step")
    pids = [each.pid for each in command.members()]
    assert set(ranks.values()) <= set(pids)
    tcp, unix = listening(pids)
    assert all(host.startswith("127.") for host, _ in tcp), "nothing beyond this host"
    assert any(path.endswith("/store") for path in unix)
    found = as_another_user(tcp, unix, pids, run)
    assert command.process.poll() is None, "the run was over before the attack was"
    over.touch()
    finished = command.wait()
    assert finished.code == 0, finished.text
    # What gRPC says to everybody who connects (its settings) is all that is heard; it says nothing of the run.
    heard = {each[:18] for each in found.pop("heard")} - {"000018040000000000", "000024040000000000"}
    assert not heard
    found.pop("connected")
    assert found == {"read": [], "written": [], "signalled": [], "let in": []}
    assert losses(run) == undisturbed
    if umask == 0o077:
        shared = [each for each in run.rglob("*") if stat.S_IMODE(each.stat().st_mode) & 0o077]
        assert not shared
