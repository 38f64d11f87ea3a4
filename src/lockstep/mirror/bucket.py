"""A run's folder in object storage, through fsspec.

There is no rename in a bucket, and an object appears whole or not at all. So a checkpoint counts there only if its
manifest is there and all files that it names are as long as it says: the manifest is written last and deleted first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import MANIFEST_FILE, STEP_PREFIX, Damaged, step_name
from lockstep.checkpoint.retention import Saved, best_first, to_delete
from lockstep.config.schema import Keep
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.lease import BucketLease
from lockstep.mirror.url import SCHEMES, Url

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_KEPT = "kept-"  # before the name of the only whole checkpoint, copied while its step is uploaded again
# Of one request, which the caller repeats if the service does not answer.
_CONNECT_SECONDS, _ANSWER_SECONDS = 10, 60
_LONG = 8 * 1024 * 1024  # bytes of a file, so that it is sent in parts
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _ANSWER_SECONDS,
            "retries": {"max_attempts": 2},
            # Our digests are checked; some services answer a part of an object with the checksum of all of it.
            "response_checksum_validation": "when_required",
        },
    },
    "gs": {"timeout": _ANSWER_SECONDS},
    "file": {"auto_mkdir": True},
}


class Bucket:
    """What is below a URL. Paths are relative to it, with slashes.

    Errors are those of the service; `said` turns one into a sentence.

    With a lease, every change is made only while the lease is held.
    """

    def __init__(self, url: Url, lease: BucketLease | None = None) -> None:
        self.url, self._lease = url, lease
        self._fs = _file_system(url.scheme)
        self._branch: dict[str, Any] = {"base": sys.maxsize}  # where this writer resumed
        self._sent: dict[str, str] = {}  # files of checkpoints that were sent -> the digest of their checkpoint
        self._manifests: dict[int, dict[str, Any]] = {}  # those that nobody but the holder of the lease changes
        self._places: dict[int, str] = {}  # the path of the checkpoint of each step

    # Files

    def files(self, path: str) -> list[tuple[str, int]]:
        return sorted((name, int(size)) for name, size in self._listed(path).items())

    def fetch(self, path: str, size: int, place: Path) -> None:
        self._fs.get_file(self._at(path), str(place))
        if size == 0:
            place.touch()  # of nothing, some file systems of fsspec make nothing

    def send(self, file: Path, path: str) -> None:
        self._check_lease()
        # Short files are read here first: a log may grow between two looks at its size.
        if file.stat().st_size > _LONG:
            self._fs.put_file(str(file), self._at(path))
        else:
            self._fs.pipe_file(self._at(path), file.read_bytes())

    def read(self, path: str) -> bytes | None:
        """Returns the content of a small object, or None if there is none."""
        try:
            return bytes(self._fs.cat_file(self._at(path)))
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        self._check_lease()
        self._fs.pipe_file(self._at(path), data)

    def delete(self, path: str) -> None:
        self._check_lease()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def version(self, path: str) -> str | None:
        """Returns what `replace` takes; None if there is no such object, or the store has no versions."""
        if self.url.scheme != "s3":
            return None
        try:
            return str(self._fs.info(self._at(path))["ETag"])
        except FileNotFoundError:
            return None

    def replace(self, path: str, data: bytes, version: str | None) -> bool:
        """Writes an object unless it changed since it had this version; returns False if it did.

        Stores without conditional writes ignore the condition.
        """
        condition = {} if self.url.scheme != "s3" else {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        try:
            self._fs.pipe_file(self._at(path), data, **condition)
        except Exception as error:
            response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
            code = str(response.get("Error", {}).get("Code", ""))
            changed = isinstance(error, FileExistsError) or code in ("PreconditionFailed", "ConditionalRequestConflict")
            if changed or (version and isinstance(error, FileNotFoundError)):
                return False
            if not condition or code != "NotImplemented":
                raise
            self._fs.pipe_file(self._at(path), data)
        return True

    # Checkpoints

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        """Returns the paths of checkpoints that look whole, in the order to try: of a step, the best, else the newest.

        Raises CheckpointError if the step has none, or if there are some and none looks whole.
        """
        looked = self._look()
        whole = [each for each in looked.values() if isinstance(each, Saved)]
        newest = max((each.step for each in whole), default=-1)
        for each, problem in looked.items():
            if isinstance(problem, Damaged) and each > newest and whole and step is None:
                logger.warning("%s/%s is passed over: %s", self.url, _path(each), problem)
        if step is not None:
            if step not in [each.step for each in whole]:
                there = ", ".join(str(each.step) for each in whole) or "none"
                raise CheckpointError(
                    f"{self.url}: there is no whole checkpoint of step {step} (steps with one: {there})"
                )
            return [self._places[step]]
        if looked and not whole:
            problems = "; ".join(f"{step_name(number)}: {problem}" for number, problem in looked.items())
            raise CheckpointError(
                f"{self.url}/{CHECKPOINTS}: there are checkpoints and none is whole, so nothing was begun anew "
                f"({problems}). Put back a good one; to start over on purpose, move or delete them"
            )
        chosen = best_first(whole, mode) if best else whole[::-1]
        return [self._places[each.step] for each in chosen]

    def digests(self) -> dict[int, str]:
        """Returns the digests of the whole checkpoints by step."""
        return {step: str(self._manifests[step]["digest"]) for step, each in self._look().items()
                if isinstance(each, Saved)}  # fmt: skip

    def highest_generation(self) -> int:
        """Returns the generation of the last writer that published a checkpoint; 0 if there is none."""
        self._look()
        return max((_lease(entry)[0] for entry in self._manifests.values()), default=0)

    def publish(self, folder: Path, path: str) -> None:
        """Sends a checkpoint, so that it counts only once all of it is there."""
        entry, there = manifest.read(folder), self._listed(path)
        if f"{path}/{MANIFEST_FILE}" in there:  # of the same step, saved before
            if [each.step for each in self._look().values() if isinstance(each, Saved)] == [step_of(path)]:
                self._copy(path, _kept(path))
            self.delete(f"{path}/{MANIFEST_FILE}")
        self._manifests.pop(step_of(path), None)
        for name in manifest.files(entry):
            file, size = f"{path}/{name}", entry["files"][name]["bytes"]
            if self._sent.get(file) != entry["digest"] or there.get(file) != size:  # else sent before an interruption
                self.send(folder / name, file)
                self._sent[file] = entry["digest"]
        _check_sizes(self._listed(path), path, entry)
        if self._lease is not None:
            entry["lease"] = {"generation": self._lease.generation, **self._branch}
        self.write(f"{path}/{MANIFEST_FILE}", json.dumps(entry, indent=1).encode() + b"\n")
        self._sent = {file: digest for file, digest in self._sent.items() if not file.startswith(f"{path}/")}
        self._remove_folder(_kept(path))

    def retain(self, keep: Keep) -> None:
        """Deletes the checkpoints there that need not be kept, by what is there: never the newest whole one."""
        for step in to_delete([each for each in self._look().values() if isinstance(each, Saved)],
                              keep.last, keep.best, keep.mode):  # fmt: skip
            self.remove(_path(step))

    def remove(self, path: str) -> None:
        self._manifests.pop(step_of(path), None)
        self._remove_folder(_kept(path))
        self._remove_folder(path)

    def _remove_folder(self, path: str) -> None:
        names = [name for name, _ in self.files(path)]
        for name in sorted(names, key=lambda name: not name.endswith(f"/{MANIFEST_FILE}")):
            self.delete(name)
        if names and self.url.scheme == "file":  # elsewhere a folder is no more than the names of what is in it
            with contextlib.suppress(OSError):
                self._fs.rmdir(self._at(path))

    def set_aside_after(self, step: int | None, branch: str) -> None:
        """Renames checkpoints newer than a step (all, without one), so that nothing counts or deletes them.

        Those published since the run resumed from that step, which have this `branch`, stay.
        """
        base = -1 if step is None else step
        self._branch = {"base": base, "branch": branch}
        for newer, found in self._look().items():
            if newer <= base or _lease(self._manifests.get(newer, {}))[2] == branch:
                continue
            path, place = _path(newer), self._places[newer]
            if self.read(f"{place}/{MANIFEST_FILE}") is None:
                self.remove(path)  # an upload, or a deletion, that was interrupted
                continue
            kind = "aside" if isinstance(found, Saved) else "damaged"
            aside = self._free(f"{CHECKPOINTS}/{kind}-{step_name(newer)}")
            self._copy(place, aside)
            self.remove(path)
            logger.warning("%s/%s is newer than what the run resumes from: set aside as %s",
                           self.url, path, aside.partition("/")[2])  # fmt: skip

    # Whether it can be used at all

    def probe(self, setting: str) -> None:
        """Raises ConfigError unless objects can be written, listed, read and deleted."""
        name, doing = f".lockstep-probe-{uuid.uuid4().hex}", "written"
        try:
            self.write(name, b"probe")
            doing = "listed"
            if [size for _, size in self.files(name)] != [5]:
                raise OSError("what was written a moment ago is not listed")
            doing = "read"
            self.read(name)
            doing = "deleted"
            self._fs.rm_file(self._at(name))
        except Exception as error:
            raise ConfigError(cannot_be_used(self.url, setting, doing, error)) from None

    # Inside

    def _at(self, path: str) -> str:
        return f"{self.url.path}/{path}" if path else self.url.path

    def _listed(self, path: str) -> dict[str, int]:
        """Returns the size of every file below a path, or of the file itself, by its path below the URL."""
        found = self._fs.find(self._at(path), detail=True)
        start = f"{self.url.path}/"
        listed = {
            name[name.index(start) + len(start) :]: int(each.get("size") or 0)
            for name, each in found.items()
            if each.get("type") == "file" and start in name
        }
        # Objects may have any name; on a disk these would lead out of the run's folder.
        return {name: size for name, size in listed.items() if not {"", ".", ".."} & set(name.split("/"))}

    def _look(self) -> dict[int, Saved | Damaged]:
        """Returns the checkpoints by step, oldest first: Saved if its files have the right sizes and its branch is the
        newest. `_manifests` has the manifests of all that have one."""
        there = self._listed(CHECKPOINTS)
        names = {path.split("/")[1].removeprefix(_KEPT) for path in there if path.count("/") == 2}
        found: dict[int, Saved | Damaged] = {}
        known, self._manifests = self._manifests if self._lease is not None else {}, {}
        for step in sorted(step for step in map(manifest.step_of, names) if step is not None):
            path = _path(step)
            if f"{path}/{MANIFEST_FILE}" not in there and f"{_kept(path)}/{MANIFEST_FILE}" in there:
                path = _kept(path)
            self._places[step] = path
            try:
                entry = self._manifests[step] = known.get(step) or self._manifest(path)
                _check_sizes(there, path, entry)
                value = entry.get("value")
                found[step] = Saved(step, float(value) if isinstance(value, (int, float)) else None)
            except Damaged as problem:
                found[step] = problem
        for step in _abandoned(self._manifests):
            found[step] = Damaged("another writer has resumed from before it: it is of a branch that was left")
        return found

    def _manifest(self, path: str) -> dict[str, Any]:
        data = self.read(f"{path}/{MANIFEST_FILE}")
        if data is None:
            raise Damaged(f"it has no {MANIFEST_FILE}, which is written last: it was not uploaded to its end")
        return manifest.parse(data, step_name(step_of(path)))

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _free(self, path: str) -> str:
        number, chosen = 1, path
        while self._listed(chosen):
            number += 1
            chosen = f"{path}-{number}"
        return chosen

    def _copy(self, path: str, new: str) -> None:
        names = sorted((name for name, _ in self.files(path)), key=lambda name: name.endswith(f"/{MANIFEST_FILE}"))
        for name in names:
            self._check_lease()
            self._fs.cp_file(self._at(name), self._at(f"{new}/{name.rpartition('/')[2]}"))


def cannot_be_used(url: Url, setting: str, doing: str, error: BaseException) -> str:
    """Says that an operation failed in a bucket, and what to do."""
    remedy = (
        "Check the credentials, which the environment or the provider's own configuration gives (AWS_ACCESS_KEY_ID, "
        "AWS_PROFILE, gcloud auth application-default login), the network and AWS_ENDPOINT_URL"
    )
    if isinstance(error, FileNotFoundError):
        remedy = f"Create the bucket {url.bucket}, or correct its name: Lockstep does not make buckets"
    return f"{setting} {url}: objects cannot be {doing} in {url.bucket}: {said(error)}. {remedy}"


def said(error: BaseException) -> str:
    """Returns an error as a sentence, without credentials before an @ of an address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return re.sub(r"//[^/@\s]+@", "//***@", text).rstrip(".")[:500]


def _file_system(scheme: str) -> Any:
    try:
        import fsspec

        made = fsspec.filesystem(scheme, use_listings_cache=False, **_OPTIONS.get(scheme, {}))  # one per thread
    except ImportError:
        extra = SCHEMES[scheme]
        package = {"s3": "s3fs", "gcs": "gcsfs"}.get(extra, "fsspec")
        install = f"pip install 'lockstep-train[{extra}]'" if extra else "pip install fsspec"
        raise ConfigError(f"{scheme}:// needs the package {package}, which is not installed here: {install}") from None
    if scheme != "file":
        from fsspec.asyn import get_loop

        get_loop().set_exception_handler(_quietly)
    if scheme == "s3":
        made.retries = 2  # around those of the client: the caller tries again anyway
    return made


def _quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A connection that was cut also fails tasks that nobody awaits: the request itself is reported."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _path(step: int) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}"


def _kept(path: str) -> str:
    return path.replace(STEP_PREFIX, _KEPT + STEP_PREFIX)


def step_of(path: str) -> int:
    return int(path.rpartition(STEP_PREFIX)[2])


def _check_sizes(there: Mapping[str, int], path: str, entry: Mapping[str, Any]) -> None:
    for name in manifest.files(entry):
        size, expected = there.get(f"{path}/{name}"), entry["files"][name]["bytes"]
        if size is None:
            raise Damaged(f"{name} is missing")
        if size != expected:
            raise Damaged(f"{name} has {size} bytes, the manifest says {expected}")


def _lease(entry: Mapping[str, Any]) -> tuple[int, int, object]:
    """Returns the generation of a checkpoint's writer, the step that it resumed from, and its branch."""
    lease = entry.get("lease") or {}
    return lease.get("generation", 0), lease.get("base", sys.maxsize), lease.get("branch")


def _abandoned(manifests: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Returns the steps of branches that were left: a later writer resumed from an earlier step.

    They are there if a writer had a request under way when it lost the lease.
    """
    leases = {_lease(entry) for entry in manifests.values()}
    found = []
    for step, entry in manifests.items():
        generation, _, branch = _lease(entry)
        if any(later > generation and step > base and other != branch for later, base, other in leases):
            found.append(step)
    return found
