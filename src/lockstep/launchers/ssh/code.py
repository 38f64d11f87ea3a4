"""Files that travel between this machine and the hosts of a pod, as tar archives, always below one folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from lockstep.config.objects import require_travelling, travelling
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh.ssh import encoded

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig

# A larger folder has a dataset or a checkpoint in it, which would be pushed to every host by mistake.
MOST_BYTES = 512 * 1024 * 1024
_CODE, _ORDER = "code", "order.json"


@dataclass(frozen=True)
class Code:
    """The folder whose files travel, and the name of the task on the hosts."""

    folder: Path | None
    task: str

    @classmethod
    def of(cls, config: RunConfig) -> Code:
        module, _, name = config.task.type.rpartition(":")
        if not module.endswith(".py"):
            require_travelling(config.task)
            return cls(None, config.task.type)  # a module that is installed on the hosts too
        return cls(Path(module).parent, f"{Path(module).name}:{name}")

    def task_there(self, path: str) -> str:
        return self.task if self.folder is None else str(PurePosixPath(path) / _CODE / self.task)


def pack(archive: Path, folder: Path | None, order: str = "") -> int:
    """Packs the code in a folder and the order of a job, readable by the owner alone; returns the number of files."""
    import tarfile

    names = list(travelling(folder)) if folder is not None else []
    if folder is not None and sum((folder / name).stat().st_size for name in names) > MOST_BYTES:
        raise ConfigError(
            f"{folder}: the task's folder has more than {MOST_BYTES >> 20} MB, and all of it would be copied to every "
            "host. Put data elsewhere, or the task into a separate folder"
        )
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    opened = os.fdopen(os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    with opened, tarfile.open(fileobj=opened, mode="w", dereference=True) as packed:
        for name in names:
            assert folder is not None
            packed.add(folder / name, f"{_CODE}/{name}")
        last = tarfile.TarInfo(_ORDER)
        last.size = len(order.encode())
        packed.addfile(last, io.BytesIO(order.encode()))
    return len(names)


def unpack(archive: Path, code: Path) -> str:
    """Replaces the code on a host by that of an archive, and returns the order in it."""
    import tarfile

    fresh, order = code.with_name("code.new"), None
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / _CODE).mkdir(mode=0o700, parents=True)
    try:
        with tarfile.open(archive, mode="r:") as packed:
            for member in packed:
                if member.name == _ORDER and (content := packed.extractfile(member)) is not None:
                    order = content.read().decode()
                elif member.isfile() and PurePosixPath(member.name).parts[:1] == (_CODE,):
                    packed.extract(member, fresh, filter="data")
        if order is None:  # it is the last
            raise tarfile.ReadError("it has no end")
    except (tarfile.TarError, OSError) as error:
        raise LaunchError(f"{archive}: did not arrive as it was sent ({error}): start again") from None
    shutil.rmtree(code, ignore_errors=True)
    (fresh / _CODE).rename(code)
    fresh.rmdir()
    return order


def pack_run(run: Path, everything: bool, out: BinaryIO) -> int:
    """Writes a run's folder as an archive; without `everything`, only its logs and profiles. Returns its size."""
    import tarfile

    parts = [run] if everything else [run / "logs", run / "profile"]
    with tarfile.open(fileobj=out, mode="w|") as packed:
        for folder, _, names in (found for part in parts for found in os.walk(part)):
            for name in sorted(names, reverse=True):  # a checkpoint's manifest comes after what it lists
                file = (Path(folder) / name).relative_to(run)
                if ".partial" not in str(file):
                    with contextlib.suppress(FileNotFoundError):  # the run goes on, and removes old checkpoints
                        packed.add(run / file, run.name / file)
    return -(-packed.offset // tarfile.RECORDSIZE) * tarfile.RECORDSIZE  # it is filled up


def unpack_run(packed: Path, out: Path, name: str, answer: dict[str, Any], everything: bool) -> list[Path]:
    """Unpacks a run's folder that a host sent before its answer; without `everything`, only what is not here yet.

    What the host's shell printed at its start comes before.
    """
    import tarfile

    unpacked = []
    with packed.open("rb") as opened:
        opened.seek(packed.stat().st_size - len(f"{encoded(answer)}\n") - answer["size"])
        with tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if not member.isfile() or path.is_absolute() or ".." in path.parts or path.parts[:1] != (name,):
                    continue
                if everything or not (out / path).exists():
                    tar.extract(member, out, filter="data")
                    unpacked.append(out / path)
    return unpacked
