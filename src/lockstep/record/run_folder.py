"""A run's folder: named once, by the launcher or rank 0, and passed on; ranks never each make their own."""

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
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError, FolderLost

RUNNING = "running"  # the status of a summary whose run has not said how it ended
CONFIG_FILE, SUMMARY_FILE, TOPOLOGY_FILE = "config.yaml", "summary.json", "topology.json"
_WRITTEN = (
    CONFIG_FILE, SUMMARY_FILE, TOPOLOGY_FILE, "launch.yaml", "metrics.jsonl", "evaluations.jsonl", "live.json",
    "timeline.jsonl", "timeline-driver.jsonl", "lags.jsonl", "report.html", "checkpoints", "samples", "loggers", "code",
    "logs", "profile", "tensorboard", "wandb", "mlruns",
)  # fmt: skip
_BY_PATH = ("logs", "profile", "tensorboard")
_LEFTOVER_SECONDS = 60.0


def create(out: Path, name: str, setting: str = "--out") -> Path:
    """A new folder `<name>-<timestamp>`; a second run in the same second gets a number. `setting` named `out`."""
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
            raise ConfigError(
                f"{setting} {out}: the run's folder cannot be made there: {error.strerror}. "
                f"Name a writable folder with {setting}"
            ) from None
        (folder / "logs").mkdir()
        return folder
    raise ConfigError(f"{setting} {out}: a thousand runs were started in this second")


def require_folder(out: Path, setting: str) -> None:
    """Make the folder that runs are made in, so that a mistake in its name is told before anything is started."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting} {out}: the run's folder cannot be made there: {error.strerror}. "
            f"Name a writable folder with {setting}"
        ) from None


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
    """The config of an existing run."""
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
    """What summary.json says; nothing where there is none, or half of one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        summary = json.loads(run_files.read_text(folder / SUMMARY_FILE))
        return summary if isinstance(summary, dict) else {}
    return {}


def record(folder: Path, status: str, reason: str | None) -> None:
    """Say in summary.json how the run ended, whatever rank 0 got to write there before."""
    summary = {**read_summary(folder), "status": status, "reason": reason}
    with contextlib.suppress(ConfigError):  # a full disk must not hide the failure that it caused
        write_text(folder / SUMMARY_FILE, json.dumps(summary, indent=1) + "\n")


def note_end(folder: Path, result: Result) -> None:
    """In summary.json, what rank 0 did not get to write of the end of a launch."""
    if result.failure is not None:
        record(folder, "failed", result.failure.cause)
    elif result.nothing_to_save:
        record(folder, "interrupted", "asked to stop before the first step")
    elif result.exit_code not in (0, PREEMPTED_EXIT_CODE):
        record(folder, "interrupted", "asked to end at once")


def has_begun(folder: Path) -> None:
    """A summary from the first moment on, which is all that a run leaves whose every process is killed at once."""
    if not read_summary(folder):
        record(folder, RUNNING, None)


def has_ended_before(summary: Mapping[str, Any]) -> bool:
    """Whether a summary is that of a start that came to an end."""
    return bool(summary) and summary.get("status") != RUNNING


class Anchor:
    """A run's folder as it is now, to be told from whatever has its name later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Held open: its number is nobody else's as long as it is, and the system knows where it is moved to.
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raise FolderLost where the folder was moved or deleted."""
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
        raise FolderLost(self._told(deleted=opened.st_nlink == 0))

    def close(self) -> None:
        os.close(self._descriptor)

    def _told(self, deleted: bool) -> str:
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
