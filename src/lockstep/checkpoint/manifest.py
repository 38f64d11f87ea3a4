"""The manifest of a checkpoint: `manifest.json`, with the size and digest of every other file.

One rank writes format 1: two files of tensors, each with its digest. Several ranks write format 2: tensors are divided
over more files, and each has a digest for every rank, over the bytes that this rank wrote (`parts.json`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.checkpoint import ranges
from lockstep.config.plain import naming

WHOLE, BY_OWNERS = 1, 2  # formats
STEP_PREFIX = "step-"
MODEL_FILE, STATE_FILE, TREE_FILE, MANIFEST_FILE = (
    "model.safetensors",
    "state.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (TREE_FILE, MODEL_FILE, STATE_FILE)  # all others of format 1, in the order in which they are read
PARTS_FILE, INDEX_FILE = "parts.json", "model.safetensors.index.json"  # of format 2
_SMALL_FILES = (TREE_FILE, PARTS_FILE, INDEX_FILE)
_SHARD = re.compile(r"(model|state)-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_STEP = re.compile(STEP_PREFIX + "([0-9]{8,18})")
# What a manifest may say beside its files, and of which type.
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "epoch": (int, float), "created": str, "world_size": int, "versions": dict, "metrics": dict,
}  # fmt: skip
_DEPTH = 3  # checkpoints/step-00000010/manifest.json
_LONGEST_MANIFEST, _LONGEST_SMALL = 64_000_000, 1_000_000_000  # bytes; small are state.json, parts.json

# Something is not there, or is no file. Any other error (permission, a failing disk, a stale mount) is about reading,
# and says nothing of what would have been read.
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def step_name(step: int) -> str:
    return f"{STEP_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint with this name, or None where it is no checkpoint's name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def shard_name(kind: str, number: int, count: int) -> str:
    """Returns the name of a file of tensors of format 2; numbers begin with 1, as in Hugging Face's names."""
    return f"{kind}-{number:05d}-of-{count:05d}.safetensors"


def files(meta: Mapping[str, Any]) -> list[str]:
    """Returns all files that a manifest names, in the order in which they are read."""
    return list(FILES) if meta["format"] == WHOLE else [*_SMALL_FILES, *shards(meta)]


def shards(meta: Mapping[str, Any], kind: str = "") -> list[str]:
    """Returns the files of format 2 that have tensors, all or those of a kind: model or state."""
    return sorted(name for name in meta["files"] if _SHARD.fullmatch(name) and name.startswith(kind))


def tensor_files(meta: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the files of either format with the tensors of the model, or of the state."""
    return [f"{kind}.safetensors"] if meta["format"] == WHOLE else shards(meta, kind)


class Damaged(Exception):
    """A checkpoint is not what was written."""


class Unreadable(Exception):
    """A checkpoint, which may be whole, cannot be read."""


def not_read(name: str, error: OSError) -> Damaged | Unreadable:
    """Returns what an error while reading a file means."""
    if error.errno == errno.ENOENT:
        return Damaged(f"{name} is missing")
    text = f"{name} cannot be read: {error.strerror or error}"
    wrong = isinstance(error, run_files.BadFile) or error.errno in _NO_SUCH_FILE
    return Damaged(text) if wrong else Unreadable(text)


def open_part(folder: Path, name: str) -> int:
    """Opens a file of a checkpoint for reading; raises Damaged or Unreadable."""
    try:
        return run_files.open_descriptor(folder / name, os.O_RDONLY, _DEPTH)
    except OSError as error:
        raise not_read(name, error) from None


def write(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the last file of a checkpoint; it is on the disk when this returns."""
    meta = {"format": WHOLE, **manifest}
    text = json.dumps({**meta, "digest": _digest(meta)}, indent=1) + "\n"
    file = folder / MANIFEST_FILE
    with naming(file), file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint; raises Damaged or Unreadable."""
    try:
        data = run_files.read_bytes(folder / MANIFEST_FILE, _LONGEST_MANIFEST, _DEPTH)
    except OSError as error:
        raise not_read(MANIFEST_FILE, error) from None
    return parse(data, folder.name)


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Parses the manifest of the checkpoint of this name; raises Damaged."""
    try:
        manifest: dict[str, Any] = json.loads(data)
        if manifest["format"] not in (WHOLE, BY_OWNERS) or type(manifest["format"]) is not int:
            raise Damaged(
                f"{MANIFEST_FILE} has format {manifest['format']}, this version reads {WHOLE} and {BY_OWNERS}"
            )
        if manifest["digest"] != _digest(manifest):
            raise Damaged(f"{MANIFEST_FILE} does not match its own digest")
        for file in {*files(manifest), *manifest["files"]}:
            size, digest = manifest["files"][file]["bytes"], manifest["files"][file]["sha256"]
            if type(size) is not int or size < 0 or not _is_digest(file, digest):
                raise Damaged(f"{MANIFEST_FILE} does not say how long {file} is, or its digest")
        for key, kind in _TYPES.items():
            if not isinstance(manifest.get(key), (kind, type(None))):
                raise Damaged(f"{MANIFEST_FILE} has a {type(manifest[key]).__name__} for {key}")
        value = manifest.get("value")  # an OverflowError: nobody has measured a number of 400 digits
        manifest["value"] = float(value) if isinstance(value, (int, float)) else None
        lease = manifest.get("lease", {"generation": 0, "base": 0})
        if [type(lease[name]) for name in ("generation", "base")] != [int, int] or not isinstance(
            lease.get("branch", ""), str
        ):
            raise Damaged(f"{MANIFEST_FILE} has a lease of {lease!r}")
        step = manifest["step"]
        if type(step) is not int or step < 0:
            raise Damaged(f"{MANIFEST_FILE} names no step")
        if name.startswith(STEP_PREFIX) and name != step_name(step):
            raise Damaged(f"{MANIFEST_FILE} is of step {step}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"{MANIFEST_FILE} cannot be read: {error}") from None
    return manifest


def check_sizes(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Checks that every file is there, and as long as it was; raises Damaged or Unreadable."""
    for name in files(manifest):
        expected = manifest["files"][name]["bytes"]
        try:
            size = run_files.size(folder / name, _DEPTH)
        except OSError as error:
            raise not_read(name, error) from None
        if size != expected:
            raise Damaged(f"{name} has {size} bytes, the manifest says {expected}")


def check_digest(name: str, found: str, manifest: Mapping[str, Any], rank: str | None = None) -> None:
    """Checks the digest of a file, or of the part that a rank wrote; raises Damaged."""
    expected = manifest["files"][name]["sha256"]
    if found != (expected if rank is None else expected[rank]):
        part = "" if rank is None else f": the part that rank {rank} wrote"
        raise Damaged(f"{name} does not match its digest in the manifest{part}")


def read_small(folder: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Reads a file at once and checks its digest; raises Damaged or Unreadable."""
    try:
        data = run_files.read_bytes(folder / name, min(manifest["files"][name]["bytes"], _LONGEST_SMALL), _DEPTH)
    except OSError as error:
        raise not_read(name, error) from None
    check_digest(name, hashlib.sha256(data).hexdigest(), manifest)
    return data


def read_parts(folder: Path, manifest: Mapping[str, Any]) -> ranges.Parts:
    """Returns who wrote which bytes of a checkpoint of format 2; raises Damaged or Unreadable."""
    data = read_small(folder, PARTS_FILE, manifest)
    try:
        return ranges.parse_parts(data, {name: manifest["files"][name] for name in shards(manifest)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{PARTS_FILE} cannot be read: {error}") from None


def check_part(
    folder: Path,
    name: str,
    rank: str | None,
    found: ranges.Parts,
    manifest: Mapping[str, Any],
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Reads a file, or the part that a rank wrote, and checks its digest; raises Damaged or Unreadable."""
    size = manifest["files"][name]["bytes"]
    wanted = found[name][rank] if rank is not None else [ranges.Range(0, size, size, 1)] if size else []
    descriptor = open_part(folder, name)
    try:
        digest = ranges.digest(descriptor, wanted, progress)
    except EOFError:
        raise Damaged(f"{name} became shorter while it was read") from None
    except OSError as error:
        raise not_read(name, error) from None
    finally:
        os.close(descriptor)
    check_digest(name, digest, manifest, rank)


def to_check(manifest: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Returns all that has a digest: files, and parts of files with the rank that wrote them."""
    found: list[tuple[str, str | None]] = []
    for name in files(manifest):
        by_rank = manifest["files"][name]["sha256"]
        found += [(name, rank) for rank in sorted(by_rank, key=int)] if isinstance(by_rank, dict) else [(name, None)]
    return found


def check(folder: Path) -> None:
    """Reads all of a checkpoint; raises Damaged or Unreadable where it is not whole."""
    manifest = read(folder)
    check_sizes(folder, manifest)
    found = read_parts(folder, manifest) if manifest["format"] == BY_OWNERS else {}
    for name, rank in to_check(manifest):
        check_part(folder, name, rank, found, manifest)


def problem(folder: Path) -> str | None:
    """Reads all of a checkpoint; returns what is wrong with it, or None. Raises Unreadable."""
    try:
        check(folder)
    except Damaged as error:
        return str(error)
    return None


def _is_digest(file: str, digest: Any) -> bool:
    if not _SHARD.fullmatch(file):
        return isinstance(digest, str)
    return isinstance(digest, dict) and all(
        re.fullmatch("[0-9]{1,9}", rank) and isinstance(each, str) for rank, each in digest.items()
    )


def _digest(manifest: Mapping[str, Any]) -> str:
    # A bucket adds the lease under which it was uploaded: the checkpoint stays the same.
    rest = {name: value for name, value in manifest.items() if name not in ("digest", "lease")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
