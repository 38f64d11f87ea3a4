"""One writer per folder: by the system's locks, and by a lease where there are none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError, FolderLost
from lockstep.record import folder_lease, folder_lock
from lockstep.record.folder_lease import Holder
from lockstep.record.folder_lock import locked, locked_by_rank

# Holds a folder until it is killed, or told to let go by a line; without locks where it is asked to.
HOLD = """
import errno, fcntl, os, sys
from pathlib import Path
from lockstep.record import folder_lease, folder_lock
folder, kind, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder_lease.BEAT_SECONDS = 0.1
if number:
    def no_locks(*how):
        raise OSError(number, os.strerror(number))
    fcntl.flock = no_locks
with getattr(folder_lock, kind)(folder):
    print("held", flush=True)
    sys.stdin.readline()
"""
Start = Callable[..., "subprocess.Popen[str]"]


without_locks = pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)


@pytest.fixture(params=[0, errno.ENOLCK], ids=["locks", "a lease"])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With locks, and without: an error that the file system gives, from the call that it would come from."""
    number = int(request.param)

    def refused(*how: Any) -> None:
        raise OSError(number, os.strerror(number))

    if number:
        monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(folder_lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(folder_lease, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(folder_lease, "_SETTLE_SECONDS", 0.2)
    return number


@pytest.fixture
def start(no_locks: int) -> Iterator[Start]:
    made: list[subprocess.Popen[str]] = []

    def begin(folder: Path, kind: str = "locked") -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", HOLD, str(folder), kind, str(no_locks)]
        made.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout is not None and made[-1].stdout.readline() == "held\n"
        return made[-1]

    yield begin
    for each in made:
        if each.poll() is None:
            each.send_signal(signal.SIGCONT)
            each.kill()
        each.communicate(timeout=10)


def test_a_second_run_is_refused_while_the_first_is_at_work_and_told_who_it_is(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError) as refused, locked(tmp_path):
            pass
        text, who = str(refused.value), f"its launcher, process {first.pid} on {socket.gethostname()}, since 20"
        assert f"another run is at work in this folder: {who}" in text and "wait for it or end it first" in text
    first.communicate("let go\n", timeout=10)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("no_locks", [0, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], indirect=True)
def test_it_is_free_at_once_when_its_holder_is_killed(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path)
    first.kill()
    first.wait(10)
    with locked(tmp_path) as held:
        held.check()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on"), locked(tmp_path):
            pass


def test_ranks_of_a_launcher_that_was_killed_hold_it_until_they_have_left(start: Start, tmp_path: Path) -> None:
    launcher, rank = start(tmp_path), start(tmp_path, "locked_by_rank")
    launcher.kill()
    launcher.wait(10)
    with pytest.raises(ConfigError) as refused, locked(tmp_path):
        pass
    assert f"rank 0, process {rank.pid} on" in str(refused.value)
    assert "Its launcher is gone; it saves and leaves by itself within a minute" in str(refused.value)
    with pytest.raises(ConfigError), locked_by_rank(tmp_path):
        pass
    rank.communicate("leave\n", timeout=10)
    with locked(tmp_path), locked_by_rank(tmp_path):
        pass


def test_who_may_wait_gets_it_when_it_is_free(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path, "locked_by_rank")
    began = time.monotonic()
    with pytest.raises(ConfigError), locked_by_rank(tmp_path, patience=0.5):
        pass
    assert time.monotonic() - began > 0.5
    assert first.stdin is not None
    first.stdin.write("leave\n")
    first.stdin.flush()
    with locked_by_rank(tmp_path, patience=20):
        pass


def test_a_process_that_was_forked_from_the_holder_holds_nothing(no_locks: int, tmp_path: Path) -> None:
    """Data workers are: one that hangs would keep the folder from everybody."""
    read, write = os.pipe()
    with locked(tmp_path):
        pid = os.fork()
        if not pid:
            os.read(read, 1)
            os._exit(0)
    try:
        with locked(tmp_path):
            pass
    finally:
        os.write(write, b"!")
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_a_folder_that_is_not_there_is_not_made(no_locks: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not the folder of a run"), locked(tmp_path / "nowhere"):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_says_nothing_is_held_by_somebody_all_the_same(tmp_path: Path) -> None:
    for text in (b"", b"{}", b"\xff", b"[1]", b'{"pid": "x"}', b"[" * 4000, b"1234\n"):
        assert Holder.decode(text) is None
    with (tmp_path / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="at work in this folder: an unknown process; wait"), locked(tmp_path):
            pass


# The lease


def elsewhere(file: Path, **changes: Any) -> bytes:
    """Make a lease one of a process on another host."""
    told = {**json.loads(file.read_bytes()), "machine": "another", "host": "another-host", **changes}
    file.write_bytes(json.dumps(told).encode())
    return file.read_bytes()


@without_locks
def test_a_lease_of_another_host_is_taken_over_once_it_does_not_beat_any_more(
    no_locks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / ".lock-lease"
    file.write_bytes(Holder("its launcher").encode(token="theirs", beat="000000000007"))
    elsewhere(file)
    began = time.monotonic()
    with locked(tmp_path) as held:
        assert time.monotonic() - began > 1.0
        held.check()
        assert json.loads(file.read_bytes())["pid"] == os.getpid()
    assert "held by its launcher, process" in caplog.text and "on another-host" in caplog.text
    assert list(tmp_path.glob("*lease*")) == []


@without_locks
def test_a_lease_of_another_host_that_beats_is_not(
    no_locks: int, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path)
    monkeypatch.setattr("lockstep.record.folder_lease._machine", lambda: "another")
    with pytest.raises(ConfigError, match=f"process {first.pid} on"), locked(tmp_path):
        pass


@without_locks
def test_one_that_was_taken_for_gone_and_was_only_stopped_writes_nothing_more(no_locks: int, tmp_path: Path) -> None:
    with locked(tmp_path) as held:
        held.check()
        other = tmp_path / "other"
        other.write_bytes(Holder("its launcher").encode(token="theirs", beat="000000000001"))
        other.replace(tmp_path / ".lock-lease")
        deadline = time.monotonic() + 10
        with pytest.raises(FolderLost, match="another process has taken this run's folder over"):
            while time.monotonic() < deadline:
                held.check()
                time.sleep(0.05)
    assert (tmp_path / ".lock-lease").exists(), "the other one's"


@without_locks
def test_a_lease_is_refreshed_and_goes_with_its_holder(no_locks: int, tmp_path: Path) -> None:
    with locked(tmp_path):
        first = (tmp_path / ".lock-lease").read_bytes()
        deadline = time.monotonic() + 10
        while (tmp_path / ".lock-lease").read_bytes() == first and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / ".lock-lease").read_bytes() != first
    assert not (tmp_path / ".lock-lease").exists()
    assert folder_lock._held_here == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the system itself refuse locks")
@pytest.mark.parametrize("no_locks", [0], indirect=True)
def test_a_system_that_refuses_locks_itself(no_locks: int, tmp_path: Path) -> None:
    strace = f"strace -f -qq -o {tmp_path}/trace -e trace=flock -e inject=flock:error=ENOLCK"
    argv = [*strace.split(), sys.executable, "-c", HOLD, str(tmp_path), "locked", "0"]
    first = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        if first.stdout.readline() != "held\n":
            pytest.skip("this container may not trace processes")
        assert json.loads((tmp_path / ".lock-lease").read_bytes())["beat"]
        second = subprocess.run(argv, capture_output=True, text=True, input="")
        assert "another run is at work in this folder: its launcher, process" in second.stderr
    finally:
        first.communicate("let go\n", timeout=10)
    assert not (tmp_path / ".lock-lease").exists()
