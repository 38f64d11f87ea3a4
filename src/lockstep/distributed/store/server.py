"""Serves the store to the ranks of a run from a thread.

A Unix socket lies in a private folder, and the kernel reports the peer's user. A TCP connection has to prove the secret
within seconds and a hundred bytes; otherwise it is refused and logged.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
import resource
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.distributed.store import wire
from lockstep.distributed.store.client import closed_on_failure
from lockstep.distributed.store.wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, Malformed, Seal, frame, take_frame

MAX_BYTES = 512 * 1024 * 1024
_ENTRY_BYTES = 200  # the overhead of a key
_YES, _NO = b"1", b"0"


class Refused(Exception):
    """A valid request that cannot be met."""


class Table:
    """The values of the store, within a bound on their total size."""

    _REQUESTS = (b"set", b"read", b"add", b"check", b"delete", b"count", b"compare", b"append")

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Raises Malformed for an invalid request, Refused for one that cannot be met."""
        name, *arguments = request
        if name not in self._REQUESTS:
            raise Malformed("an unknown request")
        try:
            answer: list[bytes] = getattr(self, f"_{name.decode()}")(*arguments)
        except TypeError:
            raise Malformed("an unknown request") from None
        return answer

    def missing(self, keys: Iterable[bytes]) -> bytes | None:
        return next((key for key in keys if key not in self._values), None)

    def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, value)
        return []

    def _read(self, *keys: bytes) -> list[bytes]:
        return [_YES + self._values[key] if key in self._values else _NO for key in keys]

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = _number(self._values.get(key, b"0")) + _number(amount)
        self._put(key, b"%d" % total)
        return [b"%d" % total]

    def _check(self, *keys: bytes) -> list[bytes]:
        return [_YES if all(key in self._values for key in keys) else _NO]

    def _delete(self, key: bytes) -> list[bytes]:
        value = self._values.pop(key, None)
        if value is None:
            return [_NO]
        self._bytes -= _ENTRY_BYTES + len(key) + len(value)
        return [_YES]

    def _count(self) -> list[bytes]:
        return [b"%d" % len(self._values)]

    def _compare(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        """As in torch: returns the new value; a missing key is set if nothing was expected."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return [desired]
        return [expected if present is None else present]

    def _append(self, key: bytes, more: bytes) -> list[bytes]:
        self._put(key, self._values.get(key, b"") + more)
        return []

    def _put(self, key: bytes, value: bytes) -> None:
        if len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise Refused(f"a key of {len(key)} bytes with {len(value)} is too long for the store")
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else _ENTRY_BYTES + len(key) + len(value)
        if self._bytes + more > MAX_BYTES:
            raise Refused(f"the store is full ({self._bytes} bytes)")
        self._bytes += more
        self._values[key] = value


def _number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise Refused("what is to be added to, or is added, is no number")
    return int(text)


logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 5.0
_WARN_SECONDS = 60.0
_MOST_WARNED = 256
_READ_BYTES = 256 * 1024
# A connection with this many unread bytes is not read from.
_UNREAD_BYTES = 1024 * 1024
_TICK_SECONDS = 1.0
# Threads share a connection, so a client that waits longer asks again.
LONGEST_WAIT_SECONDS = 1.0


@dataclass
class _Peer:
    socket: socket.socket
    address: str
    arrived: float
    receive: Callable[[_Peer], None]
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    handshake: wire.Handshake | None = None
    theirs: Seal = field(default_factory=lambda: Seal(None))
    ours: Seal = field(default_factory=lambda: Seal(None))
    final_message: list[bytes] | None = None


@dataclass(order=True)
class _Wait:
    deadline: float
    peer: _Peer = field(compare=False)
    keys: list[bytes] = field(compare=False)
    over: bool = field(default=False, compare=False)


class Server:
    """Serves until it is closed or its process ends."""

    def __init__(self, listener: socket.socket, secret: str | None = None) -> None:
        if secret is None and listener.family != socket.AF_UNIX:
            raise ValueError("a store that others can reach needs a secret")
        self._listener, self._secret = listener, secret
        self._table = Table()
        self._peers: dict[int, _Peer] = {}
        self._unauthenticated: dict[int, _Peer] = {}  # the oldest first
        self._waiting: dict[bytes, list[_Wait]] = {}  # by the key that is missing
        self._deadlines: list[_Wait] = []
        self._warned: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for each in (listener, self._wake, self._woken):
            each.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="lockstep-store-server", daemon=True)
        self._thread.start()
        _open.add(self)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(timeout=5.0)
        _open.discard(self)

    def close_in_child(self) -> None:
        """Closes the parent's descriptors in a forked process."""
        for each in (self._listener, self._wake, self._woken, *(peer.socket for peer in self._peers.values())):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._until_next_deadline()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    self._handle(key.data, events)
            self._end_expired_waits()
            self._refuse_slow_handshakes()
        for peer in list(self._peers.values()):
            self._disconnect(peer)
        self._selector.close()
        for each in (self._listener, self._wake, self._woken):
            each.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                time.sleep(0.05)  # the listener stays readable
            return
        connection.setblocking(False)
        peer = _Peer(connection, str(address[0]) if address else "this user", time.monotonic(), self._receive_hello)
        if self._secret is None:
            if (uid := _peer_uid(connection)) not in (None, os.geteuid(), 0):
                self._warn(f"uid {uid}", "it is another user's")
                connection.close()
                return
            peer.receive = self._receive_requests
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self._unauthenticated) >= _most_unauthenticated():
                self._make_room()
            self._unauthenticated[connection.fileno()] = peer
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _make_room(self) -> bool:
        """Refuses the oldest unauthenticated connection; ranks try again."""
        oldest = next(iter(self._unauthenticated.values()), None)
        if oldest is not None:
            self._refuse(oldest, "too many come at once")
        return oldest is not None

    def _refuse_slow_handshakes(self) -> None:
        limit = time.monotonic() - _HANDSHAKE_SECONDS
        for peer in [each for each in self._unauthenticated.values() if each.arrived < limit]:
            self._refuse(peer, f"it proved nothing within {_HANDSHAKE_SECONDS:g} s")

    def _handle(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                received = peer.socket.recv(_READ_BYTES)
                if not received:
                    self._disconnect(peer)
                    return
                peer.incoming += received
                peer.receive(peer)
            self._send(peer)
        except BlockingIOError:
            return
        except Malformed as error:
            if peer.socket.fileno() in self._unauthenticated:
                self._refuse(peer, str(error))
            else:
                self._warn(peer.address, f"{error}; its connection is closed")
                self._disconnect(peer)
        except OSError:
            self._disconnect(peer)

    def _receive_hello(self, peer: _Peer) -> None:
        if len(peer.incoming) < wire.HELLO_BYTES:
            return
        assert self._secret is not None
        if len(peer.incoming) > wire.HELLO_BYTES:
            raise Malformed("it does not wait for an answer")
        peer.handshake, reply = wire.challenge(self._secret, bytes(peer.incoming))
        peer.incoming.clear()
        peer.outgoing += reply
        peer.receive = self._receive_proof

    def _receive_proof(self, peer: _Peer) -> None:
        if len(peer.incoming) < wire.ANSWER_BYTES:
            return
        assert peer.handshake is not None
        if not peer.handshake.proves(b"client", bytes(peer.incoming[: wire.ANSWER_BYTES])):
            raise Malformed("it does not know the secret of this run")
        del peer.incoming[: wire.ANSWER_BYTES]
        peer.theirs, peer.ours = peer.handshake.seal(b"client"), peer.handshake.seal(b"server")
        del self._unauthenticated[peer.socket.fileno()]
        peer.receive = self._receive_requests
        self._receive_requests(peer)

    def _receive_requests(self, peer: _Peer) -> None:
        while len(peer.outgoing) < _UNREAD_BYTES and (request := take_frame(peer.incoming, peer.theirs)) is not None:
            if request[0] == b"wait":
                self._start_wait(peer, request[1:])
                return
            if request[0] == b"final message":
                reply = self._set_final_message(peer, request[1:])
            else:
                reply = self._reply(request)
            peer.outgoing += frame(reply, peer.ours)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """Answers a request and re-checks waits for its key."""
        try:
            reply = [b"ok", *self._table.answer(request)]
        except Refused as refusal:
            reply = [b"no", str(refusal).encode()]
        if len(request) > 1 and (waiting := self._waiting.pop(request[1], None)) is not None:
            for each in waiting:
                self._check_wait(each)
        return reply

    def _set_final_message(self, peer: _Peer, word: list[bytes]) -> list[bytes]:
        if len(word) != 2 or max(map(len, word)) > MAX_KEY_BYTES:
            raise Malformed("a final message is a key and a short value")
        peer.final_message = word
        return [b"ok"]

    def _start_wait(self, peer: _Peer, arguments: list[bytes]) -> None:
        """Answers when all keys exist or the time is over."""
        if len(arguments) < 2 or not arguments[0].isdigit() or len(arguments[0]) > 9:
            raise Malformed("a wait for nothing, or for ever")
        seconds = min(int(arguments[0]) / 1000, LONGEST_WAIT_SECONDS)
        wait = _Wait(time.monotonic() + seconds, peer, arguments[1:])
        heapq.heappush(self._deadlines, wait)
        self._check_wait(wait)

    def _check_wait(self, wait: _Wait) -> None:
        key = self._table.missing(wait.keys)
        if key is None:
            self._end_wait(wait, b"1")
        elif not wait.over:
            self._waiting.setdefault(key, []).append(wait)

    def _end_wait(self, wait: _Wait, answer: bytes) -> None:
        peer = wait.peer
        if not wait.over and peer.socket.fileno() in self._peers:
            peer.outgoing += frame([b"ok", answer], peer.ours)
            with contextlib.suppress(OSError):
                self._send(peer)
        wait.over = True

    def _end_expired_waits(self) -> None:
        while self._deadlines and (self._deadlines[0].over or self._deadlines[0].deadline <= time.monotonic()):
            wait = heapq.heappop(self._deadlines)
            for key in wait.keys:
                if not wait.over and wait in (waiting := self._waiting.get(key, [])):
                    waiting.remove(wait)
                    if not waiting:
                        del self._waiting[key]
            self._end_wait(wait, b"0")

    def _until_next_deadline(self) -> float:
        if not self._deadlines:
            return _TICK_SECONDS
        return min(max(self._deadlines[0].deadline - time.monotonic(), 0.0), _TICK_SECONDS)

    def _send(self, peer: _Peer) -> None:
        if peer.outgoing:
            with contextlib.suppress(BlockingIOError):
                del peer.outgoing[: peer.socket.send(peer.outgoing)]
            if not peer.outgoing and peer.receive == self._receive_requests and peer.incoming:
                self._receive_requests(peer)
        wanted = selectors.EVENT_WRITE if peer.outgoing else selectors.EVENT_READ
        self._selector.modify(peer.socket, wanted, peer)

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._warn(peer.address, why)
        self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
        number = peer.socket.fileno()
        if self._peers.pop(number, None) is not None:
            self._unauthenticated.pop(number, None)
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.final_message is not None:
                self._reply([b"set", *peer.final_message])

    def _warn(self, who: str, why: str) -> None:
        """Warns once a minute per address."""
        now = time.monotonic()
        if now - self._warned.get(who, -_WARN_SECONDS) < _WARN_SECONDS or len(self._warned) >= _MOST_WARNED:
            return
        self._warned[who] = now
        logger.warning("the store of this run refused a connection from %s: %s", who, why)


def listen_on_unix(path: str) -> socket.socket:
    with closed_on_failure(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(1024)
        return listener


def listen_on_tcp(address: str, port: int) -> socket.socket:
    """Listens at one address, never at all of them."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with closed_on_failure(socket.socket(family, kind, protocol)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
        return listener


def _peer_uid(connection: socket.socket) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _most_unauthenticated() -> int:
    """Ranks that connect at once are unauthenticated for a moment; most descriptors are for open connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(1024, files // 4))


_open: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_in_child() -> None:
    for server in list(_open):
        server.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)
