"""The ranks of a run and their control plane.

Small host messages (agree, gather, barrier, rendezvous) use a separate gloo group beside the data plane, which carries
tensors. Messages are JSON or bytes and are never unpickled. Every wait has a name and a limit. All ranks must wait for
the same thing: if one took another branch, every rank raises OutOfStep; if one never arrives, the error names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from lockstep.distributed import failure, listener
from lockstep.distributed.activity import Activity, Beat, beat_key
from lockstep.distributed.topology import ranks_text
from lockstep.errors import LOST_PEER, BadMessage, OutOfStep, PeerLost, RankMissing, RankZeroFailed

Value = TypeVar("Value")

# A message of at most this size needs one collective; a longer one needs a second.
INLINE_BYTES = 1000
_SIZE_BYTES, _NAME_BYTES = 8, 8
_HEADER = _SIZE_BYTES + _NAME_BYTES
_LONGEST_NAME = 200
_AT_WORK = b"at work"  # from rank 0: keep waiting
_LONGEST_MESSAGE = 2**30
# How long the threads of a group get to release the last message before the group is destroyed.
_SETTLE_SECONDS = 0.05


class Part(NamedTuple):
    """Some of the ranks, in order, and their process group."""

    ranks: list[int]
    handle: Any


class Group:
    """All ranks of a run, as seen by one of them. A world of one uses no network and never waits."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        store: Any = None,
        control: Any = None,
        activity: Activity | None = None,
        connected_at_once: bool = False,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.activity = activity or Activity()
        self._store, self._control = store, control
        self._connected_at_once = connected_at_once
        self._joined_alone = False

    @overload
    def agree(self, value: Callable[[], Value], name: str = ...) -> Value: ...

    @overload
    def agree(self, value: Value, name: str = ...) -> Value: ...

    def agree(self, value: Any, name: str = "a decision") -> Any:
        """Returns rank 0's value on every rank. A callable runs on rank 0 only; if it raises, every rank raises."""
        if self.rank != 0:
            return _unwrap(self._from_rank_0(name, b""), name)
        lost: list[Exception] = []
        try:
            with self._at_work_for_all(name, lost) if callable(value) else contextlib.nullcontext():
                message = _encode({"value": value() if callable(value) else value}, name)
        except Exception as error:
            if lost:
                raise  # the others are gone
            failure = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            self._from_rank_0(name, _encode({"failed": failure, "name": name}, name))
            raise
        if lost:
            raise lost[0]
        self._from_rank_0(name, message)
        return _unwrap(message, name)  # decoded, so that rank 0 sees what the others see

    def gather(self, value: Value, name: str = "a gathering") -> list[Value]:
        """Returns every rank's value, in rank order, on every rank."""
        # Encoded in a world of one as well, so that the same values work on several ranks.
        return [_decoded(message, name) for message in self.rendezvous(name, _encode(value, name))]

    def rendezvous(self, tag: str, payload: bytes = b"", ranks: Sequence[int] | None = None) -> list[bytes]:
        """Exchanges bytes among all ranks and returns the payloads in rank order. A subset of `ranks` is refused."""
        if ranks is not None and sorted(ranks) != list(range(self.world_size)):
            raise ValueError(
                f"rendezvous {tag!r}: ranks={list(ranks)} is not all of the {self.world_size} ranks; all of them must "
                "take part"
            )
        if not isinstance(payload, bytes):
            raise TypeError(f"rendezvous {tag!r}: the payload must be bytes, got {type(payload).__name__}")
        if self.world_size == 1:
            return [payload]
        with self._waiting(tag):
            blocks = self._meet(tag, payload)
            sizes = [_size(block, tag) for block in blocks]
            if max(sizes) <= INLINE_BYTES:
                return [block[_HEADER : _HEADER + size] for block, size in zip(blocks, sizes, strict=True)]
            parts = self._all_gather(payload.ljust(max(sizes), b"\0"))
            return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def any(self, value: bool, name: str = "whether any rank wants to") -> bool:
        return any(self.gather(bool(value), name))

    def all(self, value: bool, name: str = "whether all ranks want to") -> bool:
        return all(self.gather(bool(value), name))

    def barrier(self, name: str = "a barrier") -> None:
        self.rendezvous(name)

    def part(self, parts: Sequence[Sequence[int]]) -> Part:
        """Creates a group for each of these parts of the ranks, and returns the one of this rank."""
        if self.world_size == 1 or len(parts) == 1:
            return Part(list(range(self.world_size)), self._control)
        limit = timedelta(seconds=self.timeout)
        with self.closed_to_others():
            made = [Part(list(part), dist.new_group(list(part), backend="gloo", timeout=limit)) for part in parts]
        return next(each for each in made if self.rank in each.ranks)

    def closed_to_others(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for creating groups, after which their listeners accept no more connections."""
        return listener.closed_behind(self._connected_at_once)

    def join_alone(self, backend: str) -> None:
        """Creates a process group for a world of one, for torch and for collectives in user code."""
        if self.world_size == 1 and not dist.is_initialized():
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            self._joined_alone = True

    def broadcast(self, tensor: torch.Tensor, part: Part, name: str) -> None:
        """Broadcasts a host tensor from the first rank of a part, in place."""
        if len(part.ranks) > 1:
            with self._waiting(name, part.ranks):
                dist.broadcast(tensor, src=part.ranks[0], group=part.handle)

    def explain(self, error: RuntimeError, name: str) -> Exception:
        """Turns a failure of the data plane into an error for the user; returns any other error unchanged."""
        if self.world_size == 1 or failure.local_error(error) is not None:
            return error
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            return RankMissing(
                f"{name} did not come together within {self.timeout:g} s: a rank did not take part. "
                f"Last heard of: {self._last_heard()}. Look at the logs of the other ranks; "
                "timeouts.collective sets the limit"
            )
        if any(sign in text for sign in LOST_PEER):
            return PeerLost(f"lost the connection to another rank in {name}")
        return error

    def meaning(self, error: BaseException) -> BaseException:
        """Returns what an error means that came in user code while the rank waited for others: where a model is spread
        over ranks, they meet in its forward pass."""
        if not isinstance(error, RuntimeError):
            return error
        at, frames = self.activity.now, [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        doing, waits = self.activity.locate(frames[::-1]) or (at.doing, at.waits)
        return self.explain(error, f"{doing} of step {at.step}") if waits else error

    # Texts in the store, for threads that must not take part in collectives.

    def publish(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def published(self, keys: Sequence[str]) -> list[str | None]:
        """Returns the text under each key, or None. Never waits."""
        found = self._store.read_all(list(keys)) if self._store is not None else [None] * len(keys)
        return [None if each is None else bytes(each).decode() for each in found]

    def forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete(key)

    def send(self, tensor: torch.Tensor, to: int, name: str) -> None:
        with self._waiting(name, [self.rank, to]):
            dist.send(tensor, dst=to, group=self._control)

    def receive(self, tensor: torch.Tensor, sender: int, name: str) -> None:
        with self._waiting(name, [self.rank, sender]):
            dist.recv(tensor, src=sender, group=self._control)

    def leave(self) -> None:
        """Closes all connections."""
        if (self.world_size > 1 or self._joined_alone) and dist.is_initialized():
            settle()
            dist.destroy_process_group()

    def leave_alone(self) -> None:
        """Closes the group of a world of one that failed: its process may live on in a notebook."""
        if self._joined_alone:
            self.leave()

    def _from_rank_0(self, name: str, message: bytes) -> bytes:
        if self.world_size == 1:
            return message
        with self.activity.within(repr(name), waits=True):
            while True:
                with self._explaining(name):
                    first = self._meet(name, message)[0]
                    size = _size(first, name)
                    if size > INLINE_BYTES:
                        whole = _tensor(message.ljust(size, b"\0"))
                        dist.broadcast(whole, src=0, group=self._control)
                        return whole.numpy().tobytes()
                found = first[_HEADER : _HEADER + size]
                if found != _AT_WORK:
                    return found

    @contextlib.contextmanager
    def _at_work_for_all(self, name: str, lost: list[Exception]) -> Iterator[None]:
        """On rank 0: while it computes what the others wait for, a thread extends their wait as long as it progresses.

        Progress is a new activity within `timeout` or the activity's own limit. Errors of the thread go to `lost`.
        """
        over = threading.Event()

        def let_others_wait() -> None:
            try:
                while not over.wait(self.timeout / 3):
                    now = self.activity.now
                    if time.monotonic() - now.since > max(now.limit, self.timeout):
                        return
                    with self._explaining(name):
                        self._meet(name, _AT_WORK)
            except Exception as error:
                lost.append(error)

        thread = threading.Thread(target=let_others_wait, name="lockstep-at-work", daemon=True)
        with self.activity.within(repr(name), limit=self.activity.patience):
            if self.world_size > 1:
                thread.start()
            try:
                yield
            finally:
                over.set()
                if self.world_size > 1:
                    with self.activity.within(repr(name), waits=True):
                        thread.join()

    def _meet(self, name: str, payload: bytes) -> list[bytes]:
        """Returns every rank's block, or raises OutOfStep if they wait for different things."""
        blocks = self._all_gather(_block(name, payload))
        if len({block[_SIZE_BYTES:_HEADER] for block in blocks}) > 1:
            names = self._all_gather(name.encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME, b"\0"))
            raise OutOfStep(out_of_step([each.rstrip(b"\0").decode(errors="replace") for each in names]))
        return blocks

    def _all_gather(self, block: bytes) -> list[bytes]:
        mine = _tensor(block)
        blocks = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(blocks, mine, group=self._control)
        return [each.numpy().tobytes() for each in blocks]

    @contextlib.contextmanager
    def _waiting(self, name: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
        with self.activity.within(repr(name), waits=True), self._explaining(name, ranks):
            yield

    @contextlib.contextmanager
    def _explaining(self, name: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if failure.local_error(error) is not None:
                raise
            waited = time.monotonic() - began
            if waited >= self.timeout * 0.95:
                raise RankMissing(self._who_is_missing(name, waited, ranks)) from None
            raise PeerLost(
                f"lost the connection to another rank while waiting for {name!r}: {str(error).strip().splitlines()[0]}"
            ) from None

    def _who_is_missing(self, name: str, waited: float, ranks: Sequence[int] | None = None) -> str:
        here, missing = [self.rank], []
        for rank in (each for each in ranks or range(self.world_size) if each != self.rank):
            beat = self._last_beat(rank)
            if beat is not None and beat.waits and beat.doing == repr(name):
                here.append(rank)
            else:
                missing.append(f"rank {rank} ({beat.describe() if beat else 'never seen'})")
        return (
            f"waited {waited:.0f} s for {name!r} (limit {self.timeout:g} s). "
            f"Did not arrive: {', '.join(missing) or 'unknown'}. Arrived: {', '.join(map(str, sorted(here)))}. "
            "Look at the log of the rank that is missing; timeouts.collective sets the limit"
        )

    def _last_heard(self) -> str:
        beats = {rank: self._last_beat(rank) for rank in range(self.world_size) if rank != self.rank}
        return ", ".join(f"rank {rank} {beat.describe()}" for rank, beat in beats.items() if beat) or "nobody"

    def _last_beat(self, rank: int) -> Beat | None:
        with contextlib.suppress(Exception):  # a store that is gone must not hide what is being reported
            return Beat.decode(self._store.read(beat_key(rank)))
        return None


def out_of_step(names: list[str]) -> str:
    """Returns the message for ranks that wait for different things."""
    at: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        at.setdefault(name, []).append(rank)
    places = "; ".join(f"{ranks_text(ranks)} at {name!r}" for name, ranks in at.items())
    return (
        f"the ranks are not in step: {places}. A call that all ranks must make was made, or left out, by some of "
        "them: look for a branch on the rank (a save, a barrier or a decision on rank 0 only), or for ranks with "
        "different numbers of batches"
    )


def settle() -> None:
    """Waits, without the GIL, for the threads of a group to release their last tensors.

    Gloo's destructor joins its threads while it holds the GIL; a thread that still has to release a tensor needs it.
    """
    time.sleep(_SETTLE_SECONDS)


def _block(name: str, payload: bytes) -> bytes:
    """Packs the length of a payload, the hash of its name and its beginning into a block of fixed size."""
    header = len(payload).to_bytes(_SIZE_BYTES, "little") + hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (header + payload[:INLINE_BYTES]).ljust(_HEADER + INLINE_BYTES, b"\0")


def _size(block: bytes, name: str) -> int:
    size = int.from_bytes(block[:_SIZE_BYTES], "little")
    if size > _LONGEST_MESSAGE:
        raise BadMessage(f"a rank announced {size} bytes for {name!r}; no message between ranks is that long")
    return size


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _encode(value: Any, name: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise TypeError(
            f"{name!r}: only plain data (None, bool, numbers, text, lists, mappings) can go to other ranks: {error}"
        ) from None


def _decoded(message: bytes, name: str) -> Any:
    try:
        return json.loads(message)
    except (ValueError, RecursionError):
        raise BadMessage(f"what came from another rank for {name!r} is not a valid message: {message[:40]!r}") from None


def _unwrap(message: bytes, name: str) -> Any:
    match _decoded(message, name):
        case {"failed": {"error": error}, "name": at}:
            raise RankZeroFailed(f"rank 0 failed at {at!r}: {error}")
        case {"value": value}:
            return value
    raise BadMessage(f"what came from rank 0 for {name!r} is not a valid message: {message[:40]!r}")
