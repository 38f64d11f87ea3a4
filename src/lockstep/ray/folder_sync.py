"""For a rank whose node has a disk of its own: pulls what it needs of the run's folder, pushes what it makes."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.distributed.topology import Place
from lockstep.ray.mailbox import ANSWER_SECONDS

_INTERVAL = 1.0
_CHUNK = 8 * 1024 * 1024
_RANK_ZERO_FILES = ("metrics.jsonl", "summary.json", "topology.json", "tensorboard")


class FolderSync:
    """Between a folder on this node and the one of the same name on the driver's."""

    def __init__(self, mailbox: Any, folder: Path, place: Place) -> None:
        self._mailbox, self._folder, self._place = mailbox, folder, place
        self._storage = CheckpointStorage(folder / "checkpoints")
        self._sent: dict[str, tuple[int, int]] = {}  # file -> its size and time when it was sent
        self._on_driver: set[int] = set()  # steps whose checkpoints the driver has, and this node had too
        self._has_new = False  # whether the driver has a checkpoint that was made here
        self._lock = threading.Lock()
        self._done = threading.Event()

    def pull(self, step: int | None = None, best: bool = False, mode: str = "min") -> None:
        """Start from what the driver has: the checkpoint to restore, the newest unless said, and what still grows."""
        if self._place.local_rank == 0:
            shutil.rmtree(self._folder / "checkpoints", ignore_errors=True)
            checkpoint = self._ask("checkpoint", step, best, mode)
            if checkpoint is not None:
                self._pull_files(checkpoint)
        for path in self._own_paths():
            self._pull_files(path)
        self._on_driver = set(self._storage.steps()) if self._place.rank == 0 else set()

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

    def push(self) -> None:
        with self._lock:
            if self._place.rank == 0:
                self._push_checkpoints()
            for path in self._own_paths():
                place = self._folder / path
                for file in [place] if place.is_file() else sorted(place.rglob("*")):
                    if file.is_file():
                        self._push_file(file, str(file.relative_to(self._folder)))

    def _push_regularly(self) -> None:
        while not self._done.wait(_INTERVAL):
            with contextlib.suppress(Exception):  # tried again in a second, and for the last time at the end
                self.push()

    def _own_paths(self) -> list[str]:
        return [f"logs/rank-{self._place.rank}.log", *(_RANK_ZERO_FILES if self._place.rank == 0 else ())]

    def _push_checkpoints(self) -> None:
        here = set(self._storage.steps())
        aside = {step for step in self._on_driver - here if self._storage.set_aside(step)}
        if here - self._on_driver and not self._has_new:
            # As it was done here before the first save.
            self._ask("set_aside_after", max(self._on_driver - aside, default=None))
            self._has_new = True
        for step in sorted(here - self._on_driver):
            folder = self._storage.path(step)
            arriving = f"checkpoints/.partial-{folder.name}-sync"
            for file in folder.iterdir():
                self._push_file(file, f"{arriving}/{file.name}")
            self._ask("rename", arriving, f"checkpoints/{folder.name}")
        for step in self._on_driver - here - aside:
            self._ask("remove", f"checkpoints/{self._storage.path(step).name}")
        self._on_driver = here

    def _push_file(self, file: Path, path: str) -> None:
        status = file.stat()
        known = (status.st_size, status.st_mtime_ns)
        if self._sent.get(path) == known:
            return
        with file.open("rb") as stream:
            self._ask("write", path, 0, stream.read(_CHUNK))
            while data := stream.read(_CHUNK):
                self._ask("write", path, stream.tell() - len(data), data)
        self._sent[path] = known

    def _pull_files(self, path: str) -> None:
        for name, size in self._ask("files", path):
            place = self._folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                for offset in range(0, size, _CHUNK):
                    file.write(self._ask("read", name, offset, min(_CHUNK, size - offset)))

    def _ask(self, what: str, *arguments: Any) -> Any:
        return ray.get(self._mailbox.folder_store.remote(what, *arguments), timeout=ANSWER_SECONDS)
