"""Ranks that end, are killed or stopped at any moment: the launcher hears of it, and waits for none of them."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.distributed.failure import Result
from lockstep.errors import INTERRUPTED_EXIT_CODE
from lockstep.launchers.local import fork_server, supervisor
from lockstep.launchers.local.child import _send
from lockstep.launchers.local.ranks import _Channel, start
from lockstep.launchers.plan import local_plan


def launched(entry: Callable[[Any], Any], processes: int = 2) -> Result:
    return supervisor.launch(local_plan([], processes, threads=1), entry=entry)


def is_killed_while_another_writes(argument: None) -> None:
    if os.environ["RANK"] == "1":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()  # its thread is waited for
    time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)


def is_killed_in_the_midst_of_its_value(argument: None) -> bytes:
    def sendall(self: socket.socket, message: bytes) -> None:
        self.send(message[: len(message) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == "1":
        socket.socket.sendall = sendall  # type: ignore[method-assign, assignment]
    return b"x" * 10_000


@pytest.mark.parametrize("entry", [is_killed_while_another_writes, is_killed_in_the_midst_of_its_value])
def test_a_rank_that_is_killed_at_its_end_is_named(entry: Callable[[Any], Any]) -> None:
    began = time.monotonic()
    failure = launched(entry).failure
    assert failure is not None and (failure.rank, failure.kind) == (1, "SIGKILL")
    assert time.monotonic() - began < 30


def test_a_message_of_a_rank_that_is_stopped_is_not_waited_for() -> None:
    channel, (ours, theirs), whole = _Channel(), socket.socketpair(), b""

    def send() -> None:
        _send(theirs, "returned", b"x" * 3_000_000)
        theirs.close()

    threading.Thread(target=send).start()
    while data := ours.recv(1_000_000):
        whole += data
    for at in range(0, len(whole) - 1, 200_000):
        channel.of_rank.sendall(whole[at : min(at + 200_000, len(whole) - 1)])
        began = time.monotonic()
        assert not list(channel.messages()) and time.monotonic() - began < 2
    channel.of_rank.sendall(whole[-1:])
    assert list(channel.messages()) == [("returned", b"x" * 3_000_000)]
    for each in (channel.socket, channel.of_rank, ours):
        each.close()


def test_a_rank_that_is_only_now_being_made_hears_that_it_is_to_stop() -> None:
    """Before it listens to signals, which it inherits as ignored."""
    fork_server.warm_up(1)
    with start(local_plan([], 2, threads=1), entry=sleep) as ranks:
        ranks.ask_to_stop()
        began = time.monotonic()
        while (result := ranks.poll(stopping=True)) is None:
            assert time.monotonic() - began < 20
            time.sleep(0.01)
    assert result == Result(INTERRUPTED_EXIT_CODE, nothing_to_save=True)


def sleep(argument: None) -> None:
    time.sleep(60)


def test_a_rank_gets_its_own_connection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 126 ranks were too many for one message to the fork server."""
    monkeypatch.setattr(multiprocessing.forkserver, "MAXFDS_TO_SEND", 6)
    assert launched(rank, processes=4).returned == {each: str(each) for each in range(4)}


def rank(argument: None) -> str | None:
    return os.environ.get("RANK")


def variables(argument: None) -> list[str | None]:
    return [os.environ.get(name) for name in ("LOCKSTEP_TEST_DATA", "CUDA_VISIBLE_DEVICES", "TORCH_TEST")]


def test_every_launch_has_the_environment_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook, where the fork server is older; one that libraries read while they are loaded needs another."""
    for data, devices in (("first", "0,1"), ("second", "2"), (None, "2")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        if data is None:
            monkeypatch.delenv("LOCKSTEP_TEST_DATA")
        else:
            monkeypatch.setenv("LOCKSTEP_TEST_DATA", data)
        assert launched(variables, 1).returned == {0: [data, devices, None]}
    before = fork_server.ForkServer().pid
    monkeypatch.setenv("TORCH_TEST", "yes")
    fork_server.warm_up(1)
    assert fork_server.ForkServer().pid != before
    monkeypatch.delenv("TORCH_TEST")
    fork_server.stop()
