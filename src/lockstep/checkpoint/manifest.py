"""What a checkpoint says of itself: `manifest.json`, with the size and digest of every other file and its own."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.text_file import LONGEST_RECORD, read_bytes

FORMAT = 1
STEP_PREFIX = "step-"
MODEL_FILE, STATE_FILE, TREE_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "state.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (TREE_FILE, MODEL_FILE, STATE_FILE)  # all others, in the order in which they are read


# Something is not there, or is no file. Any other error (permission, a failing disk, a stale mount) is about reading,
# and says nothing of what would have been read.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def step_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"{STEP_PREFIX}{step:08d}"


class Damaged(Exception):
    """What is wrong with a checkpoint."""


class Unreadable(Exception):
    """Why a checkpoint, which may be whole, cannot be read."""


def not_read(name: str, error: OSError) -> Damaged | Unreadable:
    """What an error that a file could not be read with means."""
    if error.errno == errno.ENOENT:
        return Damaged(f"{name} is missing")
    text = f"{name} cannot be read: {error.strerror or error}"
    return Damaged(text) if error.errno in _NO_SUCH_FILE else Unreadable(text)


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """The last file of a checkpoint; on the disk when this returns."""
    told = {"format": FORMAT, **manifest}
    text = json.dumps({**told, "digest": _digest(told)}, indent=1) + "\n"
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, if it is one and whole; raises Damaged or Unreadable."""
    try:
        data = read_bytes(folder / MANIFEST_FILE, LONGEST_RECORD)
    except OSError as error:
        raise not_read(MANIFEST_FILE, error) from None
    return parse(data, folder.name)


def parse(data: bytes, name: str) -> dict[str, Any]:
    """What the manifest of the checkpoint of this name says; raises Damaged."""
    try:
        manifest: dict[str, Any] = json.loads(data)
        if manifest["format"] != FORMAT:
            raise Damaged(f"{MANIFEST_FILE} has format {manifest['format']}, this version reads {FORMAT}")
        if manifest["digest"] != _digest(manifest):
            raise Damaged(f"{MANIFEST_FILE} does not match its own digest")
        for file in FILES:
            size, digest = manifest["files"][file]["bytes"], manifest["files"][file]["sha256"]
            if type(size) is not int or size < 0 or not isinstance(digest, str):
                raise Damaged(f"{MANIFEST_FILE} does not say how long {file} is, or its digest")
        if isinstance(value := manifest.get("value"), int):
            manifest["value"] = float(value)  # or an OverflowError: nobody has measured a number of 400 digits
        _check_step(name, manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{MANIFEST_FILE} cannot be read: {error}") from None
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make sure that every file is there, and as long as it was; raises Damaged or Unreadable."""
    for name in FILES:
        expected = manifest["files"][name]["bytes"]
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise not_read(name, error) from None
        if size != expected:
            raise Damaged(f"{name} has {size} bytes, the manifest says {expected}")


def check_digest(name: str, found: str, manifest: Mapping[str, Any]) -> None:
    """Make sure that a file is what it was; raises Damaged."""
    if found != manifest["files"][name]["sha256"]:
        raise Damaged(f"{name} does not match its digest in the manifest")


def problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint, by reading all of it; nothing where it is whole. Raises Unreadable."""
    try:
        manifest = read(folder)
        check_sizes(folder, manifest)
        for name in FILES:
            check_digest(name, _digest_of(folder / name), manifest)
    except Damaged as error:
        return str(error)
    return None


def _check_step(name: str, manifest: Mapping[str, Any]) -> None:
    """A copy of a checkpoint under the name of another step is not what its name says."""
    step = manifest.get("step")
    if step is not None and name.startswith(STEP_PREFIX) and name != step_name(step):
        raise Damaged(f"{MANIFEST_FILE} is of step {step}")


def _digest_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise not_read(file.name, error) from None


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
