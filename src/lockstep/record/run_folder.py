"""A run's folder: made once, by the launcher or rank 0, with its config and summary."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep import run_files
from lockstep.config.load import from_plain, parse_yaml, to_yaml
from lockstep.config.plain import LONGEST_CONFIG
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Result
from lockstep.distributed.topology import Topology
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError, FolderLost

RUNNING = "running"  # the status until the end is written
CONFIG_FILE, SUMMARY_FILE, TOPOLOGY_FILE = "config.yaml", "summary.json", "topology.json"
_WRITTEN = (
    CONFIG_FILE, SUMMARY_FILE, TOPOLOGY_FILE, "launch.yaml", "metrics.jsonl", "evaluations.jsonl", "live.json",
    "timeline.jsonl", "timeline-driver.jsonl", "lags.jsonl", "report.html", "checkpoints", "samples", "loggers", "code",
    "logs", "profile", "tensorboard", "wandb", "mlruns",
)  # fmt: skip
_BY_PATH = ("logs", "profile", "tensorboard")
_LEFTOVER_SECONDS = 60.0


def create(out: Path, name: str, setting: str = "--out") -> Path:
    """Makes a folder `<name>-<timestamp>`, with a number for a second run in the same second. `setting` named `out`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = out / (f"{name}-{stamp}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            if not folder.is_dir():
                raise ConfigError(f"{setting} {out}: {error.filename} is in the way: it is not a folder") from None
            continue
        except OSError as error:
            raise _not_made(out, setting, error) from None
        (folder / "logs").mkdir()
        return folder
    raise ConfigError(f"{setting} {out}: a thousand runs were started in this second")


def require_folder(out: Path, setting: str) -> None:
    """Makes the folder for runs, so that a mistake in its name is reported before anything is started."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(out, setting, error) from None


def _not_made(out: Path, setting: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{setting} {out}: the run's folder cannot be made there: {error.strerror}. "
        f"Name a writable folder with {setting}"
    )


def check_links(folder: Path) -> None:
    """Refuses a folder in which what a run writes is a link; removes temporary files that a killed process left.

    Lockstep's own files are opened without following links. Loggers and profilers of others write theirs by path, so a
    link must not be there when the run begins.
    """
    for name in (*_WRITTEN, *(f"{place}/{each}" for place in _BY_PATH for each in _entries(folder / place))):
        if (folder / name).is_symlink():
            raise ConfigError(
                f"{folder / name} is a link, and Lockstep writes through no link in a run's folder. Remove it; to keep "
                "runs on another disk, name a folder there with --out"
            )
    for leftover in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.lstat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()


def _entries(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir()) if run_files.is_folder(folder) else []


def write_config(folder: Path, config: RunConfig) -> None:
    text = "# What this run was started with, resolved. `lockstep resume` reads it.\n"
    text += to_yaml(config.plain())
    write_text(folder / CONFIG_FILE, text)


def write_text(file: Path, text: str, depth: int = 1) -> None:
    """Replaces a file of a run's folder so that it is never seen half written."""
    try:
        run_files.write(file, text, depth)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def read_config(folder: Path) -> RunConfig:
    return from_plain(read_plain_config(folder), str(folder / CONFIG_FILE))


def read_plain_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        raw = parse_yaml(run_files.read_text(file, LONGEST_CONFIG))
    except FileNotFoundError:
        there = "there is no such folder" if not folder.is_dir() else f"it holds no {CONFIG_FILE}"
        raise ConfigError(f"{folder} is not the folder of a run: {there}") from None
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: not a config")
    return raw


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns summary.json; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        summary = json.loads(run_files.read_text(folder / SUMMARY_FILE))
        return summary if isinstance(summary, dict) else {}
    return {}


def record(folder: Path, status: str, reason: str | None) -> None:
    """Writes to summary.json how the run ended, over what rank 0 wrote before."""
    summary = {**read_summary(folder), "status": status, "reason": reason}
    with contextlib.suppress(ConfigError):  # a full disk must not hide the failure that it caused
        write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")


def note_end(folder: Path, result: Result) -> None:
    """Writes to summary.json how a launch ended, where rank 0 could not."""
    if result.failure is not None:
        record(folder, "failed", result.failure.cause)
    elif result.nothing_to_save:
        record(folder, "interrupted", "asked to stop before the first step")
    elif result.exit_code not in (0, PREEMPTED_EXIT_CODE):
        record(folder, "interrupted", "asked to end at once")


def has_begun(folder: Path) -> None:
    """Writes a summary from the start: a run whose processes are all killed at once leaves nothing else."""
    if not read_summary(folder):
        record(folder, RUNNING, None)


def has_ended_before(summary: Mapping[str, Any]) -> bool:
    return bool(summary) and summary.get("status") != RUNNING


class Anchor:
    """A run's folder as it is now, to detect that it was moved, deleted or replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # While it is open, its number is unique, and the system knows where it was moved to.
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        opened = os.fstat(self._descriptor)
        try:
            found = self.folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a file system that does not answer is another matter
            return
        else:
            if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino):
                return
        raise FolderLost(self._message(deleted=opened.st_nlink == 0))

    def close(self) -> None:
        os.close(self._descriptor)

    def _message(self, deleted: bool) -> str:
        with contextlib.suppress(OSError):
            now = os.readlink(f"/proc/self/fd/{self._descriptor}")  # noqa: PTH115  a name, not a path to go by
            if not deleted and not now.endswith(" (deleted)"):
                return (
                    f"{self.folder}: the run's folder was moved to {now} while the run was at work; nothing is written "
                    f"to its old place. Go on there: lockstep resume {shlex.quote(now)}"
                )
        return (
            f"{self.folder}: the run's folder was deleted while the run was at work, with all that was saved in it. "
            "Start the run anew"
        )


# The config of `lockstep train`, or the start of a script.
START_FILES = (CONFIG_FILE, "launch.yaml")
_WAIT_SECONDS = 120.0


def brought_here(folder: Path, topology: Topology) -> None:
    """Brings rank 0's start files over the store to hosts that do not see its disk: ranks need them to meet."""
    from lockstep.distributed.rendezvous import from_rank_0

    place, here = topology.place, {}
    try:
        for name in START_FILES:
            with contextlib.suppress(FileNotFoundError):
                here[name] = run_files.read_text(folder / name)
        sent = from_rank_0(topology, _WAIT_SECONDS, "how the run was started", json.dumps(here).encode())
        if place.rank == 0:
            return
        found = json.loads(sent)
        for name in START_FILES:
            if name in found and found[name] != here.get(name):
                folder.mkdir(parents=True, exist_ok=True)
                run_files.write(folder / name, found[name])
    except OSError as error:
        raise ConfigError(
            f"rank {place.rank} on {place.host}: {folder}: the run's folder, for this rank's log, cannot be used on "
            f"this host: {error.strerror or error}. Make it writable for uid {os.getuid()}"
        ) from None
