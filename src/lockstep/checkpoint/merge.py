"""All weights of a checkpoint in one safetensors file: bytes from file to file, without ever holding a tensor."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import manifest, ranges
from lockstep.checkpoint.ranges import Range
from lockstep.checkpoint.storage import sync_folder

_LENGTH_BYTES, _ALIGNMENT = 8, 8
_METADATA, _COMPLEX, _PIECES = "__metadata__", "complex", "pieces"
_LONGEST_HEADER = 50_000_000


class Stretch(NamedTuple):
    """Bytes of a file of a checkpoint, and their places in the tensor that they belong to."""

    file: Path
    begin: int
    places: list[Range]


class Weight(NamedTuple):
    """A tensor in the files of a checkpoint."""

    name: str
    dtype: str  # as the format calls it
    shape: list[int]
    nbytes: int
    stretches: list[Stretch]

    @property
    def width(self) -> int:
        """Of one of its numbers, in bytes."""
        return self.nbytes // max(math.prod(self.shape), 1)


def weights(folder: Path, told: Mapping[str, Any], kind: str = "model") -> tuple[list[Weight], dict[str, str]]:
    """The tensors of a checkpoint that is whole, and what its files say beside them; raises Damaged or Unreadable."""
    found: dict[str, Weight] = {}
    metadata: dict[str, str] = {}
    pairs: set[str] = set()
    for name in manifest.tensor_files(told, kind):
        with _reading(name):
            header, start = _header(folder, name)
            beside = header.pop(_METADATA, {})
            pieces = json.loads(beside.pop(_PIECES, "{}"))
            pairs |= {pieces[each][0] if each in pieces else each for each in json.loads(beside.pop(_COMPLEX, "[]"))}
            metadata |= {str(key): str(value) for key, value in beside.items()}
            room = told["files"][name]["bytes"] - start
            for entry, about in header.items():
                begin, end = about["data_offsets"]
                size = about["shape"]
                tensor, shape, offset = pieces.get(entry, (entry, size, [0] * len(size)))
                _check(entry, [begin, end, *size, *shape, *offset], about["dtype"], tensor)
                if not begin <= end <= room or any(
                    at + long > whole for whole, at, long in zip(shape, offset, size, strict=True)
                ):
                    raise ValueError(f"the place of {entry!r} cannot be")
                width = (end - begin) // max(math.prod(size), 1)
                weight = Weight(tensor, about["dtype"], shape, math.prod(shape) * width, [])
                places = ranges.of_block(shape, offset, size, width, 0) if end > begin else []
                found.setdefault(tensor, weight).stretches.append(Stretch(folder / name, start + begin, places))
    return list(found.values()), metadata | ({_COMPLEX: json.dumps(sorted(pairs))} if pairs else {})


def _check(entry: str, numbers: list[Any], *texts: Any) -> None:
    if not all(type(each) is int and each >= 0 for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"the type, the shape or the place of {entry!r} cannot be")


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Says of wrong content that the file is damaged."""
    try:
        yield
    except OSError as error:
        raise manifest.not_read(name, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise manifest.Damaged(f"{name} cannot be read: {error}") from None


def averaged(folder: Path, told: Mapping[str, Any]) -> list[Weight]:
    """The weights with their averages (`train.ema`) in the place of those that have one; none where there is none."""
    with _reading(manifest.TREE_FILE):
        state = json.loads(manifest.read_small(folder, manifest.TREE_FILE, told))["state"]
        averages: Mapping[str, Any] = state.get("averages") or {}
        places = {
            (name if len(state["models"]) == 1 else f"{model}.{name}"): place["$tensor"]
            for model, each in averages.items()
            for name, place in each["weights"].items()
        }
        saved = {each.name: each for each in weights(folder, told, "state")[0]}
        found, _ = weights(folder, told)
        return [saved[places[each.name]]._replace(name=each.name) if each.name in places else each for each in found
                if averages]  # fmt: skip


def merge(folder: Path, told: Mapping[str, Any], out: Path, average: bool = False) -> int:
    """Write one file with all weights of a checkpoint that is whole, or with their averages; how many they are."""
    found, metadata = weights(folder, told)
    if average:
        found = averaged(folder, told)
    found.sort(key=lambda each: (-each.width, each.name))  # every tensor then begins where its type may
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    end = 0
    for each in found:
        begin, end = end, end + each.nbytes
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        with temporary.open("xb") as target:
            target.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            target.flush()
            place = target.tell()
            for each in found:
                _copy(each, target.fileno(), place)
                place += each.nbytes
            os.fsync(target.fileno())
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return len(found)


def _copy(weight: Weight, target: int, place: int) -> None:
    """A tensor to its place in a file, in pieces of a few megabytes."""
    piece = memoryview(bytearray(min(ranges.PIECE_BYTES, weight.nbytes)))
    for file, begin, places in weight.stretches:
        descriptor = manifest.open_part(file.parent, file.name)
        try:
            for each in ranges.chopped(places):
                ranges.fill(descriptor, [Range(begin, each.bytes, each.bytes, 1)], piece[: each.bytes])
                there = each._replace(begin=each.begin + place)
                ranges.put(target, [there], piece[: each.bytes], lambda _: None)
                begin += each.bytes
        finally:
            os.close(descriptor)


def _header(folder: Path, name: str) -> tuple[dict[str, Any], int]:
    with os.fdopen(manifest.open_part(folder, name), "rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes; {_LONGEST_HEADER} are allowed")
        return dict(json.loads(stream.read(length))), _LENGTH_BYTES + length
