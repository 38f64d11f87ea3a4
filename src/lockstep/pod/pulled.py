"""Unpacks what was brought from the hosts of a pod: below one folder, and nowhere else."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path, PurePosixPath


def unpack(packed: Path, out: Path, name: str, everything: bool) -> list[Path]:
    """Files of a run's folder, below `out` and nowhere else; of a host that does not lead, its logs and profiles."""
    brought = []
    with tarfile.open(packed, mode="r:") as tar:
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
