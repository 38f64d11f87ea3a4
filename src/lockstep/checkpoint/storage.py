"""A folder of checkpoints, each of them whole or absent.

A checkpoint is a folder `step-NNNNNNNN` with safetensors files, `state.json` and, written last, `manifest.json` with
the size and digest of every other file. It is written under a temporary name and appears under its own by one
rename, after everything in it has reached the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.checkpoint import codec
from lockstep.checkpoint.retention import Saved, best_first
from lockstep.config.plain import finite
from lockstep.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL_FILE, STATE_FILE, TREE_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "state.safetensors",
    "state.json",
    "manifest.json",
)
_TEMPORARY = ".partial-"


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, on the host and independent of the training that goes on."""

    step: int
    model: codec.Tensors
    shared: dict[str, str]  # tied names that model does not repeat
    tree: Any
    tensors: codec.Tensors
    about: Mapping[str, Any]  # what the manifest says beside the files

    @property
    def bytes(self) -> int:
        return sum(each.nbytes for each in [*self.model.values(), *self.tensors.values()])


@dataclass(frozen=True)
class Loaded:
    """A checkpoint read back."""

    step: int
    model: codec.Tensors
    state: Any
    about: dict[str, Any]


class CheckpointStorage:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint under its final name, oldest first."""
        names = [entry.name for entry in self.folder.glob("step-*")] if self.folder.is_dir() else []
        return sorted(int(name[5:]) for name in names if name[5:].isdigit())

    def saved(self) -> list[Saved]:
        """What retention needs to know of each checkpoint; a damaged manifest has no value to be best by."""
        return [Saved(step, _value(self.path(step))) for step in self.steps()]

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint; on any failure nothing of it stays and those before it are untouched."""
        final = self.path(snapshot.step)
        temporary = self.folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _require_space(self.folder, snapshot.bytes)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            _write_files(temporary, snapshot)
            if final.exists():  # a damaged one that a resume passed over, or the same step reached again
                self.delete(snapshot.step)
            temporary.rename(final)
            _sync_folder(self.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(_cannot_write(final, snapshot.bytes, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already where all went well
        return final

    def delete(self, step: int) -> None:
        """Remove a checkpoint so that it is never seen half removed."""
        doomed = self.folder / f"{_TEMPORARY}deleted-{step:08d}-{os.getpid()}"
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what an interrupted write or delete left behind; only while nobody else writes here."""
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            logger.info("removing %s, left by a save that was interrupted", leftover.name)
            shutil.rmtree(leftover, ignore_errors=True)

    def newest_good(self) -> int | None:
        """The newest step whose checkpoint is whole; damaged ones are passed over, each with a warning."""
        for step in reversed(self.steps()):
            problem = self.problem(step)
            if problem is None:
                return step
            logger.warning("checkpoint %s is damaged and is passed over: %s", self.path(step).name, problem)
        return None

    def best_good(self, mode: str) -> int | None:
        """Of those that are whole, the one with the best value in its manifest."""
        for each in best_first(self.saved(), mode):
            problem = self.problem(each.step)
            if problem is None:
                return each.step
            logger.warning("checkpoint %s is damaged and is passed over: %s", self.path(each.step).name, problem)
        return None

    def require(self, step: int) -> None:
        """Refuse a step that has no checkpoint, naming those that there are."""
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: there is no checkpoint of step {step} (steps with one: {there})")

    def set_aside_after(self, step: int | None) -> list[Path]:
        """Give all checkpoints newer than this step another name, under which nothing reads or deletes them."""
        moved = []
        for newer in [each for each in self.steps() if step is None or each > step]:
            aside = self.folder / f"aside-{self.path(newer).name}"
            number = 1
            while aside.exists():
                number += 1
                aside = self.folder / f"aside-{self.path(newer).name}-{number}"
            self.path(newer).rename(aside)
            moved.append(aside)
            logger.warning("%s is set aside as %s", self.path(newer).name, aside.name)
        return moved

    def problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint, by comparing every file with the manifest; nothing where it is whole."""
        folder = self.path(step)
        try:
            manifest = json.loads((folder / MANIFEST_FILE).read_bytes())
            if manifest["format"] != FORMAT:
                return f"{MANIFEST_FILE} has format {manifest['format']}, this version reads {FORMAT}"
            if manifest["digest"] != _manifest_digest(manifest):
                return f"{MANIFEST_FILE} does not match its own digest"
            for name in (MODEL_FILE, STATE_FILE, TREE_FILE):
                expected = manifest["files"][name]
                size = (folder / name).stat().st_size
                if size != expected["bytes"]:
                    return f"{name} has {size} bytes, the manifest says {expected['bytes']}"
                if _digest(folder / name) != expected["sha256"]:
                    return f"{name} does not match its digest in the manifest"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{MANIFEST_FILE} cannot be read: {error}"
        return None

    def about(self, step: int) -> dict[str, Any]:
        """What a checkpoint's manifest says: step, epoch, world size, metrics."""
        manifest: dict[str, Any] = json.loads((self.path(step) / MANIFEST_FILE).read_bytes())
        return manifest

    def read(self, step: int) -> Loaded:
        folder = self.path(step)
        try:
            tree = json.loads((folder / TREE_FILE).read_bytes())
            model = load_file(folder / MODEL_FILE)
            model.update({name: model[first] for name, first in tree["shared"].items()})
            state = codec.unpack(tree["state"], load_file(folder / STATE_FILE))
            return Loaded(step, model, state, self.about(step))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    save_file(snapshot.model, folder / MODEL_FILE, metadata={"format": "pt"})
    save_file(snapshot.tensors or {"empty": torch.zeros(0)}, folder / STATE_FILE)
    tree = {"shared": snapshot.shared, "state": snapshot.tree}
    (folder / TREE_FILE).write_text(json.dumps(tree), encoding="utf-8")
    files = {}
    for name in (MODEL_FILE, STATE_FILE, TREE_FILE):
        _sync_file(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _digest(folder / name)}
    manifest = finite({"format": FORMAT, "step": snapshot.step, **snapshot.about, "files": files})
    manifest["digest"] = _manifest_digest(manifest)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    _sync_file(folder / MANIFEST_FILE)
    _sync_folder(folder)


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _value(folder: Path) -> float | None:
    try:
        value = json.loads((folder / MANIFEST_FILE).read_bytes()).get("value")
        return None if value is None else float(value)
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_file(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cannot_write(final: Path, needed: int, error: Exception) -> str:
    message = f"{final}: the checkpoint could not be written: {error}."
    if isinstance(error, PermissionError):
        return f"{message} Make the folder writable for this user, or choose another with --out"
    try:
        free = shutil.disk_usage(final.parent).free
    except OSError:
        return message
    return (
        f"{message} It needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free. Earlier checkpoints are "
        "untouched: make room (checkpoint.keep keeps fewer) and resume the run"
    )


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
