"""A client of the store, for any thread; requests are answered one at a time."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from lockstep.distributed.store import wire
from lockstep.distributed.store.wire import Malformed, Seal, frame, take_frame

# A store that does not answer for this long is gone.
_ANSWER_SECONDS = 600.0
_SLICE_SECONDS = 1.0
_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.01, 0.5
_WAIT_SECONDS = 1.0
_READ_BYTES = 256 * 1024


class StoreLost(RuntimeError):
    """The store is gone, or does not answer."""


class NotLetIn(StoreLost):
    """There is a store, of another run or another user: it does not know the secret."""


class Connection:
    """One connection that threads share by turns."""

    def __init__(self, connected: socket.socket, theirs: Seal, ours: Seal) -> None:
        self._socket, self._theirs, self._ours = connected, theirs, ours
        self._buffer = bytearray()
        self._turn = threading.Lock()
        self._lost: str | None = None
        connected.settimeout(_SLICE_SECONDS)
        _open.add(self)

    def ask(self, *request: bytes) -> list[bytes]:
        with self._turn:
            if self._lost is not None:
                raise StoreLost(self._lost)
            try:
                self._send(frame(request, self._ours))
                answer = self._answer()
            except (OSError, Malformed, StoreLost) as error:
                self._lost = str(error) or type(error).__name__
                self._socket.close()
                raise StoreLost(self._lost) from None
        if answer[0] != b"ok":
            raise StoreLost(f"the store refused a request: {b' '.join(answer[1:]).decode(errors='replace')}")
        return answer[1:]

    def close(self) -> None:
        self._lost = "the connection to the store is closed"
        self._socket.close()
        _open.discard(self)

    def _send(self, data: bytes) -> None:
        view, waited = memoryview(data), 0.0
        while view:
            try:
                view = view[self._socket.send(view) :]
            except TimeoutError:
                waited = _one_more_slice(waited)

    def _answer(self) -> list[bytes]:
        waited = 0.0
        while (answer := take_frame(self._buffer, self._theirs)) is None:
            try:
                received = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                waited = _one_more_slice(waited)
                continue
            if not received:
                raise StoreLost("the store closed the connection")
            self._buffer += received
        return answer


class Client:
    """Operations on the store, with keys under a prefix."""

    def __init__(self, connection: Connection, prefix: str = "", unix_path: str | None = None) -> None:
        self._connection, self._prefix, self.unix_path = connection, prefix, unix_path

    def under(self, prefix: str) -> Client:
        return Client(self._connection, f"{self._prefix}{prefix}/", self.unix_path)

    def set(self, key: str, value: str | bytes) -> None:
        self._connection.ask(b"set", self._key(key), _bytes(value))

    def read(self, key: str) -> bytes | None:
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        found = self._connection.ask(b"read", *map(self._key, keys)) if keys else []
        return [each[1:] if each[:1] == b"1" else None for each in found]

    def add(self, key: str, amount: int) -> int:
        return int(self._connection.ask(b"add", self._key(key), b"%d" % amount)[0])

    def check(self, keys: Sequence[str]) -> bool:
        return self._connection.ask(b"check", *map(self._key, keys))[0] == b"1"

    def delete(self, key: str) -> bool:
        return self._connection.ask(b"delete", self._key(key))[0] == b"1"

    def count(self) -> int:
        return int(self._connection.ask(b"count")[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._connection.ask(b"compare", self._key(key), _bytes(expected), _bytes(desired))[0]

    def append(self, key: str, more: str | bytes) -> None:
        self._connection.ask(b"append", self._key(key), _bytes(more))

    def set_final_message(self, key: str, value: str | bytes) -> None:
        """Has the store set a key once this connection closes, even if the process is killed."""
        self._connection.ask(b"final message", self._key(key), _bytes(value))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Returns whether all keys exist within the time. Other threads get a turn every second."""
        deadline, names = time.monotonic() + seconds, [self._key(key) for key in keys]
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), _WAIT_SECONDS)
            if self._connection.ask(b"wait", b"%d" % math.ceil(left * 1000), *names)[0] == b"1":
                return True
            if time.monotonic() >= deadline:
                return False

    def close(self) -> None:
        self._connection.close()

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()


def connect_unix(path: str, limit: float) -> Client:
    """Raises OSError if nothing listens there within the limit."""

    def connect() -> Connection:
        with closed_on_failure(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connected:
            connected.settimeout(limit)
            connected.connect(path)
            return Connection(connected, Seal(None), Seal(None))

    return Client(_until(limit, connect), unix_path=path)


def connect_tcp(address: str, port: int, secret: str, limit: float) -> Client:
    """Raises OSError if nothing listens there within the limit, NotLetIn if the secrets differ."""
    deadline = time.monotonic() + limit

    def connect() -> Connection:
        left = max(deadline - time.monotonic(), 0.1)
        with closed_on_failure(socket.create_connection((address, port), timeout=left)) as connected:
            connected.settimeout(left)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sent = wire.hello()
            connected.sendall(sent)
            handshake = wire.answer(secret, sent, _exactly(connected, wire.CHALLENGE_BYTES))
            if handshake is None:
                raise NotLetIn(f"what serves at {address}:{port} does not know the secret of this run")
            connected.sendall(handshake.proof(b"client"))
            return Connection(connected, handshake.seal(b"server"), handshake.seal(b"client"))

    return Client(_until(limit, connect))


def _until(limit: float, connect: Callable[[], Connection]) -> Connection:
    deadline, pause = time.monotonic() + limit, _RETRY_SECONDS
    while True:
        try:
            return connect()
        except OSError:
            if time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_RETRY_SECONDS)


@contextlib.contextmanager
def closed_on_failure(opened: socket.socket) -> Iterator[socket.socket]:
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


def _exactly(connected: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = connected.recv(count - len(received))
        if not more:
            raise ConnectionResetError("the connection was closed")
        received += more
    return received


def _one_more_slice(waited: float) -> float:
    """A slice in which this process was stopped counts once."""
    if waited >= _ANSWER_SECONDS:
        raise StoreLost(f"the store did not answer within {_ANSWER_SECONDS:g} s")
    return waited + _SLICE_SECONDS


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process must not use its parent's connections."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
