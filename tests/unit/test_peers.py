"""Who is at the other end of a connection, and who may ask for a trace."""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest

from lockstep.distributed import listener
from lockstep.distributed.listener import owner
from lockstep.errors import RollCallError
from lockstep.profiler.demand import permitted

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="as Linux lists them")
STRANGER = 64999


def connect_as(uid: int, port: int) -> tuple[int, int]:
    """A process of that user, connected for a while to a port of this host: its id, and the port that it has."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(uid)
            connection = socket.socket()  # nothing is imported any more: it may be where that user cannot read
            connection.settimeout(5)
            connection.connect(("127.0.0.1", port))
            os.write(writer, str(connection.getsockname()[1]).encode())
            time.sleep(30)
        finally:
            os._exit(0)
    os.close(writer)
    return child, int(os.read(reader, 20))


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_stranger_is_known_and_a_door_is_closed_to_one() -> None:
    children = []
    try:
        with pytest.raises(RollCallError, match=f"another user \\(uid {STRANGER}\\)"), listener.closed_behind():
            server = socket.create_server(("127.0.0.1", 0))
            port = server.getsockname()[1]
            child, theirs = connect_as(STRANGER, port)
            children.append(child)
            accepted, _ = server.accept()
        assert owner(("127.0.0.1", theirs), port) == STRANGER
        assert not permitted(f"ipv4:127.0.0.1:{theirs}", port)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    accepted.close()
    server.close()


def test_behind_the_last_one_the_door_is_closed() -> None:
    with listener.closed_behind():
        server = socket.create_server(("127.0.0.1", 0))
        place = server.getsockname()
        friend = socket.create_connection(place, timeout=5)
        accepted, _ = server.accept()
    with pytest.raises(TimeoutError):
        socket.create_connection(place, timeout=0.3)
    friend.sendall(b"still")
    assert accepted.recv(10) == b"still"
    assert owner(friend.getsockname(), place[1]) == os.geteuid()
    assert permitted(f"ipv4:127.0.0.1:{friend.getsockname()[1]}", place[1])
    for each in (friend, accepted, server):
        each.close()


def test_nobody_of_another_host_has_a_trace_taken() -> None:
    for peer in ("ipv4:192.0.2.1:4000", "ipv6:%5B2001:db8::1%5D:4000", "", "unix:", "ipv4:nowhere", "unknown"):
        assert not permitted(peer, 9012)
