"""Writes checkpoints, one at a time, while training waits or in the background.

Rank 0 writes where it has whole tensors (`WholeWriter`); sharded_writer.py is for tensors that are spread over ranks.
The digest of a file is that of the bytes on their way to the disk: nothing that was written is read again.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep import version
from lockstep.checkpoint import codec, manifest, tensor_file
from lockstep.checkpoint.manifest import MODEL_FILE, STATE_FILE, TREE_FILE
from lockstep.checkpoint.retention import best_first, to_delete
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.plain import finite, naming
from lockstep.config.schema import Checkpoint, Keep
from lockstep.distributed.activity import Activity
from lockstep.errors import CheckpointError

logger = logging.getLogger(__name__)

# How much longer others wait for a rank than its own limit, so that it is the one to report what held it up.
_REPORT_SECONDS = 30.0
# How long a rank that failed waits for the write under way: less than its launcher gives it to end by itself.
_GIVE_UP_SECONDS = 3.0
# What is written, and then digested while the processor still has it in its cache.
_PIECE_BYTES = 4 * 1024 * 1024


class Writer(abc.ABC):
    """Copies state to the host and writes it to the disk, within a limit, since a disk may never answer."""

    def __init__(self, store: CheckpointStorage, settings: Checkpoint, limit: float, activity: Activity) -> None:
        """`limit` is the longest that a save may hold up the next one, or the end of the run."""
        self.store, self._keep, self._asynchronous = store, settings.keep, settings.asynchronous
        self._longest, self._activity = limit, activity
        self._buffers: dict[str, Tensor] = {}
        self._before_first: Callable[[], Any] | None = None
        self._writing: concurrent.futures.Future[None] | None = None
        self.last_step: int | None = None

    def save(self, step: int, model: Mapping[str, Tensor], state: Any, about: Mapping[str, Any]) -> None:
        """Takes the snapshot now; writes it here, or in the background where saving is asynchronous."""
        self.finish()  # one at a time: a disk slower than the interval holds training back, and never piles up
        with self._within_limit():
            write = self._take(step, model, state, {**about, "created": now(), "versions": versions()})
            self.last_step = step
            if self._waits:
                write()
            # Training never waits for old checkpoints to be deleted: a disk may take as long for that as for writing.
            tidy = functools.partial(self._tidy, step)
            self._start([tidy] if self._waits else [write, tidy])

    @abc.abstractmethod
    def _take(self, step: int, model: Mapping[str, Tensor], state: Any, about: Mapping[str, Any]) -> Callable[[], None]:
        """Copies what is to be saved; returns what writes it."""

    @property
    def _waits(self) -> bool:
        return not self._asynchronous

    def _tidy(self, step: int) -> None:
        delete_old(self.store, step, self._keep)

    def resume_from(self, step: int | None) -> None:
        """The run was restored from this step, or begins anew: its first save sets aside what is newer than that."""
        self._before_first = functools.partial(self.store.set_aside_after, step)

    def check(self) -> None:
        """Raises what a background write raised, as soon as it is known."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Waits for the write under way; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            with self._within_limit():
                writing.result(timeout=self._longest)
        except concurrent.futures.TimeoutError:
            raise CheckpointError(
                f"{self.store.folder}: writing a checkpoint has taken more than {self._longest:g} s; "
                "the disk or the network file system does not answer. timeouts.checkpoint sets the limit"
            ) from None

    def give_up(self) -> None:
        """Gives a write under way a few seconds to end, in a run that failed."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing], timeout=min(self._longest, _GIVE_UP_SECONDS))

    def _start(self, work: list[Callable[[], None]]) -> None:
        """Runs functions in a thread that does not hold up the end of the process."""
        writing: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                for each in work:
                    each()
            except BaseException as error:
                writing.set_exception(error)
            else:
                writing.set_result(None)

        threading.Thread(target=run, name="lockstep-checkpoint", daemon=True).start()
        self._writing = writing

    def _create(self, step: int, size: int, fill: Callable[[Path], None]) -> Path:
        if self._before_first is not None:
            self._before_first()
            self._before_first = None
        return self.store.create(step, size, fill)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor to a host buffer that is kept from save to save: fresh memory costs more than the copy."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    def _within_limit(self) -> contextlib.AbstractContextManager[None]:
        return self._activity.within("writing a checkpoint", limit=self._longest + _REPORT_SECONDS)


class WholeWriter(Writer):
    """For rank 0, which has whole tensors."""

    def __init__(
        self,
        store: CheckpointStorage,
        settings: Checkpoint,
        limit: float = 1800.0,
        activity: Activity | None = None,
        to_host: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> None:
        """`to_host` fetches tensors that cannot be copied from where they are, all at once."""
        super().__init__(store, settings, limit, activity or Activity())
        self._to_host = to_host

    def _take(self, step: int, model: Mapping[str, Tensor], state: Any, about: Mapping[str, Any]) -> Callable[[], None]:
        model, tree, tensors = self.fetch(model, state)
        tensor_file.check_types("model", model)
        tensor_file.check_types("state", tensors)
        shared = codec.shared_names(model)
        snapshot = Snapshot(
            step=step,
            model={name: self._copy(f"model/{name}", each) for name, each in model.items() if name not in shared},
            shared=shared,
            tree=tree,
            tensors={name: self._copy(f"state/{name}", each) for name, each in tensors.items()},
            about=about,
        )
        wait_for_copies([*model.values(), *tensors.values()])
        return lambda: self._write(snapshot)

    def fetch(self, model: Mapping[str, Tensor], state: Any) -> tuple[codec.Tensors, Any, codec.Tensors]:
        """Brings what is to be saved off the device; where tensors are spread over hosts, all of them call this."""
        tree, tensors = codec.pack(state)
        fetched = iter(self._to_host([*model.values(), *tensors.values()]))
        return {name: next(fetched) for name in model}, tree, {name: next(fetched) for name in tensors}

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        path = self._create(snapshot.step, snapshot.bytes, lambda folder: _write_files(folder, snapshot))
        logger.info(
            "saved %s (%.1f MB in %.2f s)", path.name, snapshot.bytes / 1e6, time.monotonic() - began,
            extra={"repeats": "saved"},
        )  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds, on the host and apart from the training that goes on."""

    step: int
    model: codec.Tensors
    tree: Any
    tensors: codec.Tensors
    shared: Mapping[str, str] = field(default_factory=dict)  # tied names that model does not repeat
    about: Mapping[str, Any] = field(default_factory=dict)  # what the manifest says beside the files

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in [*self.model.values(), *self.tensors.values()])


def write(storage: CheckpointStorage, snapshot: Snapshot) -> Path:
    return storage.create(snapshot.step, snapshot.bytes, lambda folder: _write_files(folder, snapshot))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions() -> dict[str, str]:
    """The versions that a manifest names."""
    return {"lockstep": version.installed(), "torch": str(torch.__version__)}


def other_versions(about: Mapping[str, Any]) -> str | None:
    """Returns what wrote a checkpoint and what runs here, where they differ."""
    written, here = about.get("versions"), versions()
    if written is None or written == here:
        return None
    shown = [f"Lockstep {each.get('lockstep')} and torch {each.get('torch')}" for each in (written, here)]
    return f"written by {shown[0]}; this is {shown[1]}"


def delete_old(store: CheckpointStorage, step: int, keep: Keep) -> None:
    """Deletes what need not be kept now that a step is saved, and has `best` lead to the best of what is."""
    # Whatever is newer was put there by somebody else: it is not weighed, or it would cost what was just saved.
    ours = [each for each in store.saved() if each.step <= step]
    best = best_first([each for each in ours if each.whole], keep.mode) if keep.best else []
    store.link_best(best[0].step if best else None)
    for old in to_delete(ours, keep.last, keep.best, keep.mode):
        store.delete(old)


def wait_for_copies(tensors: list[Tensor]) -> None:
    """Copies from a GPU are queued; training must not overwrite what they still read."""
    if any(each.is_cuda for each in tensors):
        torch.cuda.synchronize()


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    with NewFile(folder / MODEL_FILE) as model:
        tensor_file.write(model.write, snapshot.model, {"format": "pt"})
    with NewFile(folder / STATE_FILE) as state:
        tensor_file.write(state.write, snapshot.tensors)
    files = {each.path.name: each.described() for each in (model, state)}
    files |= write_text(folder, TREE_FILE, json.dumps({"shared": dict(snapshot.shared), "state": snapshot.tree}))
    manifest.write(folder, finite({"step": snapshot.step, **snapshot.about, "files": files}))


def write_text(folder: Path, name: str, text: str) -> dict[str, Any]:
    """Writes a small file; returns what the manifest says of it."""
    with NewFile(folder / name) as file:
        file.write(memoryview(text.encode()))
    return {name: file.described()}


class NewFile:
    """A file that knows its size and digest, and is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream, self._digest, self._size = path.open("xb"), hashlib.sha256(), 0

    def write(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            with naming(self.path):
                self._stream.write(piece)
            self._digest.update(piece)
        self._size += len(data)

    def described(self) -> dict[str, Any]:
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with naming(self.path), self._stream:
            if error is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
