"""Traces on demand: the service that TensorBoard's "Capture profile" asks.

The servers that come with XLA (torch_xla, jax) listen at all addresses of the machine, let a second process share the
port silently, and write wherever the request says. This one listens on loopback by default, refuses a port that is
taken, and writes into the run's folder. The training thread takes a trace, between two steps.

Processes of the run's user on this host may ask, as Linux lists them. From another host, they come through a tunnel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from lockstep.distributed.listener import owner
from lockstep.errors import ConfigError
from lockstep.runtime import with_variables

logger = logging.getLogger(__name__)

SERVICE = "tensorflow.ProfilerService"
_LONGEST_SECONDS = 30.0  # a trace is kept in memory until it is written
_ANSWER_SECONDS = 60.0  # beyond the trace's own: for the step under way to end, and to write
# Limits connections, so that others cannot use up the open files of a rank.
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", 16),
    ("grpc.server_handshake_timeout_ms", 5000),
]
_NOT_YOURS = (
    "a trace is taken for the user of the run alone, and on its host (Linux): from another host, use a tunnel "
    "(ssh -L 9012:127.0.0.1:9012 HOST)"
)
_DURATION_MS = b"\x08"  # the key of the first field of a ProfileRequest, an integer


class Request:
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
    """Passes requests from the server's thread to the training thread."""

    def __init__(self) -> None:
        self._pending: Request | None = None
        self._lock = threading.Lock()
        self._server: Any = None
        self._closed = False

    def take(self) -> Request | None:
        request, self._pending = self._pending, None
        return request

    def ask(self, seconds: float) -> str | None:
        """Waits for a trace of so many seconds; returns why there is none, if so."""
        request = Request(min(seconds, _LONGEST_SECONDS))
        with self._lock:  # one at a time
            self._pending = request
            if self._closed:
                return "the run is over"
            request.wait()
            if self._pending is request:
                self._pending = None
        return request.failure

    def close(self) -> None:
        self._closed = True
        if request := self.take():
            request.answer("the run is over")
        if self._server is not None:
            self._server.stop(grace=2.0).wait(5.0)  # for answers on their way
            self._server = None

    def serve(self, address: str, port: int) -> None:
        """Starts a server if it can; a problem is logged and does not stop the training."""
        at = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        try:
            grpc = _import_grpc()
        except ImportError:
            logger.info("no profiles on demand: they need grpcio (pip install 'lockstep-train[profile]')")
            return

        def profile(message: bytes, context: Any) -> bytes:
            if not permitted(context.peer(), port):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, _NOT_YOURS)
            failure = self.ask(_seconds(message))
            if failure is not None:
                context.abort(grpc.StatusCode.UNAVAILABLE, failure)
            return b""  # an empty ProfileResponse: the trace is not empty

        handlers = {"Profile": grpc.unary_unary_rpc_method_handler(profile)}
        # Two threads: one request waits for a trace, another for its turn.
        server = grpc.server(ThreadPoolExecutor(2, "lockstep-profile"), options=_OPTIONS)
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


def capture(addresses: Sequence[str], seconds: float) -> dict[str, str]:
    """Asks the ranks that listen at these addresses for a trace, all at once; returns the failures by address."""
    try:
        import grpc
    except ImportError:
        raise ConfigError("this needs grpcio: pip install 'lockstep-train[profile]'") from None
    request, failures = _DURATION_MS + _varint(round(seconds * 1000)), {}
    with contextlib.ExitStack() as stack:
        channels = {each: stack.enter_context(grpc.insecure_channel(each)) for each in addresses}
        limit = seconds + _ANSWER_SECONDS + 10
        answers = {
            address: channel.unary_unary(f"/{SERVICE}/Profile").future(request, timeout=limit)
            for address, channel in channels.items()
        }
        for address, answer in answers.items():
            if (error := answer.exception()) is not None:
                failures[address] = str(error.details())
    return failures


def permitted(peer: str, port: int) -> bool:
    """Whether a client may have a trace taken; gRPC writes `peer` as `ipv4:127.0.0.1:41234`."""
    try:
        _, _, place = unquote(peer).partition(":")
        host, _, number = place.rpartition(":")
        return owner((host.strip("[]"), int(number)), port) in (os.geteuid(), 0)
    except ValueError:
        return False


def _import_grpc() -> Any:
    """Imports grpc without its fork support, which prints a message per fork: a loader's workers never use it."""
    with with_variables({"GRPC_ENABLE_FORK_SUPPORT": "false"}):
        import grpc

        grpc.insecure_channel("127.0.0.1:1").close()  # it is read when it is first used
    return grpc


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _seconds(message: bytes) -> float:
    """Returns the duration that a ProfileRequest asks for: its first field, in milliseconds."""
    milliseconds = 0
    if message[:1] == _DURATION_MS:
        for position, byte in enumerate(message[1:10]):
            milliseconds |= (byte & 0x7F) << 7 * position
            if byte < 0x80:
                break
    return (milliseconds or 1000) / 1000
