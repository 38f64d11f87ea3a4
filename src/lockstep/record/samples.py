"""Samples (images, texts and tables): checked where they are logged, and kept in the run's folder.

They are in `samples/step-00000010/NAME.png`, `.txt` or `.json`, whatever loggers there are. A run that resumes from an
older checkpoint replaces what it makes again.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep import run_files
from lockstep.config.plain import finite, naming
from lockstep.errors import ConfigError
from lockstep.record.logger import Kind, Sample, Table

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # channels -> PNG's number for gray, RGB and RGBA


def encoded_png(pixels: NDArray[np.uint8]) -> bytes:
    """Returns an array [height, width, channels] as a PNG file; channels are 1, 3 or 4."""
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # a line begins with its filter, 0 for none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_part(kind, data) for kind, data in parts)


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


FOLDER = "samples"
_STEP = "step-"
_ENDINGS: dict[Kind, str] = {"image": ".png", "text": ".txt", "table": ".json"}
_CHANNELS = (1, 3, 4)
_ROUNDING = 1e-3  # how far a float pixel may be outside 0 to 1


class Samples:
    """The samples in a run's folder, on rank 0."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._step, self._given = -1, set[tuple[str, str]]()

    def keep(self, step: int, name: str, kind: Kind, value: Any) -> tuple[Sample, int] | None:
        """Writes a sample and returns it with its size; None for a second one of a name at the same step."""
        if step != self._step:
            self._step, self._given = step, set()
        if (kind, name) in self._given:
            return None
        self._given.add((kind, name))
        data = _ENCODED[kind](value)
        file = self._folder / f"{_STEP}{step:08d}" / f"{name}{_ENDINGS[kind]}"
        with naming(file):
            run_files.write(file, data, depth=3 + name.count("/"))
        return Sample(step, name, kind, value, file), len(data) if kind != "image" else value.nbytes

    def forget_after(self, step: int) -> None:
        """Drops the samples of later steps, which a resumed run makes again."""
        for folder in self._folder.glob(f"{_STEP}*") if run_files.is_folder(self._folder) else ():
            with contextlib.suppress(ValueError):
                if int(folder.name.removeprefix(_STEP)) > step:
                    shutil.rmtree(folder, ignore_errors=True)


def check_name(name: Any, path: str) -> None:
    """Refuses a name that cannot be a file's: parts of letters, digits and a few signs, with slashes between."""
    part = r"\w[\w .=+-]*"
    if not isinstance(name, str) or len(name) > 200 or not re.fullmatch(f"{part}(/{part})*", name):
        raise ConfigError(
            f"{path}: a sample's name is made of letters, digits, space and . = + - _, with / between parts: it "
            f"becomes the name of a file; got {name!r}"
        )


def image(given: Any, path: str) -> NDArray[np.uint8]:
    """Returns the pixels [height, width, channels] of a tensor, an array or a PIL image."""
    pixels = _array(given, path)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or 0 in pixels.shape:
        several = "; log one image at a time, or torchvision.utils.make_grid(images)" if pixels.ndim == 4 else ""
        raise ConfigError(
            f"{path}: an image is [channels, height, width], [height, width, channels] or [height, width]; "
            f"got shape {list(pixels.shape)}{several}"
        )
    return np.ascontiguousarray(_bytes(_channels_last(pixels, hasattr(given, "detach"), path), path))


def text(given: Any, path: str) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"{path}: a text is a str, got {_what(given)}; decode tokens first")
    return given


def table(columns: Any, rows: Any, path: str) -> Table:
    names = list(columns) if isinstance(columns, Sequence) and not isinstance(columns, str) else None
    if names is None or not names or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{path}: columns is a list of names, got {columns!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: columns has a name twice, got {columns!r}")
    found = []
    for number, row in enumerate(rows):
        cells = list(row) if isinstance(row, Sequence) and not isinstance(row, str) else None
        if cells is None or len(cells) != len(names):
            raise ConfigError(
                f"{path}: row {number} is not a list of {len(names)} cells ({', '.join(names)}), got {row!r}"
            )
        found.append(
            [_cell(cell, f"{path}: row {number}, column {name}") for name, cell in zip(names, cells, strict=True)]
        )
    return Table(names, found)


def _array(given: Any, path: str) -> NDArray[Any]:
    if hasattr(given, "detach"):  # a tensor, of whatever device
        there = given.detach().cpu()
        return np.asarray((there.float() if there.is_floating_point() else there).numpy())
    if hasattr(given, "getbands") and hasattr(given, "convert"):  # of PIL's
        plain = given if given.mode in ("L", "RGB", "RGBA") else given.convert("RGB")
        return np.asarray(plain)
    if isinstance(given, np.ndarray):
        return given
    raise ConfigError(f"{path}: an image is a tensor, a numpy array or an image of PIL's, got {_what(given)}")


def _channels_last(pixels: NDArray[Any], first_by_custom: bool, path: str) -> NDArray[Any]:
    """Moves the channels, the axis of size 1, 3 or 4, to the end; where both fit, tensors have them first."""
    first, last = pixels.shape[0] in _CHANNELS, pixels.shape[2] in _CHANNELS
    if not first and not last:
        raise ConfigError(f"{path}: an image has 1, 3 or 4 channels, first or last; got shape {list(pixels.shape)}")
    return pixels.transpose(1, 2, 0) if first and (first_by_custom or not last) else pixels


def _bytes(pixels: NDArray[Any], path: str) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.bool_:
        return pixels.astype(np.uint8) * 255
    if not np.issubdtype(pixels.dtype, np.floating):
        raise ConfigError(
            f"{path}: pixels are uint8, or floats from 0 to 1; got {pixels.dtype}: image.to(torch.uint8)?"
        )
    least, most = float(pixels.min()), float(pixels.max())
    if not (least >= -_ROUNDING and most <= 1 + _ROUNDING):  # also where one is not a number
        raise ConfigError(
            f"{path}: pixels that are floats go from 0 to 1, got {least:.4g} to {most:.4g}: undo the normalization, "
            "or image.clamp(0, 1)"
        )
    return np.asarray(np.rint(pixels.astype(np.float64).clip(0, 1) * 255), np.uint8)


def _cell(cell: Any, path: str) -> Any:
    value = cell.item() if hasattr(cell, "item") and getattr(cell, "shape", None) == () else cell
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ConfigError(f"{path}: a cell is a number, a text, true, false or None; got {_what(cell)}")


def _what(given: Any) -> str:
    shape = f" of shape {list(given.shape)}" if hasattr(given, "shape") else ""
    return f"{type(given).__name__}{shape}"


_ENCODED: dict[Kind, Callable[[Any], bytes]] = {
    "image": encoded_png,
    "text": lambda value: value.encode("utf-8", "surrogatepass"),
    "table": lambda value: (
        json.dumps(finite({"columns": value.columns, "rows": value.rows}), ensure_ascii=False) + "\n"
    ).encode("utf-8", "surrogatepass"),
}
