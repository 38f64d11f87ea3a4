"""For a rank whose node has a disk of its own: pulls what it needs of the run's folder, pushes what it makes."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from lockstep.config.schema import Keep
from lockstep.distributed.topology import Place
from lockstep.mirror.sync import CHECKPOINTS, FolderSync
from lockstep.ray.mailbox import ANSWER_SECONDS
from lockstep.record.timeline import LAGS_FILE, LIVE_FILE, TIMELINE_FILE

_INTERVAL = 1.0
_CHUNK = 8 * 1024 * 1024
_RANK_ZERO_FILES = (
    "metrics.jsonl", "summary.json", "topology.json", "tensorboard", "loggers", "samples", "code",
    TIMELINE_FILE, LIVE_FILE, LAGS_FILE,
)  # fmt: skip


def ask_mailbox(mailbox: Any) -> Callable[..., Any]:
    """Something of the run's folder, of the mailbox beside the driver."""
    return lambda what, *arguments: ray.get(mailbox.folder_store.remote(what, *arguments), timeout=ANSWER_SECONDS)


class NodeSync:
    """Between a folder on this node and the one of the same name on the driver's."""

    def __init__(self, ask: Callable[..., Any], folder: Path, place: Place, keep: Keep) -> None:
        self._folder, self._place = folder, place
        self._sync = FolderSync(OnDriver(ask), folder, self._files, keep if place.rank == 0 else None)
        self._done = threading.Event()

    def pull(self, step: int | None = None, best: bool = False, mode: str = "min") -> None:
        """Start from what the driver has: the checkpoint to restore, the newest unless said, and what still grows."""
        if self._place.local_rank == 0:
            shutil.rmtree(self._folder / CHECKPOINTS, ignore_errors=True)
            self._sync.pull_checkpoint(step, best, mode)
        self._sync.pull_files(self._own_paths())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Push what is new, every second and at the end."""
        thread = threading.Thread(target=self._push_regularly, name="lockstep-folder-sync", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(ANSWER_SECONDS)
            self.push()
            self._sync.close()

    def push(self) -> None:
        self._sync.push()

    def _push_regularly(self) -> None:
        while not self._done.wait(_INTERVAL):
            with contextlib.suppress(Exception):  # tried again in a second, and for the last time at the end
                self.push()

    def _own_paths(self) -> list[str]:
        return [f"logs/rank-{self._place.rank}.log", *(_RANK_ZERO_FILES if self._place.rank == 0 else ())]

    def _files(self) -> Iterator[Path]:
        for path in self._own_paths():
            place = self._folder / path
            yield from (each for each in ([place] if place.is_file() else sorted(place.rglob("*"))) if each.is_file())


class OnDriver:
    """A Remote: the folder on the driver's disk, in pieces that fit into a message."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        found = self._ask("checkpoint", step, best, mode)  # which has read all of it
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
