"""Examples from tar files in WebDataset's layout: members of the same base name are one example.

`000017.jpg` and `000017.cls` become `{"__key__": "000017", "jpg": bytes, "cls": bytes}`. Nothing is unpacked to the
disk, and nothing is ever unpickled: what the bytes mean is for `decode` to say.
"""

from __future__ import annotations

import glob
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from torch.utils.data import IterableDataset

from lockstep.errors import ConfigError

Sample = dict[str, Any]

_BLOCK = 512


class TarShards(IterableDataset[Any]):
    """Reads tar files one after the other; each is a shard that one rank or worker reads.

    `paths` are files, or a pattern such as `data/train-*.tar`. Every sample goes through `decode`, where one is given.
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], decode: Callable[[Sample], Any] | None = None) -> None:
        self.paths = _files(paths)
        self.decode = decode
        self._shard = self._samples = 0  # where it is: which file, and how many samples of it were read
        self._offset: int | None = 0  # the byte at which the next one begins; None where the file is compressed
        self._goes_on = False

    @property
    def num_shards(self) -> int:
        """The number of files."""
        return len(self.paths)

    def shard(self, num_shards: int, index: int) -> TarShards:
        """Returns a reader for one of so many parts of the files."""
        first, last = (len(self.paths) * part // num_shards for part in (index, index + 1))
        part = TarShards.__new__(TarShards)
        part.__dict__.update(self.__dict__, paths=self.paths[first:last], _shard=0, _samples=0, _offset=0)
        part._goes_on = False
        return part

    def state_dict(self) -> dict[str, Any]:
        """Returns the file, and the place in it."""
        return {"shard": self._shard, "samples": self._samples, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration resumes there."""
        self._shard, self._samples, self._offset = state["shard"], state["samples"], state["offset"]
        self._goes_on = True

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:
            self._shard = self._samples = self._offset = 0
        self._goes_on = False
        while self._shard < len(self.paths):
            for sample, offset in _samples(self.paths[self._shard], self._samples, self._offset):
                self._samples, self._offset = self._samples + 1, offset
                yield sample if self.decode is None else self._decoded(sample)
            self._shard, self._samples, self._offset = self._shard + 1, 0, 0

    def _decoded(self, sample: Sample) -> Any:
        assert self.decode is not None
        members = [f"{sample['__key__']}.{extension}".rstrip(".") for extension in sample if extension != "__key__"]
        try:
            return self.decode(sample)
        except Exception as error:
            error.add_note(
                f"decoding {', '.join(members)} of {self.paths[self._shard]}: write the shard again without it, or let "
                "decode take it"
            )
            raise


class _Member(tarfile.TarInfo):
    """Refuses what is no header, where tarfile takes all but the first for the end: a file that is cut off reads like
    a whole one, but for the zeros that end a tar file."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf == bytes(_BLOCK):
                raise
            raise tarfile.ReadError(str(error)) from None


def _samples(path: str, done: int, offset: int | None) -> Iterator[tuple[Sample, int | None]]:
    try:
        opened = open(path, "rb")  # noqa: PTH123, SIM115
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened: {error.strerror}. Restore it, or leave it out of the paths of TarShards"
        ) from None
    with opened as file:
        compressed = _is_compressed(file)
        if not compressed and done and offset is not None:
            file.seek(offset)
            done = 0
        try:
            tar = tarfile.open(fileobj=file, mode="r|*" if compressed else "r:", tarinfo=_Member)  # noqa: SIM115
        except (tarfile.ReadError, TypeError) as error:  # TypeError: of a gzip file that is cut off in its header
            if offset and file.seek(0, 2) == offset:
                return  # nothing came after the sample before
            raise ConfigError(f"{path} cannot be read as a tar file: {error}. Write it again") from None
        with tar:
            for sample, following in _grouped(path, tar, compressed):
                if done:
                    done -= 1
                else:
                    yield sample, following


def _grouped(path: str, tar: tarfile.TarFile, compressed: bool) -> Iterator[tuple[Sample, int | None]]:
    sample: Sample = {}
    last = "before its first member"
    try:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # which it would keep, all of them
            last = f"in or after its member {member.name!r}"
            if not member.isfile():
                continue
            key, extension = _split(member.name)
            if sample and sample["__key__"] != key:
                yield sample, None if compressed else member.offset
                sample = {}
            opened = tar.extractfile(member)
            assert opened is not None
            sample = {**(sample or {"__key__": key}), extension: opened.read()}
    except (tarfile.ReadError, EOFError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut off {last}: {error}. Write it again") from None
    if sample:
        yield sample, None if compressed else tar.offset
    # Read on from here, there is nothing but the end.


def _split(name: str) -> tuple[str, str]:
    """`images/000017.seg.png` is the `seg.png` of `images/000017`."""
    folder, slash, file = name.rpartition("/")
    base, _, extension = file.partition(".")
    return folder + slash + base, extension


def _is_compressed(file: IO[bytes]) -> bool:
    start = file.read(6)
    file.seek(0)
    return start[:2] == b"\x1f\x8b" or start[:3] == b"BZh" or start == b"\xfd7zXZ\x00"


def _files(paths: str | Path | Sequence[str | Path]) -> list[str]:
    given = [str(paths)] if isinstance(paths, (str, Path)) else [str(each) for each in paths]
    found = []
    for each in given:
        matching = sorted(glob.glob(each)) if glob.has_magic(each) else [each]  # noqa: PTH207
        if not matching or not all(Path(path).is_file() for path in matching):
            raise ConfigError(f"TarShards: there is no file {each!r}: paths are files, or a pattern of such")
        found += matching
    if not found:
        raise ConfigError("TarShards: no paths were given: there is nothing to read")
    return found
