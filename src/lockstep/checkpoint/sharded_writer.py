"""Writes checkpoints of tensors that are spread over ranks: every rank writes the blocks that it has.

Where all ranks are on one host, they write into the same files, which hold whole tensors. Ranks on several hosts write
a file each, with pieces of tensors: network file systems do not promise that hosts may write to one file at the same
time. Every rank reads back what it wrote, and its digests are of that. Training waits while every rank copies the
blocks that it is going to write to its host's memory, and for nothing else. The rest is done by a thread of each rank.
These threads talk through the store (ShardReports), since the training threads need the ranks' groups:

    rank 0: makes the folder and the files, says "ready"      others: wait for it
    all: write their blocks, read them back, and report the digests, or what went wrong
    rank 0: waits for all reports, writes the manifest, renames the folder, says "done", or why not
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.checkpoint import codec, manifest, ranges, tensor_file
from lockstep.checkpoint import layout as layouts
from lockstep.checkpoint.layout import Block, File, Item, Layout
from lockstep.checkpoint.manifest import INDEX_FILE, PARTS_FILE, TREE_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Writer, wait_for_copies, write_text
from lockstep.config.plain import finite
from lockstep.config.schema import Checkpoint
from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError
from lockstep.strategy.slices import slice_of

logger = logging.getLogger(__name__)

# How long rank 0 waits for others to have heard how it ended, before it may leave with the store.
_HEARD_SECONDS = 5.0


@dataclass(frozen=True)
class _Held:
    """This rank's block of a tensor, in the form in which a file has it."""

    item: Item
    tensor: Tensor
    block: Block


@dataclass(frozen=True)
class _Save:
    """One checkpoint on its way to the disk."""

    step: int
    layout: Layout
    copies: Mapping[str, Tensor]  # the blocks that this rank writes, by the key of their tensor
    tree: Any  # for rank 0: what is not tensors
    shared: Mapping[str, str]
    about: Mapping[str, Any]
    reports: ShardReports


class ShardedWriter(Writer):
    """One rank's part in writing the checkpoints of a run. All ranks call it alike."""

    def __init__(self, store: CheckpointStorage, settings: Checkpoint, limit: float, group: Group) -> None:
        super().__init__(store, settings, limit + 2 * LONGER_SECONDS, group.activity)
        self._group, self._limit = group, limit
        self._saves = 0
        self._agreed: tuple[list[str], Layout, dict[str, str]] | None = None
        self._sees: list[bool] = []
        self._apart = False  # whether ranks on several hosts write

    def save(self, step: int, model: Mapping[str, Tensor], state: Any, about: Mapping[str, Any]) -> None:
        if not self._sees:
            self._sees = self.store.who_sees(self._group)
            boot = Path("/proc/sys/kernel/random/boot_id")  # tells hosts of one name apart
            host = [socket.gethostname(), boot.read_text(encoding="utf-8") if boot.exists() else ""]
            hosts = self._group.gather(host, "the hosts that write a checkpoint")
            # Rank 0 writes for those that do not see its folder.
            self._apart = len({tuple(each) for each, sees in zip(hosts, self._sees, strict=True) if sees}) > 1
        super().save(step, model, state, about)

    @property
    def _waits(self) -> bool:
        # Ranks that do not see the folder send their blocks to rank 0 through the group: training waits for that.
        return super()._waits or not all(self._sees)

    def _tidy(self, step: int) -> None:
        if self._group.rank == 0:
            super()._tidy(step)

    # In the training thread

    def _take(self, step: int, model: Mapping[str, Tensor], state: Any, about: Mapping[str, Any]) -> Callable[[], None]:
        tree, tensors = codec.pack(state)
        held = {**_held(layouts.MODEL, model), **_held(layouts.STATE, tensors)}
        layout, shared = self._agree(held, model)
        mine = {
            item.key: self._copy(item.key, held[item.tensor].tensor)
            for file in layout.files
            for item in file.items
            if self._group.rank in layout.blocks[item.key]
        }
        for name in set(self._buffers) - set(mine):
            del self._buffers[name]
        wait_for_copies([each.tensor for each in held.values()])
        self._saves += 1
        reports = ShardReports(self._group, f"checkpoint/{self._saves}", self._limit)
        saving = _Save(step, layout, mine, tree, shared, about, reports)
        return functools.partial(self._lead if self._group.rank == 0 else self._follow, saving)

    def _agree(self, held: Mapping[str, _Held], model: Mapping[str, Tensor]) -> tuple[Layout, dict[str, str]]:
        """Returns the layout that all ranks agree on, a new one where anything has changed on any of them."""
        mine = [each for each in held.values() if each.item.spread or self._group.rank == 0]
        text = json.dumps([[each.item.plain(), each.block] for each in mine])
        digests = self._group.gather(hashlib.sha256(text.encode()).hexdigest(), "the tensors to save")
        if self._agreed is not None and self._agreed[0] == digests:
            return self._agreed[1], self._agreed[2]
        kept = {name: held[f"{layouts.MODEL}/{name}"].tensor for name in model}
        shared = self._group.agree(lambda: codec.shared_names(kept), "which weights are tied")  # they are saved once
        tied = {f"{layouts.MODEL}/{name}" for name in shared}
        items: list[Item] = []  # of rank 0, which all others must have as far as they are spread
        had: list[list[Block]] = []
        for rank, answer in enumerate(self._group.gather(text, "what each rank has of the tensors to save")):
            given = [(Item.from_plain(plain), block) for plain, block in json.loads(answer)]
            here = {item.key: (item, Block(*map(tuple, block))) for item, block in given if item.key not in tied}
            items = items or [item for item, _ in here.values()]
            spread = {item.key: item for item in items if item.spread}
            problem = _difference({key: item for key, (item, _) in here.items() if item.spread}, spread)
            if problem:
                raise CheckpointError(f"{self.store.folder}: no checkpoint can be written: on rank {rank} {problem}")
            had.append([here[key][1] for key in spread])
        self._agreed = (digests, layouts.make(items, had, self._apart), shared)
        return self._agreed[1], self._agreed[2]

    # In the background, or in the training thread where that waits

    def _lead(self, saving: _Save) -> None:
        began, reports = time.monotonic(), saving.reports
        try:
            path = self._create(saving.step, saving.layout.bytes, lambda folder: self._fill(folder, saving))
        except BaseException as error:
            with contextlib.suppress(Exception):  # a store that is gone must not hide what went wrong before
                reports.tell("done", str(error) or type(error).__name__)
            raise
        reports.tell("done")
        logger.info("saved %s (%.1f MB by %d ranks in %.2f s)", path.name, saving.layout.bytes / 1e6,
                    self._group.world_size, time.monotonic() - began, extra={"repeats": "saved"})  # fmt: skip
        reports.wait_until_heard(_HEARD_SECONDS)

    def _fill(self, folder: Path, saving: _Save) -> None:
        """For rank 0: writes all files of a checkpoint, together with the other ranks."""
        for file in saving.layout.files:
            if file.shared:
                _make(folder / file.name, file)
        saving.reports.tell("ready", folder.name)
        digests = {0: self._write_blocks(folder, saving, 0, saving.copies)}
        received: dict[int, dict[str, str]] = {}
        for rank, sees in enumerate(self._sees):
            if not sees:
                copies, received[rank] = self._receive(saving, rank)
                digests[rank] = self._write_blocks(folder, saving, rank, copies)
        for rank, reported in saving.reports.collect(self.store.path(saving.step)).items():
            if received.get(rank, reported) != reported:
                raise OSError(errno.EIO, f"what rank {rank} sent is not what was received")
            digests.setdefault(rank, reported)
        parts = saving.layout.parts(self._group.world_size)
        files = write_text(folder, PARTS_FILE, json.dumps(parts, separators=(",", ":")) + "\n")
        files |= write_text(folder, INDEX_FILE, json.dumps(saving.layout.index(), indent=2) + "\n")
        files |= write_text(folder, TREE_FILE, json.dumps({"shared": saving.shared, "state": saving.tree}))
        for file in saving.layout.files:
            by_rank = {rank: digests[int(rank)][file.name] for rank in parts[file.name]}
            files[file.name] = {"bytes": file.size, "sha256": by_rank}
        about = {"format": manifest.BY_OWNERS, "step": saving.step, **saving.about, "files": files}
        manifest.write(folder, finite(about))

    def _follow(self, saving: _Save) -> None:
        reports = saving.reports
        what, name = reports.wait_for("made the files to write to", "ready", "done")
        if what == "ready":
            try:
                rank, folder = self._group.rank, self.store.folder / name
                sees = self._sees[rank]
                reports.report(self._write_blocks(folder, saving, rank, saving.copies) if sees else self._send(saving))
            except OSError as error:
                reports.report_error(error)
            except BaseException as error:
                reports.report_error(OSError(errno.EIO, f"{type(error).__name__}: {error}"))
        _, problem = reports.wait_for("said whether the checkpoint is whole", "done")
        reports.tell(f"heard/{self._group.rank}")
        if problem:
            raise CheckpointError(problem)

    def _write_blocks(self, folder: Path, saving: _Save, rank: int, copies: Mapping[str, Tensor]) -> dict[str, str]:
        """Writes the blocks of a rank; returns the digests of its parts of the files."""
        files, digests = saving.layout.files, dict[str, str]()
        first = rank * len(files) // self._group.world_size  # each rank begins with another file
        for file in [*files[first:], *files[:first]]:
            mine = saving.layout.written_by(rank, file)
            if not mine and rank != file.owner:
                continue
            if saving.reports.first("done"):  # it failed elsewhere
                return digests
            if not file.shared:
                _make(folder / file.name, file)
            found = hashlib.sha256(file.header if rank == file.owner else b"")
            with _writing(folder / file.name) as descriptor:
                for item, there in mine:
                    ranges.put(descriptor, there, tensor_file.memory(copies[item.key]), found.update)
                os.fsync(descriptor)
            digests[file.name] = _read_back(folder / file.name, file, rank, saving.layout)
            if digests[file.name] != found.hexdigest():
                raise OSError(errno.EIO, "what was read back is not what was written", str(folder / file.name))
        return digests

    # Ranks whose host does not see the folder

    def _send(self, saving: _Save) -> dict[str, str]:
        """Sends this rank's blocks to rank 0, when it is its turn; returns the digest of all that was sent."""
        rank, found = self._group.rank, hashlib.sha256()
        if saving.reports.wait_for("asked for what this rank has", f"turn/{rank}", "done")[0] == "done":
            return {}  # rank 0 has failed before
        for tensor in saving.copies.values():
            for piece in torch.split(tensor.reshape(-1).view(torch.uint8), ranges.PIECE_BYTES):
                found.update(tensor_file.memory(piece))
                self._group.send(piece, 0, f"the checkpoint of step {saving.step}, as rank {rank} sends it")
        return {"sent": found.hexdigest()}

    def _receive(self, saving: _Save, rank: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """For rank 0: returns the blocks that another rank sends, and their digest."""
        saving.reports.tell(f"turn/{rank}")
        copies, found = dict[str, Tensor](), hashlib.sha256()
        for item, there in (each for file in saving.layout.files for each in saving.layout.written_by(rank, file)):
            copies[item.key] = torch.empty(ranges.total(there), dtype=torch.uint8)
            for piece in torch.split(copies[item.key], ranges.PIECE_BYTES):
                self._group.receive(piece, rank, f"the checkpoint of step {saving.step}, as rank {rank} sends it")
                found.update(tensor_file.memory(piece))
        return copies, {"sent": found.hexdigest()}


@contextlib.contextmanager
def _writing(path: Path, flags: int = 0) -> Iterator[int]:
    # For writing alone: a client of NFS that may read sends whole pages, with what it thinks is beside.
    descriptor = os.open(path, os.O_WRONLY | flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_back(path: Path, file: File, rank: int, layout: Layout) -> str:
    """Returns the digest of what a rank wrote, from the disk as far as the system drops its copy."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return ranges.digest(descriptor, layout.ranges_of(rank, file))
    except EOFError:
        raise OSError(errno.EIO, "it is shorter than what was written", str(path)) from None
    finally:
        os.close(descriptor)


def _held(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, _Held]:
    held = {}
    for name, tensor in tensors.items():
        found = slice_of(tensor)
        local = tensor if found is None else found.tensor
        tensor_file.check_types(kind, {name: local})
        entry = tensor_file.entry_of(name, local.dtype, local.shape if found is None else found.shape)
        stored = tensor_file.stored_form(local)
        offset = (0,) * stored.dim() if found is None else (*found.offset, *((0,) if entry.pairs else ()))
        item = Item(kind, entry, found is not None)
        held[item.key] = _Held(item, stored, Block(offset, tuple(stored.shape)))
    return held


def _difference(given: Mapping[str, Item], wanted: Mapping[str, Item]) -> str | None:
    """Returns why a rank's sharded tensors do not fit rank 0's."""
    for key in [*given, *wanted]:
        if key not in wanted or key not in given:
            what = f"has {key!r}, which rank 0 has not" if key in given else f"lacks {key!r}, which rank 0 has"
            return f"the state {what}: it must have the same tensors on all ranks"
        if given[key] != wanted[key]:
            return f"{key!r} is {given[key].plain()[2:]}, and on rank 0 {wanted[key].plain()[2:]}"
    return None


def _make(path: Path, file: File) -> None:
    """Makes a file in its full size, with its header."""
    with _writing(path, os.O_CREAT | os.O_EXCL) as descriptor:
        os.truncate(descriptor, file.size)
        header = memoryview(file.header)
        ranges.put(descriptor, [ranges.Range(0, len(header), len(header), 1)], header, lambda _: None)


Value = TypeVar("Value")

# By how much another rank waits longer for rank 0 than rank 0 does for it.
LONGER_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1


class ShardReports:
    """The messages of one save, under keys that no other save has."""

    def __init__(self, group: Group, prefix: str, limit: float) -> None:
        self._group, self._prefix, self._limit = group, prefix, limit
        self._others = range(1, group.world_size)
        self._deadline = time.monotonic() + limit

    def tell(self, name: str, text: str = "") -> None:
        self._group.publish(f"{self._prefix}/{name}", text)

    def first(self, *names: str) -> tuple[str, str] | None:
        """Returns the first of these messages that is there, with its name."""
        found = self._group.published([f"{self._prefix}/{name}" for name in names])
        return next(((name, text) for name, text in zip(names, found, strict=True) if text is not None), None)

    # Rank 0

    def collect(self, final: Path) -> dict[int, dict[str, str]]:
        """Waits for the digests of all other ranks. Raises what the first of them failed with."""
        found: dict[int, dict[str, str]] = {}

        def look() -> dict[int, dict[str, str]] | None:
            missing = [rank for rank in self._others if rank not in found]
            reports = self._group.published([f"{self._prefix}/report/{rank}" for rank in missing])
            for rank, report in zip(missing, reports, strict=True):
                message = json.loads(report) if report is not None else {}
                if "errno" in message:
                    raise OSError(message["errno"], message["text"])
                if message:
                    found[rank] = dict(message["digests"])
            return found if len(found) == len(self._others) else None

        if self._until(look, self._deadline) is None:
            missing = ranks_text([rank for rank in self._others if rank not in found])
            raise CheckpointError(
                f"{final}: the checkpoint was not written: {missing} did not write the parts within {self._limit:g} s. "
                "Nothing of it was kept; earlier checkpoints are untouched. Look at the log of that rank, and at its "
                "disk or network file system; timeouts.checkpoint sets the limit"
            )
        return found

    def wait_until_heard(self, seconds: float) -> None:
        """Gives the others so long to hear how it ended; then the messages are deleted."""
        keys = [f"{self._prefix}/heard/{rank}" for rank in self._others]
        if self._until(lambda: None not in self._group.published(keys) or None, time.monotonic() + seconds):
            names = [f"{name}/{rank}" for name in ("report", "turn", "heard") for rank in self._others]
            self._group.forget([f"{self._prefix}/{name}" for name in (*names, "ready", "done")])

    # Other ranks

    def wait_for(self, what: str, *names: str) -> tuple[str, str]:
        """Returns the first message of rank 0 that comes of these, with its name; `what` is what it has done then."""
        found = self._until(lambda: self.first(*names), self._deadline + LONGER_SECONDS)
        if found is None:
            raise CheckpointError(
                f"a checkpoint was not written: rank 0 has not {what} within {self._limit:g} s. Look at its log, and "
                "at its disk or network file system; timeouts.checkpoint sets the limit"
            )
        return found

    def report(self, digests: Mapping[str, str]) -> None:
        self.tell(f"report/{self._group.rank}", json.dumps({"digests": digests}))

    def report_error(self, error: OSError) -> None:
        text = error.strerror or str(error)
        place = f", where it writes {Path(error.filename).name}" if error.filename else ""
        message = {
            "errno": error.errno or 0,
            "text": f"rank {self._group.rank} on {socket.gethostname()}: {text}{place}",
        }
        self.tell(f"report/{self._group.rank}", json.dumps(message))

    def _until(self, look: Callable[[], Value | None], deadline: float) -> Value | None:
        """Polls until the deadline. It does not wait in the store, which others use."""
        pause = _PAUSE_SECONDS
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return found
