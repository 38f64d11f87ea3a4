"""A run's folder: made once, by the launcher or rank 0, with its config, its summary and the code that it runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep import run_files
from lockstep.config.load import from_plain, parse_yaml, to_yaml
from lockstep.config.plain import LONGEST_CONFIG
from lockstep.config.schema import RunConfig
from lockstep.config.secrets import LEFT_OUT, is_secret, redacted
from lockstep.distributed.failure import Result
from lockstep.distributed.topology import Topology
from lockstep.errors import PREEMPTED_EXIT_CODE, ConfigError, FolderLost
from lockstep.record.writers import read_json, write_json

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
    inside = [place for place in _BY_PATH if run_files.is_folder(folder / place)]
    for name in (*_WRITTEN, *(f"{place}/{each.name}" for place in inside for each in (folder / place).iterdir())):
        if (folder / name).is_symlink():
            raise ConfigError(
                f"{folder / name} is a link, and Lockstep writes through no link in a run's folder. Remove it; to keep "
                "runs on another disk, name a folder there with --out"
            )
    for leftover in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.lstat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()


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


def read_summary(folder: Path, depth: int = 1) -> dict[str, Any]:
    """Returns summary.json; empty where there is none that can be read. `depth`: 2 for a trial of a sweep's folder."""
    return read_json(folder / SUMMARY_FILE, depth)


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


FOLDER, FACTS_FILE, DIFF_FILE = "code", "code.json", "uncommitted.diff"
_MOST_BYTES = 2**20  # of the source, and of the diff
_GIT_SECONDS = 3.0
_ASSIGNED = re.compile(r"""\b(?P<name>\w++)(?P<by>["']?\s*[:=]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,"')]+)""")
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def keep_code(folder: Path, root: Path, digests: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Writes the source files below `root`, the commit and the uncommitted changes to `code/N`.

    A later start with the same source writes nothing; with another source it warns of what changed, and adds a copy.
    """
    home = folder / FOLDER
    if home.is_symlink():  # nothing is written through a link
        return
    with contextlib.suppress(OSError):  # a run does not fail for it
        before = max(
            (int(each.name) for each in home.glob("[0-9]*") if each.name.isdecimal() and each.name.isascii()), default=0
        )
        files = read_json(home / str(before) / FACTS_FILE, depth=3).get("files")
        known = files if isinstance(files, dict) else {}
        changed = sorted(name for name, digest in digests.items() if known.get(name, digest) != digest)
        if before and not changed:
            return
        if changed:
            warn(
                f"the code changed since the run was last started: {', '.join(changed[:3])}"
                f"{' and more' if len(changed) > 3 else ''}. What it was is in {home / str(before)}"
            )
        _write(home / str(before + 1), root, digests)


def _write(place: Path, root: Path, digests: Mapping[str, str]) -> None:
    place.mkdir(parents=True)
    room = _MOST_BYTES
    for name in digests:
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        if len(text) < room:
            room -= len(text)
            run_files.write(place / name, without_secrets(text), depth=2 + len(Path(name).parts))
    commit = _git(root, "rev-parse", "HEAD")
    diff = _git(root, "diff", "--no-ext-diff", "--no-textconv", "HEAD") if commit is not None else None
    if diff:
        cut = "\n(cut here: the rest was left out)\n" if len(diff) > _MOST_BYTES else ""
        run_files.write(place / DIFF_FILE, without_secrets(diff[:_MOST_BYTES]) + cut, depth=3)
    facts = {"commit": commit.strip() if commit else None, "uncommitted_changes": bool(diff), "files": dict(digests)}
    write_json(place / FACTS_FILE, facts, depth=3)


def without_secrets(text: str) -> str:
    """Hides values of keys and passwords: those assigned to such names, and those of the environment."""
    return "\n".join(redacted([_ASSIGNED.sub(_hidden, line) for line in text.split("\n")]))


def _hidden(found: re.Match[str]) -> str:
    literal = found["value"][0] in "\"'" or "=" not in found["by"]
    return f"{found['name']}{found['by']}{LEFT_OUT!r}" if literal and is_secret(found["name"]) else found[0]


def _git(root: Path, *arguments: str) -> str | None:
    """Returns git's output; None where there is no git, no repository or no answer in time."""
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(root), *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", errors="replace")
