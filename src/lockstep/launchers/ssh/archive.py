"""What a push brings to a host: the files that changed, the names and digests of all, and an order if there is one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from pathlib import Path, PurePosixPath

from lockstep.errors import LaunchError
from lockstep.launchers.ssh.digests import Digests, digests

_MANIFEST, _ORDER, _CODE = "manifest.json", "order.json", "code/"
_LONGEST_JSON = 64 * 1024 * 1024


def write(archive: Path, folder: Path | None, wanted: Digests, there: Digests, order: str | None = None) -> list[str]:
    """Pack what a host lacks that has `there`; the names of the files that travel. Only the owner can read it."""
    changed = [name for name in wanted if there.get(name) != wanted[name]]
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}.partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    opened = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    with opened, tarfile.open(fileobj=opened, mode="w") as packed:
        _add(packed, _MANIFEST, json.dumps(dict(wanted)).encode())
        if order is not None:
            _add(packed, _ORDER, order.encode())
        for name in changed:
            assert folder is not None
            file = folder / name
            _add(packed, _CODE + name, file.read_bytes(), 0o755 if os.access(file, os.X_OK) else 0o644)
    partial.replace(archive)
    return changed


def unpack(archive: Path, code: Path) -> str | None:
    """Bring a host's code to what the archive says, and remove what is not part of it; the order, if there is one.

    The archive comes from whoever can log in here; still nothing of it is written anywhere but below `code`.
    """
    order: str | None = None
    with tarfile.open(archive, mode="r:") as packed:
        wanted: dict[str, str] = {}
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


def _add(packed: tarfile.TarFile, name: str, content: bytes, mode: int = 0o600) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    packed.addfile(member, io.BytesIO(content))


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
