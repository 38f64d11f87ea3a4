"""What a checkpoint holds, on the host and apart from the training that goes on; and its way into files.

The digest of a file is that of the bytes on their way to the disk: nothing that was written is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lockstep import version
from lockstep.checkpoint import codec, manifest, tensor_file
from lockstep.checkpoint.manifest import MODEL_FILE, STATE_FILE, TREE_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.plain import finite, naming

# What is written, and then digested while the processor still has it at hand.
_PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Snapshot:
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
    """Write a checkpoint; on any failure nothing of it stays and those before it are untouched."""
    return storage.create(snapshot.step, snapshot.bytes, lambda folder: _write_files(folder, snapshot))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions() -> dict[str, str]:
    """Of what writes a checkpoint, to be found in its manifest."""
    return {"lockstep": version.installed(), "torch": str(torch.__version__)}


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    with NewFile(folder / MODEL_FILE) as model:
        tensor_file.write(model.write, snapshot.model, {"format": "pt"})
    with NewFile(folder / STATE_FILE) as state:
        tensor_file.write(state.write, snapshot.tensors)
    with NewFile(folder / TREE_FILE) as tree:
        tree.write(memoryview(json.dumps({"shared": dict(snapshot.shared), "state": snapshot.tree}).encode()))
    files = {each.path.name: each.described() for each in (model, state, tree)}
    manifest.write(folder, finite({"step": snapshot.step, **snapshot.about, "files": files}))


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
