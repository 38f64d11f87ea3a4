"""Reads the idx files in which MNIST and its relatives are published, gzipped or plain."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

# The third byte of the magic number is the type of the elements, the fourth the number of dimensions.
UNSIGNED_BYTE = 0x08


def find(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, or its gzipped form."""
    candidates = [folder / name, folder / f"{name}.gz"]
    for path in candidates:
        if path.is_file():
            return path
    looked_for = " or ".join(path.name for path in candidates)
    raise FileNotFoundError(f"No {looked_for} in {folder.absolute()}")


def read_idx(path: Path, dimensions: int) -> Tensor:
    """The file's unsigned bytes as a uint8 tensor with that many dimensions."""
    content = _content(path)
    header_size = 4 + 4 * dimensions
    if len(content) < header_size:
        raise ValueError(f"{path}: {len(content)} bytes, too short for an idx header of {header_size} bytes")

    expected_magic = UNSIGNED_BYTE << 8 | dimensions
    magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
    if magic != expected_magic:
        raise ValueError(f"{path}: magic number is 0x{magic:08x}, expected 0x{expected_magic:08x}")

    size = math.prod(shape)
    if len(content) - header_size != size:
        raise ValueError(
            f"{path}: the header promises {' x '.join(map(str, shape))} = {size} bytes of data, "
            f"the file has {len(content) - header_size}"
        )
    # The bytearray is a copy that torch may own: a tensor over immutable bytes would not be safe to write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header_size:].view(shape)


def read_labelled_images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images [N, height, width] and labels [N] of one part of a set, `train` or `t10k`; both uint8."""
    images_path = find(folder, f"{part}-images-idx3-ubyte")
    labels_path = find(folder, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, dimensions=3)
    labels = read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels")
    return images, labels


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file: {error}") from error
