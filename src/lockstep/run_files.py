"""Opens files of a run's folder, which may come from a stranger: every reader and writer of run folders goes through
here.

No link inside the folder is followed, only regular files are opened, no open waits (a pipe would), and a new file has
a random name until it is complete. `depth` is the number of trailing path components that belong to the run's folder: 1
for RUN/summary.json, 3 for RUN/checkpoints/step-00000010/manifest.json. The user named the components before those, and
links among them are followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_RECORD = 16_000_000  # bytes of summary.json, live.json, topology.json
LONGEST_LINE = 4_000_000  # a row of ten thousand metrics has less than a megabyte
_LONGEST_SKIP, _PIECE = 200_000_000, 4_000_000
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


class BadFile(OSError):
    """Reports a file of the wrong kind or size: what is there is wrong, not the access to it."""


def read_text(path: Path, longest: int = LONGEST_RECORD, depth: int = 1) -> str:
    """Returns the text of a file; raises OSError where it cannot be read or is not UTF-8."""
    try:
        return read_bytes(path, longest, depth).decode()
    except UnicodeDecodeError as error:
        found = f"0x{error.object[error.start]:02x}"
        raise OSError(errno.EILSEQ, f"not text in UTF-8: byte {found} at position {error.start}", str(path)) from None


def read_bytes(path: Path, longest: int, depth: int = 1) -> bytes:
    """Returns the bytes of a file; raises OSError where it cannot be read or is longer."""
    with open_file(path, depth) as stream:
        data = stream.read(longest + 1)
    if len(data) > longest:
        raise BadFile(errno.EFBIG, f"it has more than {longest} bytes", str(path))
    return data


def read_end(path: Path, longest: int, depth: int = 1) -> bytes:
    """Returns the last bytes of a file."""
    with open_file(path, depth) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - longest))
        return stream.read()


def open_file(path: Path, depth: int = 1) -> BinaryIO:
    """Opens a regular file for reading."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY, depth), "rb")


def open_descriptor(path: Path, flags: int, depth: int = 1) -> int:
    """Opens a regular file. A file that is written in place must have no second name, which may be anywhere."""
    if not depth:
        return _opened(str(path), flags, None, path)
    with folder(path.parent, depth - 1) as descriptor:
        return open_at(descriptor, path.name, flags, path)


def open_at(descriptor: int, name: str, flags: int, path: Path | None = None) -> int:
    """Opens a regular file by the descriptor of its folder; `path` names it in messages."""
    return _opened(name, flags | os.O_NOFOLLOW, descriptor, path or Path(name))


def append(path: Path, depth: int = 1) -> int:
    """Opens a file to append to, and creates it where it is missing."""
    return open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, depth)


def write(path: Path, data: bytes | str, depth: int = 1) -> None:
    """Replaces a file so that nobody sees it half written; makes the folders below the run's folder."""
    with folder(path.parent, depth - 1, make=True) as descriptor:
        write_at(descriptor, path.name, data)


def write_at(descriptor: int, name: str, data: bytes | str) -> None:
    """Replaces a file of the folder with this descriptor; a link of that name is replaced, not followed."""
    temporary = f".{secrets.token_hex(8)}.partial"
    opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=descriptor)
    try:
        with os.fdopen(opened, "wb") as stream:
            stream.write(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
        os.replace(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=descriptor)
        raise


@contextlib.contextmanager
def folder(path: Path, depth: int = 1, make: bool = False) -> Iterator[int]:
    """Opens a folder, of which the last `depth` components are no links; `make` creates those that are missing."""
    if depth <= 0:
        descriptor = os.open(path, _FOLDER)
    else:
        with folder(path.parent, depth - 1, make) as parent:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path.name, dir_fd=parent)
            try:
                descriptor = os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            except OSError as error:
                raise _named(error, path.name, parent, path) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def size(path: Path, depth: int = 1) -> int:
    """Returns the size of a regular file, without opening it."""
    with folder(path.parent, depth - 1) as parent:
        found = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
    _require_regular(found, path)
    return found.st_size


def is_file(path: Path, depth: int = 1) -> bool:
    try:
        size(path, depth)
    except OSError:
        return False
    return True


def is_folder(path: Path, depth: int = 1) -> bool:
    try:
        with folder(path, depth):
            return True
    except OSError:
        return False


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yields each line with the number of bytes it takes in the file. A line that is too long is yielded empty; one
    that has no end within `_LONGEST_SKIP` is the last."""
    while line := stream.readline(LONGEST_LINE):
        length, skipped = len(line), 0
        if length == LONGEST_LINE and not line.endswith(b"\n"):
            line, skipped = b"\n", _skip_line(stream)
        yield length + skipped, line
        if skipped >= _LONGEST_SKIP:
            return


def _skip_line(stream: BinaryIO) -> int:
    """Moves behind the end of the line and returns by how many bytes."""
    skipped = 0
    while skipped < _LONGEST_SKIP and (piece := stream.read(_PIECE)):
        end = piece.find(b"\n") + 1
        if end:
            stream.seek(end - len(piece), os.SEEK_CUR)
            return skipped + end
        skipped += len(piece)
    return skipped


def _opened(name: str, flags: int, parent: int | None, path: Path) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=parent)
    except OSError as error:
        raise _named(error, name, parent, path) from None
    try:
        found = os.fstat(descriptor)
        _require_regular(found, path)
        if flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
            raise BadFile(errno.EMLINK, f"it has {found.st_nlink} names (hard links): copy it first", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _named(error: OSError, name: str, parent: int | None, path: Path) -> OSError:
    """Returns what to raise for a failed open: the system's own words for a link or a socket do not name it."""
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        kind = 0
    if kind in _KINDS and error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EMLINK):
        return BadFile(errno.ELOOP, f"it is {_KINDS[kind]}, and no link in a run's folder is followed"
                       if kind == stat.S_IFLNK else f"it is {_KINDS[kind]}, not a regular file", str(path))  # fmt: skip
    return type(error)(error.errno, error.strerror, str(path))


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
        raise BadFile(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
