"""Traces on demand: the service that TensorBoard's "Capture profile" asks, at an address of our choice.

The servers that come with XLA (torch_xla, jax) listen at all addresses of the machine, let a second process share the
port without a word, and write wherever the request says. This one listens at loopback unless told otherwise, refuses a
port that is taken, and writes into the run's own folder. A trace is taken by the training thread, between two steps.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)

SERVICE = "tensorflow.ProfilerService"
_LONGEST_SECONDS = 30.0  # a trace is kept in memory until it is written
_ANSWER_SECONDS = 60.0  # beyond the trace's own: for the step under way to end, and to write
_DURATION_MS = 1  # the field of a ProfileRequest


class Request:
    """Somebody waits for a trace of so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failure: str | None = None
        self._answered = threading.Event()

    def answer(self, failure: str | None = None) -> None:
        self.failure = failure
        self._answered.set()

    def wait(self) -> None:
        if not self._answered.wait(self.seconds + _ANSWER_SECONDS):
            self.answer(f"no step ended within {_ANSWER_SECONDS:g} s")


class Demand:
    """Where requests are left by the server's thread and taken by the training thread."""

    def __init__(self) -> None:
        self._pending: Request | None = None
        self._lock = threading.Lock()
        self._server: Any = None
        self._closed = False

    @classmethod
    def listening(cls, address: str, port: int | None, local_rank: int) -> Demand:
        """With a server where there can be one; what is in its way is told, and is no reason not to train."""
        demand = cls()
        if port is not None:
            at = f"[{address}]:{port + local_rank}" if ":" in address else f"{address}:{port + local_rank}"
            demand._serve(at)
        return demand

    def take(self) -> Request | None:
        request, self._pending = self._pending, None
        return request

    def ask(self, seconds: float) -> str | None:
        """Wait for a trace of so many seconds; why there is none, where there is none."""
        request = Request(min(seconds, _LONGEST_SECONDS))
        with self._lock:  # one at a time
            if self._closed:
                return "the run is over"
            self._pending = request
            request.wait()
            if self._pending is request:
                self._pending = None
        return request.failure

    def close(self) -> None:
        self._closed = True
        if request := self.take():
            request.answer("the run is over")
        if self._server is not None:
            self._server.stop(grace=1.0).wait(5.0)
            self._server = None

    def _serve(self, at: str) -> None:
        try:
            import grpc
        except ImportError:
            logger.info("no profiles on demand: they need grpcio (pip install 'lockstep-train[profile]')")
            return

        def profile(message: bytes, context: Any) -> bytes:
            failure = self.ask(_first_number(message, _DURATION_MS, 1000) / 1000)
            if failure is not None:
                context.abort(grpc.StatusCode.UNAVAILABLE, failure)
            return b""  # a ProfileResponse in which nothing needs to be said: the trace is not empty

        handlers = {"Profile": grpc.unary_unary_rpc_method_handler(profile)}
        # Two at work: one takes a trace, and one more can be told to wait.
        server = grpc.server(ThreadPoolExecutor(2, "lockstep-profile"), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            if not server.add_insecure_port(at):
                raise RuntimeError("it cannot be listened at")
        except RuntimeError:
            logger.warning(
                "profile: %s is in use, or is no address of this host: no profiles on demand on this rank. "
                "Set profile.port (each local rank takes the next one) or profile.address",
                at,
            )
            return
        server.start()
        self._server = server
        logger.info("profiles on demand at %s", at)


def _first_number(message: bytes, field: int, default: int) -> int:
    """An integer field of a protobuf message, by its number; the default where it is not there."""
    at = 0
    try:
        while at < len(message):
            key, at = _varint(message, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(message, at)
                if key >> 3 == field:
                    return value
            elif kind == 2:
                length, at = _varint(message, at)
                at += length
            else:
                at += {1: 8, 5: 4}[kind]
    except (IndexError, KeyError):
        pass
    return default


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
