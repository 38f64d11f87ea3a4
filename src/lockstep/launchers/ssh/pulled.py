"""Unpacks what was brought from the hosts of a pod: below one folder, and nowhere else."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

from lockstep.errors import LaunchError


def unpack(packed: Path, out: Path, name: str, everything: bool, size: int) -> list[Path]:
    """Files of a run's folder, below `out` and nowhere else; of a host that does not lead, its logs and profiles.

    The archive is the last `size` bytes of the file: what a shell said at its start comes before.
    """
    brought = []
    before = packed.stat().st_size - size
    if before < 0:
        raise LaunchError(f"{packed}: {-before} of {size} bytes did not arrive: the connection was lost; pull again")
    with packed.open("rb") as opened, _archive(opened, before) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts or path.parts[:1] != (name,):
                continue
            if not everything and path.parts[1:2] not in (("logs",), ("profile",)):
                continue
            content = tar.extractfile(member)
            place = out / path
            if content is None or (not everything and place.exists()):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                shutil.copyfileobj(content, file)
            brought.append(place)
    return brought


def _archive(opened: IO[bytes], before: int) -> tarfile.TarFile:
    opened.seek(before)
    try:
        return tarfile.open(fileobj=opened, mode="r:")
    except tarfile.ReadError as error:
        raise LaunchError(
            f"what the host sent is no archive ({error}): its shell prints something after a command, in a trap of a "
            "start-up file"
        ) from None
