"""Files that travel between this machine and the hosts of a pod, always below one folder and nowhere else.

A push carries the files that a host lacks, the digests of all files, and the order of a job if there is one. Every file
is read every time, here and on every host: a thousand take a few hundredths of a second, and no timestamp is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lockstep.config.objects import travelling
from lockstep.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    import tarfile

    from lockstep.config.schema import RunConfig

# A larger folder has a dataset or a checkpoint in it, which would be pushed to every host by mistake.
MOST_BYTES = 512 * 1024 * 1024
_CHUNK = 1024 * 1024
_MANIFEST, _ORDER, _CODE = "manifest.json", "order.json", "code/"
_LONGEST_JSON = 64 * 1024 * 1024

Digests = Mapping[str, str]


@dataclass(frozen=True)
class Code:
    """The folder whose files travel, and the name of the task on the hosts."""

    folder: Path | None
    task: str

    @classmethod
    def of(cls, config: RunConfig) -> Code:
        module, _, name = config.task.type.rpartition(":")
        if not module.endswith(".py"):
            return cls(None, config.task.type)  # a module that is installed on the hosts too
        return cls(Path(module).parent, f"{Path(module).name}:{name}")

    def digests(self) -> dict[str, str]:
        return digests(self.folder) if self.folder is not None else {}

    def task_there(self, path: str) -> str:
        return self.task if self.folder is None else str(PurePosixPath(path) / "code" / self.task)


def digests(folder: Path, only_travelling: bool = True) -> dict[str, str]:
    """Returns the digest of every file by its path in a folder; `only_travelling` leaves out what is not pushed."""
    found: dict[str, str] = {}
    if not folder.is_dir():
        return found
    left = MOST_BYTES
    for name in travelling(folder) if only_travelling else _all_files(str(folder)):
        with (folder / name).open("rb", buffering=0) as file:
            left -= os.fstat(file.fileno()).st_size
            if left < 0:
                raise ConfigError(
                    f"{folder}: the task's folder has more than {MOST_BYTES >> 20} MB, and all of it would be copied "
                    "to every host. Put data elsewhere, or the task into a separate folder"
                )
            running = hashlib.sha256()
            while data := file.read(_CHUNK):
                running.update(data)
            found[name] = running.hexdigest()
    return found


def digest(files: Digests) -> str:
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def _all_files(folder: str, below: str = "") -> Iterator[str]:
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.is_dir():
            if not entry.is_symlink() and entry.name != "__pycache__":
                yield from _all_files(entry.path, f"{below}{entry.name}/")
        elif entry.is_file():
            yield below + entry.name


def pack(archive: Path, folder: Path | None, wanted: Digests, there: Digests, order: str | None = None) -> list[str]:
    """Packs what a host with `there` lacks, readable by the owner alone; returns the names of the files."""
    import tarfile

    changed = [name for name in wanted if there.get(name) != wanted[name]]
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}.partial")
    partial.unlink(missing_ok=True)
    opened = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    with opened, tarfile.open(fileobj=opened, mode="w") as packed:
        _add(packed, tarfile.TarInfo(_MANIFEST), json.dumps(dict(wanted)).encode())
        if order is not None:
            _add(packed, tarfile.TarInfo(_ORDER), order.encode())
        for name in changed:
            assert folder is not None
            member = tarfile.TarInfo(_CODE + name)
            member.mode = 0o755 if os.access(folder / name, os.X_OK) else 0o644
            _add(packed, member, (folder / name).read_bytes())
    partial.replace(archive)
    return changed


def _add(packed: tarfile.TarFile, member: tarfile.TarInfo, content: bytes) -> None:
    member.size = len(content)
    packed.addfile(member, io.BytesIO(content))


def unpack(archive: Path, code: Path) -> str | None:
    """Makes the code on a host what the archive says, removes all other files, and returns the order, if any."""
    import tarfile

    order: str | None = None
    wanted: dict[str, str] = {}
    with tarfile.open(archive, mode="r:") as packed:
        for member in packed:
            content = packed.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            if member.name == _MANIFEST:
                wanted = {str(name): str(value) for name, value in json.loads(content.read(_LONGEST_JSON)).items()}
            elif member.name == _ORDER:
                order = content.read(_LONGEST_JSON).decode()
            elif member.name.startswith(_CODE):
                _put(code, member.name.removeprefix(_CODE), content.read(), member.mode & 0o755)
    _remove_others(code, wanted)
    have = digests(code, only_travelling=False)
    wrong = sorted(name for name in wanted if have.get(name) != wanted[name])
    if wrong:
        raise LaunchError(
            f"{code}: {len(wrong)} files are not what was pushed ({wrong[0]}): the disk is full, or somebody else "
            "writes there. Push again"
        )
    return order


def _put(code: Path, name: str, content: bytes, mode: int) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise LaunchError(f"{name!r}: leads out of the folder that code is pushed to")
    file = code / path
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.pushed")
    partial.write_bytes(content)
    partial.chmod(mode)
    partial.replace(file)


def _remove_others(code: Path, wanted: Digests) -> None:
    for file in code.rglob("*") if code.is_dir() else ():
        name = str(PurePosixPath(file.relative_to(code)))
        if not file.is_dir() and name not in wanted and "__pycache__" not in file.parts:
            file.unlink(missing_ok=True)


def unpack_run(packed: Path, out: Path, name: str, everything: bool, size: int) -> list[Path]:
    """Unpacks a run's folder that was fetched from a host; without `everything`, only its logs and profiles.

    The archive is the last `size` bytes of the file: what the host's shell printed at its start comes before.
    """
    import tarfile

    before = packed.stat().st_size - size
    if before < 0:
        raise LaunchError(f"{packed}: {-before} of {size} bytes did not arrive: the connection was lost; pull again")
    unpacked = []
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(packed.open("rb"))
        opened.seek(before)
        try:
            tar = stack.enter_context(tarfile.open(fileobj=opened, mode="r:"))
        except tarfile.ReadError as error:
            raise LaunchError(
                f"what the host sent is no archive ({error}): its shell prints something after a command, in a trap "
                "of a start-up file"
            ) from None
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts or path.parts[:1] != (name,):
                continue
            if not everything and path.parts[1:2] not in (("logs",), ("profile",)):
                continue
            content, place = tar.extractfile(member), out / path
            if content is None or (not everything and place.exists()):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                shutil.copyfileobj(content, file)
            unpacked.append(place)
    return unpacked
