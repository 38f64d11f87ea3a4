"""Serves the store from a thread of its own, to the ranks of a run alone.

A Unix socket lies in a folder that only its owner can enter, and the system says who has come. A TCP connection has to
prove the secret first, within seconds and a hundred bytes; whoever does not is refused, and told of in the log.
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

from lockstep.distributed.store import wire as secrets
from lockstep.distributed.store.wire import MAX_KEY_BYTES, MAX_VALUE_BYTES, Malformed, Seal, frame, take_frame

MAX_BYTES = 512 * 1024 * 1024
_ENTRY_BYTES = 200  # what a key costs beside its bytes
_YES, _NO = b"1", b"0"


class Refused(Exception):
    """A request that was understood and cannot be met."""


class Table:
    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._bytes = 0
        self._requests: dict[bytes, Callable[..., list[bytes]]] = {
            b"set": self._set,
            b"read": self._read,
            b"add": self._add,
            b"check": self._check,
            b"delete": self._delete,
            b"count": self._count,
            b"compare": self._compare,
            b"append": self._append,
        }

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Raises Malformed where this is no request, Refused where it cannot be met."""
        name, *arguments = request
        try:
            return self._requests[name](*arguments)
        except (KeyError, TypeError):
            raise Malformed("an unknown request") from None

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
        """As torch's: what is there afterwards; a key that is not there is set where nothing was expected."""
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

_STRANGER_SECONDS = 5.0
_TELL_SECONDS = 60.0
_MOST_TOLD = 256
_READ_BYTES = 256 * 1024
# A connection that does not take its answers is not read from any more.
_UNREAD_BYTES = 1024 * 1024
_TICK_SECONDS = 1.0
# Others of the same process want to ask something too: who waits longer asks again.
LONGEST_WAIT_SECONDS = 1.0


@dataclass
class _Guest:
    socket: socket.socket
    address: str
    arrived: float
    receive: Callable[[_Guest], None]
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    shaken: secrets.Handshake | None = None
    theirs: Seal = field(default_factory=lambda: Seal(None))
    ours: Seal = field(default_factory=lambda: Seal(None))
    last_word: list[bytes] | None = None  # a key and a value to set once the connection is closed


@dataclass(order=True)
class _Wait:
    deadline: float
    guest: _Guest = field(compare=False)
    keys: list[bytes] = field(compare=False)
    over: bool = field(default=False, compare=False)


class Server:
    """Serves from the moment that it is made until it is closed, or its process ends."""

    def __init__(self, listener: socket.socket, secret: str | None = None) -> None:
        if secret is None and listener.family != socket.AF_UNIX:
            raise ValueError("a store that others can reach needs a secret")
        self._listener, self._secret = listener, secret
        self._table = Table()
        self._guests: dict[int, _Guest] = {}
        self._strangers: dict[int, _Guest] = {}  # that have not yet proven who they are, the oldest first
        self._waiting: dict[bytes, list[_Wait]] = {}  # by the key that is missing
        self._deadlines: list[_Wait] = []
        self._told: dict[str, float] = {}
        self._accepting = True
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

    def forget(self) -> None:
        """In a forked process, which serves nobody: let go of what belongs to its parent."""
        for each in (self._listener, self._wake, self._woken, *(guest.socket for guest in self._guests.values())):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closing:
            for key, events in self._selector.select(self._until_next_deadline()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is not self._woken:
                    self._attend(key.data, events)
            self._answer_who_waited_long_enough()
            self._send_away_the_slow()
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        self._selector.close()
        for each in (self._listener, self._wake, self._woken):
            each.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._make_room():
                time.sleep(0.05)  # it stays readable: do not spin
            return
        connection.setblocking(False)
        guest = _Guest(connection, str(address[0]) if address else "this user", time.monotonic(), self._hear_hello)
        if self._secret is None:
            if (uid := _peer_uid(connection)) not in (None, os.geteuid(), 0):
                self._tell(f"uid {uid}", "it is another user's")
                connection.close()
                return
            guest.receive = self._hear_requests
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self._strangers) >= _most_strangers():
                self._make_room()
            self._strangers[connection.fileno()] = guest
        self._guests[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _make_room(self) -> bool:
        """Send away who has waited longest without a proof; one of ours needs no time at all and tries again."""
        oldest = next(iter(self._strangers.values()), None)
        if oldest is not None:
            self._refuse(oldest, "too many come at once")
        return oldest is not None

    def _send_away_the_slow(self) -> None:
        limit = time.monotonic() - _STRANGER_SECONDS
        for guest in [each for each in self._strangers.values() if each.arrived < limit]:
            self._refuse(guest, f"it proved nothing within {_STRANGER_SECONDS:g} s")

    def _attend(self, guest: _Guest, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                received = guest.socket.recv(_READ_BYTES)
                if not received:
                    self._dismiss(guest)
                    return
                guest.incoming += received
                guest.receive(guest)
            self._send(guest)
        except BlockingIOError:
            return
        except Malformed as error:
            if guest.socket.fileno() in self._strangers:
                self._refuse(guest, str(error))
            else:
                self._tell(guest.address, f"{error}; its connection is closed")
                self._dismiss(guest)
        except OSError:
            self._dismiss(guest)

    def _hear_hello(self, guest: _Guest) -> None:
        if len(guest.incoming) < secrets.HELLO_BYTES:
            return
        assert self._secret is not None
        if len(guest.incoming) > secrets.HELLO_BYTES:
            raise Malformed("it does not wait for an answer")
        guest.shaken, reply = secrets.challenge(self._secret, bytes(guest.incoming))
        guest.incoming.clear()
        guest.outgoing += reply
        guest.receive = self._hear_proof

    def _hear_proof(self, guest: _Guest) -> None:
        if len(guest.incoming) < secrets.ANSWER_BYTES:
            return
        assert guest.shaken is not None
        if not guest.shaken.proves(b"client", bytes(guest.incoming[: secrets.ANSWER_BYTES])):
            raise Malformed("it does not know the secret of this run")
        del guest.incoming[: secrets.ANSWER_BYTES]
        guest.theirs, guest.ours = guest.shaken.seal(b"client"), guest.shaken.seal(b"server")
        del self._strangers[guest.socket.fileno()]
        guest.receive = self._hear_requests
        self._hear_requests(guest)

    def _hear_requests(self, guest: _Guest) -> None:
        while len(guest.outgoing) < _UNREAD_BYTES and (request := take_frame(guest.incoming, guest.theirs)) is not None:
            if request[0] == b"wait":
                self._have_wait(guest, request[1:])
                return
            if request[0] == b"last word":
                reply = self._take_last_word(guest, request[1:])
            else:
                reply = self._reply(request)
            guest.outgoing += frame(reply, guest.ours)

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """What the table says; whoever waits for the key that it is about looks again."""
        try:
            reply = [b"ok", *self._table.answer(request)]
        except Refused as refusal:
            reply = [b"no", str(refusal).encode()]
        if len(request) > 1 and (waiting := self._waiting.pop(request[1], None)) is not None:
            for each in waiting:
                self._wait_on(each)
        return reply

    def _take_last_word(self, guest: _Guest, word: list[bytes]) -> list[bytes]:
        if len(word) != 2 or max(map(len, word)) > MAX_KEY_BYTES:
            raise Malformed("a last word is a key and a short value")
        guest.last_word = word
        return [b"ok"]

    def _have_wait(self, guest: _Guest, arguments: list[bytes]) -> None:
        """Answer when all of these keys are there, or the time is over; this guest asks nothing else until then."""
        if len(arguments) < 2 or not arguments[0].isdigit() or len(arguments[0]) > 9:
            raise Malformed("a wait for nothing, or for ever")
        seconds = min(int(arguments[0]) / 1000, LONGEST_WAIT_SECONDS)
        wait = _Wait(time.monotonic() + seconds, guest, arguments[1:])
        heapq.heappush(self._deadlines, wait)
        self._wait_on(wait)

    def _wait_on(self, wait: _Wait) -> None:
        key = self._table.missing(wait.keys)
        if key is None:
            self._end_wait(wait, b"1")
        elif not wait.over:
            self._waiting.setdefault(key, []).append(wait)

    def _end_wait(self, wait: _Wait, answer: bytes) -> None:
        guest = wait.guest
        if not wait.over and guest.socket.fileno() in self._guests:
            guest.outgoing += frame([b"ok", answer], guest.ours)
            with contextlib.suppress(OSError):
                self._send(guest)
        wait.over = True

    def _answer_who_waited_long_enough(self) -> None:
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

    def _send(self, guest: _Guest) -> None:
        if guest.outgoing:
            with contextlib.suppress(BlockingIOError):
                del guest.outgoing[: guest.socket.send(guest.outgoing)]
            if not guest.outgoing and guest.receive == self._hear_requests and guest.incoming:
                self._hear_requests(guest)  # what was left while it did not take its answers
        wanted = selectors.EVENT_WRITE if guest.outgoing else selectors.EVENT_READ
        self._selector.modify(guest.socket, wanted, guest)

    def _refuse(self, guest: _Guest, why: str) -> None:
        self._tell(guest.address, why)
        self._dismiss(guest)

    def _dismiss(self, guest: _Guest) -> None:
        number = guest.socket.fileno()
        if self._guests.pop(number, None) is not None:
            self._strangers.pop(number, None)
            self._selector.unregister(guest.socket)
            guest.socket.close()
            if guest.last_word is not None:
                self._reply([b"set", *guest.last_word])

    def _tell(self, who: str, why: str) -> None:
        """Once a minute for every address, however often it knocks."""
        now = time.monotonic()
        if now - self._told.get(who, -_TELL_SECONDS) < _TELL_SECONDS or len(self._told) >= _MOST_TOLD:
            return
        self._told[who] = now
        logger.warning("the store of this run refused a connection from %s: %s", who, why)


def listen_on_unix(path: str) -> socket.socket:
    """In a folder that only its owner can enter."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def listen_on_tcp(address: str, port: int) -> socket.socket:
    """At one address of this host; never at all of them, unless that is the address."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _peer_uid(connection: socket.socket) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _most_strangers() -> int:
    """Ranks that all come at once are strangers for a moment; still most open files are for those that stay."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(1024, files // 4))


_open: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_open):
        server.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
