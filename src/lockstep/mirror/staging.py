"""The folder on this host's disk that stands for a run's folder in a bucket.

All that a run does with its folder (locks, renames, reading back) it does there, in the user's cache; a mark in it says
which folder in a bucket it stands for. It can be deleted whenever no run is at work in it and the bucket has all of it.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import step_name
from lockstep.checkpoint.retention import judged_by
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.errors import ConfigError, LockstepError
from lockstep.mirror.bucket import CHECKPOINTS, Bucket, cannot_be_used, step_of
from lockstep.mirror.lease import last_token
from lockstep.mirror.mark import MARK_FILE, Mark, mark_of, own_place
from lockstep.mirror.url import Url
from lockstep.record import folder_lock, run_folder
from lockstep.record.run_folder import START_FILES

logger = logging.getLogger(__name__)

_TO_PULL = (*START_FILES, run_folder.SUMMARY_FILE, run_folder.TOPOLOGY_FILE, "metrics.jsonl", "logs", "code")


def new(out: Url, name: str, setting: str) -> Path:
    """Creates a folder with a name that nothing in the bucket has; ConfigError if the bucket cannot be used."""
    bucket = Bucket(out)
    bucket.probe(setting)
    parent, passed_over = _home(out), []
    with _reading(out, setting):
        while True:
            folder = run_folder.create(parent, name, setting)
            if not Bucket(out / folder.name).files(""):
                break
            passed_over.append(folder)  # so that the next one gets another number
    for each in passed_over:
        shutil.rmtree(each, ignore_errors=True)
    Mark(out / folder.name).write(folder)
    return folder


def existing_or_new(url: Url, setting: str, at: Path | None = None) -> Path:
    """Returns the folder that stands for a URL, whether or not there is a run yet; `at` is where it is to be."""
    bucket = Bucket(url)
    bucket.probe(setting)
    with _reading(url, setting):
        there = any(bucket.read(name) is not None for name in START_FILES)
    if there:
        return opened(url, setting, at=at)
    folder = at or _home(url.parent) / url.name
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if mark_of(folder) is None:
        Mark(url).write(folder)
    return folder


def start_files(url: Url, setting: str) -> dict[str, bytes]:
    """Returns the files that say how the run in a bucket was started; ConfigError if there is no run."""
    bucket = Bucket(url)
    with _reading(url, setting):
        read = {name: bucket.read(name) for name in START_FILES}
    found = {name: data for name, data in read.items() if data is not None}
    if not found:
        raise ConfigError(f"{url} is not the folder of a run: there is no {START_FILES[0]} in it")
    return found


@contextlib.contextmanager
def _reading(url: Url, setting: str) -> Iterator[None]:
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        raise ConfigError(cannot_be_used(url, setting, "read", error)) from None


def opened(url: Url, setting: str, step: int | None = None, best: bool = False, at: Path | None = None) -> Path:
    """Returns the folder here that stands for one in a bucket, with the checkpoint to resume: the newest unless said.

    If this host was the last to write there, its copy is the newest, and nothing is fetched. If another host was, what
    is left here is set aside in a folder next to it.
    """
    start_files(url, setting)  # refuses what is no run
    bucket, folder = Bucket(url), at or _home(url.parent) / url.name
    folder.mkdir(parents=True, exist_ok=True)
    with folder_lock.locked(folder), _reading(url, setting):
        mark = mark_of(folder)
        current = mark is not None and bool(mark.tokens) and last_token(bucket) in mark.tokens
        if not current:
            _set_contents_aside(folder)
            _pull_files(bucket, folder)
        # One of several may be in the bucket alone.
        if not current or best or (step is not None and step not in CheckpointStorage(folder / CHECKPOINTS).steps()):
            pull_checkpoint(bucket, folder, step, best)
        if not current:  # only now: what was interrupted is not taken for the newest
            token = last_token(bucket)
            Mark(url, (token,) if isinstance(token, str) else ()).write(folder)
    return folder


def outline(url: Url, folder: Path) -> None:
    """Fetches what says how a run went, with an empty folder in place of every whole checkpoint."""
    bucket = Bucket(url)
    _pull_files(bucket, folder)
    for path in bucket.to_try():
        (folder / CHECKPOINTS / step_name(step_of(path))).mkdir(parents=True, exist_ok=True)


def pull_checkpoint(bucket: Bucket, folder: Path, step: int | None = None, best: bool = False) -> int | None:
    """Fetches the checkpoint to restore, the newest whole one unless said; returns its step, or None.

    It gets its name here once all of it has arrived and matches its digests. One that does not is passed over.
    """
    damaged = {}
    for path in bucket.to_try(step, best, judged_by(folder)[1]):
        step = step_of(path)
        problem = _pull_folder(bucket, path, folder / CHECKPOINTS / step_name(step))
        if problem is None:
            return step
        damaged[step] = problem
        logger.warning("checkpoint %s, as it came from elsewhere, is damaged and is passed over: %s", path, problem)
    if damaged:
        raise CheckpointStorage(folder / CHECKPOINTS).none_usable(damaged)
    return None


def _pull_folder(bucket: Bucket, path: str, final: Path) -> str | None:
    """Returns what is wrong with it, if anything; then it is not kept."""
    arriving = final.with_name(f".partial-{final.name}-sync")
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir(parents=True)
    try:
        for name, size in bucket.files(path):
            bucket.fetch(name, size, arriving / Path(name).name)
        problem = manifest.problem(arriving)
        if problem is None:
            shutil.rmtree(final, ignore_errors=True)
            arriving.rename(final)
        return problem
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _pull_files(bucket: Bucket, folder: Path) -> None:
    for path in _TO_PULL:
        for name, size in bucket.files(path):
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            bucket.fetch(name, size, place)


def _home(out: Url) -> Path:
    """Returns the folder of the runs below a URL, which only the user can read, as with a bucket."""
    home = own_place(out / "any").parent
    runs = home.parent
    try:
        runs.parent.mkdir(parents=True, exist_ok=True)
        runs.mkdir(mode=0o700, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{home}: a run whose folder is in a bucket needs a folder on this host as well, and this one cannot be "
            f"made: {error.strerror}. XDG_CACHE_HOME names another place for it"
        ) from None
    return home


def _set_contents_aside(folder: Path) -> None:
    """Moves away what is here of a run that another host has resumed; the folder itself is held, and stays."""
    there = [each for each in folder.iterdir() if not each.name.startswith(".lock")]
    if not there:
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}-left-{number}")).exists():
        number += 1
    aside.mkdir()
    for each in there:
        each.rename(aside / each.name)
    logger.warning("%s: another host has resumed this run: what was here of it is in %s", folder, aside)
    with contextlib.suppress(OSError):
        (aside / MARK_FILE).unlink()  # it stands for nothing any more
