"""Copies all weights of a checkpoint into one safetensors file: bytes from file to file, without torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint import manifest, ranges
from lockstep.checkpoint.header import Entry, check_pieces, laid_out, read_header
from lockstep.checkpoint.ranges import Range
from lockstep.checkpoint.storage import sync_folder


class Stretch(NamedTuple):
    """Bytes of a file of a checkpoint, and their places in the tensor that they belong to."""

    file: Path
    begin: int
    places: list[Range]


class Weight(NamedTuple):
    """A tensor in the files of a checkpoint; its entry is that of the whole tensor."""

    entry: Entry
    stretches: list[Stretch]


def weights(folder: Path, meta: Mapping[str, Any], kind: str = "model") -> tuple[list[Weight], dict[str, str]]:
    """Returns the tensors of a whole checkpoint, and the metadata of its files; raises Damaged or Unreadable."""
    found: dict[str, Weight] = {}
    metadata: dict[str, str] = {}
    entries: list[Entry] = []
    for name in manifest.tensor_files(meta, kind):
        descriptor = manifest.open_part(folder, name)
        try:
            with _reading(name):
                here, beside = read_header(ranges.from_start(descriptor), meta["files"][name]["bytes"])
        finally:
            os.close(descriptor)
        entries += here
        metadata |= beside
        for each in here:
            shape, offset = (each.shape, (0,) * len(each.shape)) if each.piece is None else each.piece[1:]
            whole = each._replace(name=each.tensor, shape=shape, piece=None)
            places = ranges.of_block(shape, offset, each.shape, each.itemsize, 0)
            stretch = Stretch(folder / name, each.begin, places)
            found.setdefault(each.tensor, Weight(whole, [])).stretches.append(stretch)
    with _reading(kind):
        check_pieces(entries)
    return list(found.values()), metadata


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Says of wrong content that the file is damaged."""
    try:
        yield
    except OSError as error:
        raise manifest.not_read(name, error) from None
    except (EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise manifest.Damaged(f"{name} cannot be read: {error}") from None


def averaged(folder: Path, meta: Mapping[str, Any]) -> list[Weight]:
    """The weights with their averages (`train.ema`) in the place of those that have one; none where there is none."""
    with _reading(manifest.TREE_FILE):
        state = json.loads(manifest.read_small(folder, manifest.TREE_FILE, meta))["state"]
        averages: Mapping[str, Any] = state.get("averages") or {}
        places = {
            (name if len(state["models"]) == 1 else f"{model}.{name}"): place["$tensor"]
            for model, each in averages.items()
            for name, place in each["weights"].items()
        }
        if not averages:
            return []
        saved = {each.entry.name: each for each in weights(folder, meta, "state")[0]}
        found = []
        for weight in weights(folder, meta)[0]:
            name = weight.entry.name
            average = saved[places[name]] if name in places else weight
            found.append(average._replace(entry=average.entry._replace(name=name)))
        return found


def merge(folder: Path, meta: Mapping[str, Any], out: Path, average: bool = False) -> int:
    """Writes one file with all weights of a checkpoint that is whole, or with their averages; returns their number."""
    found, metadata = weights(folder, meta)
    if average:
        found = averaged(folder, meta)
    header, entries = laid_out([each.entry for each in found], metadata)
    by_name = {each.entry.name: each for each in found}
    temporary = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        with temporary.open("xb") as target:
            target.write(header)
            target.flush()
            for entry in entries:
                _copy(by_name[entry.name], target.fileno(), entry.begin)
            os.fsync(target.fileno())
        temporary.rename(out)
        sync_folder(out.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return len(found)


def _copy(weight: Weight, target: int, place: int) -> None:
    piece = memoryview(bytearray(min(ranges.PIECE_BYTES, weight.entry.nbytes)))
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
