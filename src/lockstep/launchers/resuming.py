"""Where a run that is resumed has its folder, and what this process knows of it before the ranks have met.

A folder may be in a bucket, or on the disk of rank 0's host alone: whoever does not see it gets what says how the run
was started, and leaves the rest to rank 0.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.url import Url

if TYPE_CHECKING:
    from lockstep.distributed.topology import Topology
    from lockstep.launchers.restore_point import Wanted


@dataclass(frozen=True)
class Resumed:
    """A run that is to go on."""

    start_files: Path  # a folder with what says how it was started
    folder: Callable[[], Path]  # its folder on this host; for the launcher or rank 0 alone


@contextlib.contextmanager
def found(run_dir: Path | Url, wanted: Wanted, topology: Topology | None, dry_run: bool) -> Iterator[Resumed]:
    """The run in a folder or at a URL; `topology` where somebody else has started this process as a rank."""
    if isinstance(run_dir, Path):
        if topology is not None and topology.host_count > 1:
            from lockstep.record.run_folder import brought_here

            brought_here(run_dir, topology)
        yield Resumed(run_dir, lambda: run_dir)
        return
    from lockstep.mirror import staging

    url = run_dir
    if topology is None and not (dry_run and wanted.is_newest):
        try:
            folder = staging.opened(url, "RUN_DIR", wanted.step, wanted.best)
        except CheckpointError as error:
            if wanted.step is None:
                raise
            raise ConfigError(f"--step {wanted.step}: {error}") from None
        yield Resumed(folder, lambda: folder)
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-") as files:
        for name, data in staging.start_files(url, "RUN_DIR").items():
            (Path(files) / name).write_bytes(data)
        if topology is not None and not (Path(files) / "config.yaml").exists():
            raise ConfigError(
                f"{url}: this run belongs to a script: start that with the launcher at hand, and have it call "
                f"lockstep.launch(..., folder={str(url)!r})"
            )
        yield Resumed(Path(files), lambda: staging.opened(url, "RUN_DIR", wanted.step, wanted.best))
