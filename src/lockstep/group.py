"""The ranks that talk to each other.

The control plane carries small host messages (agree, gather, barrier, rendezvous) over a gloo group of its own,
beside the data plane that carries tensors. Messages are JSON or bytes: nothing that arrives is ever unpickled.
Every wait has a name and a limit; when the limit passes, the error says who did not arrive.

Growth with the number of ranks: the store holds one small key per rank, and gloo opens a connection between every
pair of ranks, so the control plane is meant for hundreds of ranks, not for tens of thousands.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from lockstep.errors import LOST_PEER, LaunchError, PeerLost, RankMissing, RankZeroFailed
from lockstep.runtime.base import Runtime
from lockstep.topology import Topology

Value = TypeVar("Value")

# A message this small travels with its length in one collective; a longer one needs a second.
INLINE_BYTES = 1000
_HEADER = 8
# How long the threads of a group get to let go of the last message before the group is taken apart.
_SETTLE_SECONDS = 0.05


class Group:
    """All ranks of a run, as seen by one of them. A world of one needs no network and never waits."""

    def __init__(self, rank: int, world_size: int, timeout: float, store: Any = None, control: Any = None) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._store, self._control = store, control
        self._waits = 0

    @overload
    def agree(self, value: Callable[[], Value], name: str = ...) -> Value: ...

    @overload
    def agree(self, value: Value, name: str = ...) -> Value: ...

    def agree(self, value: Any, name: str = "a decision") -> Any:
        """Rank 0's value on every rank. A callable runs on rank 0 only; if it raises there, every rank raises."""
        if self.rank != 0:
            with self._waiting(name):
                return _unwrap(self._broadcast(b""))
        try:
            message = _encode({"value": value() if callable(value) else value}, name)
        except Exception as error:
            failure = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            if self.world_size > 1:
                with self._waiting(name):
                    self._broadcast(_encode({"failed": failure, "name": name}, name))
            raise
        if self.world_size > 1:
            with self._waiting(name):
                self._broadcast(message)
        return _unwrap(message)  # decoded, so that rank 0 sees just what the others see

    def gather(self, value: Value, name: str = "a gathering") -> list[Value]:
        """Every rank's value, in rank order, on every rank."""
        # Encoded in a world of one as well: what works there must work, and look the same, on several ranks.
        return [json.loads(message) for message in self.rendezvous(name, _encode(value, name))]

    def rendezvous(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Exchange bytes among all ranks; returns every rank's payload in rank order once all have arrived."""
        if not isinstance(payload, bytes):
            raise TypeError(f"rendezvous {tag!r}: the payload must be bytes, got {type(payload).__name__}")
        if self.world_size == 1:
            return [payload]
        with self._waiting(tag):
            blocks = self._all_gather(_block(payload))
            sizes = [_size(block) for block in blocks]
            if max(sizes) <= INLINE_BYTES:
                return [block[_HEADER : _HEADER + size] for block, size in zip(blocks, sizes, strict=True)]
            parts = self._all_gather(payload.ljust(max(sizes), b"\0"))
            return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def any(self, value: bool, name: str = "whether any rank wants to") -> bool:
        return any(self.gather(bool(value), name))

    def all(self, value: bool, name: str = "whether all ranks want to") -> bool:
        return all(self.gather(bool(value), name))

    def barrier(self, name: str = "a barrier") -> None:
        """Return once every rank has arrived here."""
        self.rendezvous(name)

    def explain(self, error: RuntimeError, name: str) -> Exception:
        """What a failure of the data plane means to a user; any other error as it is."""
        if self.world_size == 1:
            return error
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            seen = [f"rank {rank} at {last!r}" for rank in range(self.world_size) if (last := self._last_wait(rank)[1])]
            return RankMissing(
                f"{name} did not come together within {self.timeout:g} s: a rank did not take part. "
                f"Last heard of: {', '.join(seen) or 'nobody'}. Look at the logs of the other ranks; "
                "launch.timeout sets the limit"
            )
        if any(sign in text for sign in LOST_PEER):
            return PeerLost(f"lost the connection to another rank in {name}")
        return error

    def leave(self) -> None:
        """Close all connections; the last thing a rank does."""
        if self.world_size > 1 and dist.is_initialized():
            settle()
            dist.destroy_process_group()

    def _all_gather(self, block: bytes) -> list[bytes]:
        mine = _tensor(block)
        blocks = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(blocks, mine, group=self._control)
        return [each.numpy().tobytes() for each in blocks]

    def _broadcast(self, message: bytes) -> bytes:
        block = _tensor(_block(message))
        dist.broadcast(block, src=0, group=self._control)
        first = block.numpy().tobytes()
        size = _size(first)
        if size <= INLINE_BYTES:
            return first[_HEADER : _HEADER + size]
        whole = _tensor(message.ljust(size, b"\0"))
        dist.broadcast(whole, src=0, group=self._control)
        return whole.numpy().tobytes()

    @contextlib.contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """Say in the store where this rank waits, and turn a failed wait into an error that names the absent."""
        self._waits += 1
        self._report_wait(name)
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - began
            if waited >= self.timeout * 0.95:
                raise RankMissing(self._who_is_missing(name, waited)) from None
            raise PeerLost(
                f"lost the connection to another rank while waiting for {name!r}: {_first_line(error)}"
            ) from None

    def _report_wait(self, name: str) -> None:
        # Only for the message after a time-out: a store that is gone (its launcher died) must not stop a clean save.
        try:
            if self._store is not None:
                self._store.set(f"waits/{self.rank}", json.dumps([self._waits, name]))
        except RuntimeError:
            self._store = None

    def _who_is_missing(self, name: str, waited: float) -> str:
        here, missing = [], []
        for rank in range(self.world_size):
            count, last = self._last_wait(rank)
            if count >= self._waits:
                here.append(rank)
            else:
                missing.append(f"rank {rank} (last seen at {last!r})" if last else f"rank {rank} (never seen)")
        return (
            f"waited {waited:.0f} s for {name!r} (limit {self.timeout:g} s). "
            f"Did not arrive: {', '.join(missing) or 'unknown'}. Arrived: {', '.join(map(str, here)) or 'none'}. "
            "Look at the log of the rank that is missing; launch.timeout sets the limit"
        )

    def _last_wait(self, rank: int) -> tuple[int, str]:
        with contextlib.suppress(Exception):
            if self._store.check([f"waits/{rank}"]):
                count, name = json.loads(self._store.get(f"waits/{rank}"))
                return int(count), str(name)
        return 0, ""


def settle() -> None:
    """Wait, without Python's lock, for the threads of a group to let go of their last tensors.

    Gloo's destructor joins its threads while it holds that lock. A thread that still has a tensor of Python's to
    release needs it too, and both would wait for ever.
    """
    time.sleep(_SETTLE_SECONDS)


def join(topology: Topology, runtime: Runtime, join_timeout: float, timeout: float) -> Group:
    """Meet all other ranks, with explicit rank, world size, address and limit; the last rank to come completes it."""
    rank, world_size = topology.place.rank, topology.world_size
    if world_size == 1:
        return Group(0, 1, timeout)
    store = _meet(topology, join_timeout)
    limit = timedelta(seconds=timeout)
    extra: dict[str, Any] = {"device_id": runtime.device} if runtime.backend == "nccl" else {}
    dist.init_process_group(runtime.backend, store=store, rank=rank, world_size=world_size, timeout=limit, **extra)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise LaunchError(
            f"this process was started as rank {rank} of {world_size}, but the group says it is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}"
        )
    control = dist.new_group(backend="gloo", timeout=limit)
    return Group(rank, world_size, timeout, store, control)


def _meet(topology: Topology, join_timeout: float) -> Any:
    rank, world_size = topology.place.rank, topology.world_size
    serves = rank == 0 and not topology.launcher_serves_store
    try:
        tcp = TCPStore(
            topology.address,
            topology.port,
            is_master=serves,
            timeout=timedelta(seconds=join_timeout),
            wait_for_workers=False,
        )
    except (RuntimeError, dist.DistError) as error:
        if serves and "use" in str(error):
            raise LaunchError(port_in_use(topology.port)) from None
        raise RankMissing(
            f"nobody answers at {topology.address}:{topology.port} within {join_timeout:g} s, where "
            f"rank 0 or the launcher should be. Check the address, the port and the firewall: {_first_line(error)}"
        ) from None
    store = PrefixStore(f"lockstep/attempt-{topology.attempt}", tcp)
    store.set(f"joined/{rank}", topology.place.host)
    names = [f"joined/{each}" for each in range(world_size)]
    try:
        store.wait(names, timedelta(seconds=join_timeout))
    except (RuntimeError, dist.DistError):
        missing = [each for each, name in enumerate(names) if not store.check([name])]
        raise RankMissing(
            f"waited {join_timeout:g} s for all {world_size} ranks to join. "
            f"Did not arrive: rank {', '.join(map(str, missing))}. Look at their logs; "
            "launch.join_timeout sets the limit"
        ) from None
    return store


def port_in_use(port: int) -> str:
    return (
        f"launch.port: port {port} is already in use on this host. "
        "Leave launch.port out and a free one is picked, or name another"
    )


def _block(payload: bytes) -> bytes:
    """The length of a payload and its beginning, in a block whose size every rank knows."""
    return (len(payload).to_bytes(_HEADER, "little") + payload[:INLINE_BYTES]).ljust(_HEADER + INLINE_BYTES, b"\0")


def _size(block: bytes) -> int:
    return int.from_bytes(block[:_HEADER], "little")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _encode(value: Any, name: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise TypeError(
            f"{name!r}: only plain data (None, bool, numbers, text, lists, mappings) can go to other ranks: {error}"
        ) from None


def _unwrap(message: bytes) -> Any:
    answer = json.loads(message)
    if "failed" in answer:
        raise RankZeroFailed(f"rank 0 failed at {answer['name']!r}: {answer['failed']['error']}")
    return answer["value"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
