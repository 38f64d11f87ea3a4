"""Messages and files between the ranks and the driver, through one small actor on the driver's node.

For nodes that do not see the driver's disk, the actor also serves the run's folder: `NodeSync` on such a node pulls
what a run needs, and pushes what it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import delete_old
from lockstep.config.schema import Keep
from lockstep.distributed.topology import Place
from lockstep.mirror.sync import CHECKPOINTS, FolderSync
from lockstep.record.run_folder import Anchor
from lockstep.record.timeline import LAGS_FILE, LIVE_FILE, TIMELINE_FILE

Facts = dict[str, Any]

# The mailbox has nothing else to do: without an answer for so long, the cluster counts as lost.
ANSWER_SECONDS = 60.0
_PUSH_SECONDS = 1.0
_CHUNK = 8 * 1024 * 1024
_RANK_ZERO_FILES = (
    "metrics.jsonl", "summary.json", "topology.json", "tensorboard", "loggers", "samples", "code",
    TIMELINE_FILE, LIVE_FILE, LAGS_FILE,
)  # fmt: skip


class Mailbox:
    """Holds rank 0's output and facts of all ranks for the driver, and its request to leave for the ranks."""

    def __init__(self, folder: str) -> None:
        self._store = FolderStore(folder)
        self._lines: list[str] = []
        self._facts: dict[int, Facts] = {}
        self._leave: str | None = None

    async def tell(self, rank: int, lines: list[str], facts: Facts) -> str | None:
        """Returns why to save and leave, if the driver asks for it."""
        self._lines += lines
        if "host" in facts:  # the first of a new attempt
            self._facts[rank] = {}
        self._facts.setdefault(rank, {}).update(facts)
        return self._leave

    async def take_lines(self) -> tuple[list[str], bool]:
        """Returns the lines since the last call, and whether a rank has begun."""
        lines, self._lines = self._lines, []
        return lines, bool(self._facts)

    async def take_facts(self) -> dict[int, Facts]:
        """Returns what ranks told of an attempt that is over."""
        facts, self._facts = self._facts, {}
        return facts

    async def ask_to_leave(self, reason: str) -> None:
        self._leave = reason

    async def folder_store(self, what: str, *arguments: Any) -> Any:
        if what.startswith("_"):
            raise ValueError(f"{what!r} is not for ranks to call")
        return await asyncio.to_thread(getattr(self._store, what), *arguments)  # disks take their time


class FolderStore:
    """The run's folder on the driver's disk. Paths are relative to it and never lead out of it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).resolve()
        self._anchor = Anchor(self._folder)
        self._checkpoints = CheckpointStorage(self._folder / CHECKPOINTS, self._anchor.check)

    def checkpoint(self) -> str | None:
        """Returns the path of the newest whole checkpoint. Raises CheckpointError if there are some and none is."""
        step = self._checkpoints.newest_good()
        if step is None and (there := self._checkpoints.steps()):
            raise self._checkpoints.none_usable({each: str(self._checkpoints.problem(each)) for each in there})
        return None if step is None else str(self._checkpoints.path(step).relative_to(self._folder))

    def set_aside_after(self, step: int | None) -> None:
        self._checkpoints.set_aside_after(step)

    def files(self, path: str) -> list[tuple[str, int]]:
        """Returns a file, or all files below a folder, with their sizes."""
        return [(str(each.relative_to(self._folder)), each.stat().st_size) for each in _files(self._inside(path))]

    def read(self, path: str, offset: int, size: int) -> bytes:
        with self._inside(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def write(self, path: str, offset: int, data: bytes) -> None:
        place = self._inside(path)
        self._anchor.check()  # a folder that was moved is not created again
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(data)

    def rename(self, path: str, final: str) -> None:
        place = self._inside(final)
        shutil.rmtree(place, ignore_errors=True)
        self._inside(path).rename(place)

    def retain(self, keep: Keep) -> None:
        delete_old(self._checkpoints, max(self._checkpoints.steps(), default=0), keep)

    def _inside(self, path: str) -> Path:
        place = (self._folder / path).resolve()
        if place == self._folder or not place.is_relative_to(self._folder):
            raise ValueError(f"{path!r} is not below the run's folder")
        return place


class NodeSync:
    """Keeps a folder on this node and the one of the same name on the driver's disk alike."""

    def __init__(self, ask: Callable[..., Any], folder: Path, place: Place, keep: Keep) -> None:
        """`ask` calls a method of the FolderStore."""
        self._folder, self._place = folder, place
        self._sync = FolderSync(_DriverFolder(ask), folder, self._files, keep if place.rank == 0 else None)

    def pull(self) -> None:
        """Brings here the newest checkpoint, and the files that still grow."""
        if self._place.local_rank == 0:
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
            self._sync.pull_checkpoint()
        self._sync.pull_files(self._paths())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Pushes what is new, every second and at the end."""
        with contextlib.closing(self._sync):
            try:
                with repeated(self.push, _PUSH_SECONDS, "lockstep-folder-sync"):
                    yield
            except BaseException:
                with contextlib.suppress(Exception):  # the error is the news
                    self.push()
                raise
            self.push()

    def push(self) -> None:
        self._sync.push()

    def _paths(self) -> list[str]:
        return [f"logs/rank-{self._place.rank}.log", *(_RANK_ZERO_FILES if self._place.rank == 0 else ())]

    def _files(self) -> Iterator[Path]:
        for path in self._paths():
            yield from _files(self._folder / path)


class _DriverFolder:
    """A Remote: the folder on the driver's disk, in pieces that fit into a message."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        found = self._ask("checkpoint")  # the newest, and verified: a driver that resumes another has set it aside
        return [] if found is None else [found]

    def files(self, path: str) -> list[tuple[str, int]]:
        return [(name, size) for name, size in self._ask("files", path)]

    def fetch(self, path: str, size: int, place: Path) -> None:
        with place.open("wb") as file:
            for offset in range(0, size, _CHUNK):
                file.write(self._ask("read", path, offset, min(_CHUNK, size - offset)))

    def send(self, file: Path, path: str) -> None:
        with file.open("rb") as stream:
            self._ask("write", path, 0, stream.read(_CHUNK))
            while data := stream.read(_CHUNK):
                self._ask("write", path, stream.tell() - len(data), data)

    def publish(self, folder: Path, path: str) -> None:
        arriving = f"{CHECKPOINTS}/.partial-{folder.name}-sync"
        for file in folder.iterdir():
            self.send(file, f"{arriving}/{file.name}")
        self._ask("rename", arriving, path)

    def retain(self, keep: Keep) -> None:
        self._ask("retain", keep)

    def set_aside_after(self, step: int | None, branch: str) -> None:
        self._ask("set_aside_after", step)


@contextlib.contextmanager
def repeated(action: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Calls an action regularly in a thread while the context is open; one that fails is tried again the next time."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            with contextlib.suppress(Exception):
                action()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(ANSWER_SECONDS)


def ask_mailbox(mailbox: Any) -> Callable[..., Any]:
    return lambda what, *arguments: ray.get(mailbox.folder_store.remote(what, *arguments), timeout=ANSWER_SECONDS)


def _files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(each for each in place.rglob("*") if each.is_file())
