"""A run's folder in object storage, through fsspec.

There is no rename in a bucket, and an object appears whole or not at all. So a checkpoint counts there only if its
manifest is there and all files that it names are as long as it says: the manifest is written last and deleted first.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import MANIFEST_FILE, STEP_PREFIX, Damaged, step_name
from lockstep.checkpoint.retention import Saved, best_first
from lockstep.errors import CheckpointError, ConfigError
from lockstep.mirror.sync import CHECKPOINTS
from lockstep.mirror.url import SCHEMES, Url

logger = logging.getLogger(__name__)

# Of one request: a service that does not answer is found out, and asked again by whoever wanted something of it.
_CONNECT_SECONDS, _ANSWER_SECONDS = 10, 60
_LONG = 8 * 1024 * 1024  # bytes of a file, so that it is sent in parts
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _ANSWER_SECONDS,
            "retries": {"max_attempts": 2},
            # Digests of our own are checked; some services answer a part of an object with the checksum of all of it.
            "response_checksum_validation": "when_required",
        },
    },
    "gs": {"timeout": _ANSWER_SECONDS},
    "file": {"auto_mkdir": True},
}


class Bucket:
    """A Remote: what is below a URL. Whatever the service refuses is raised as it says it; `said` makes a sentence."""

    def __init__(self, url: Url) -> None:
        self.url = url
        self._fs = _file_system(url.scheme)

    # Files

    def files(self, path: str) -> list[tuple[str, int]]:
        return sorted((name, int(size)) for name, size in self._listed(path).items())

    def fetch(self, path: str, size: int, place: Path) -> None:
        self._fs.get_file(self._at(path), str(place))
        if size == 0:
            place.touch()  # of nothing, some file systems of fsspec make nothing

    def send(self, file: Path, path: str) -> None:
        # Read by ourselves while it is short: a log may grow between two looks at its size.
        self._fs.put_file(str(file), self._at(path)) if _is_long(file) else self.write(path, file.read_bytes())

    def read(self, path: str) -> bytes | None:
        """The whole of a small object; None where there is none."""
        try:
            return bytes(self._fs.cat_file(self._at(path)))
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(self._at(path), data)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    # Checkpoints

    def to_try(self, step: int | None = None, best: bool = False, mode: str = "min") -> list[str]:
        looked = {each: self._looked_at(each) for each in self.steps()}
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
            return [_path(step)]
        if looked and not whole:
            problems = "; ".join(f"{step_name(number)}: {problem}" for number, problem in looked.items())
            raise CheckpointError(
                f"{self.url}/{CHECKPOINTS}: there are checkpoints and none is whole, so nothing was begun anew "
                f"({problems}). Put back a good one; to start over on purpose, move or delete them"
            )
        chosen = best_first(whole, mode) if best else whole[::-1]
        return [_path(each.step) for each in chosen]

    def steps(self) -> list[int]:
        """Steps with anything of a checkpoint, oldest first."""
        names = {path.split("/")[1] for path in self._listed(CHECKPOINTS) if path.count("/") == 2}
        numbers = [name.removeprefix(STEP_PREFIX) for name in names if name.startswith(STEP_PREFIX)]
        return sorted(int(number) for number in numbers if number.isdigit())

    def saved(self, step: int) -> Saved:
        found = self._looked_at(step)
        return found if isinstance(found, Saved) else Saved(step, whole=False)

    def digest(self, step: int) -> str | None:
        """Of the checkpoint of a step that is whole."""
        try:
            return str(self._manifest(step)["digest"])
        except Damaged:
            return None

    def publish(self, folder: Path, path: str) -> None:
        self.delete(f"{path}/{MANIFEST_FILE}")  # of the same step as it was saved before
        told = manifest.read(folder)
        for name in manifest.files(told):
            self.send(folder / name, f"{path}/{name}")
        _check_sizes(self._listed(path), path, told)
        self.send(folder / MANIFEST_FILE, f"{path}/{MANIFEST_FILE}")

    def remove(self, path: str) -> None:
        self.delete(f"{path}/{MANIFEST_FILE}")
        for name, _ in self.files(path):
            self.delete(name)
        if self.url.scheme == "file":  # elsewhere a folder is no more than the names of what is in it
            with contextlib.suppress(OSError):
                self._fs.rmdir(self._at(path))

    def set_aside_after(self, step: int | None) -> None:
        for newer in [each for each in self.steps() if step is None or each > step]:
            path = _path(newer)
            if self.read(f"{path}/{MANIFEST_FILE}") is None:
                self.remove(path)  # an upload, or a deletion, that was interrupted
                continue
            kind = "aside" if isinstance(self._looked_at(newer), Saved) else "damaged"
            aside = self._free(f"{CHECKPOINTS}/{kind}-{step_name(newer)}")
            self._copy(path, aside)
            self.remove(path)
            logger.warning("%s/%s is newer than what the run goes on from: set aside as %s",
                           self.url, path, aside.partition("/")[2])  # fmt: skip

    # Whether it can be used at all

    def probe(self, setting: str) -> None:
        """Make sure that objects can be written, listed, read and deleted; ConfigError where they cannot."""
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
        """Every file below a path, or the file itself, with its size; by its path below the URL."""
        found = self._fs.find(self._at(path), detail=True)
        start = f"{self.url.path}/"
        listed = {
            name[name.index(start) + len(start) :]: int(each.get("size") or 0)
            for name, each in found.items()
            if each.get("type") == "file" and start in name
        }
        # Objects may have any name; on a disk these would lead out of the run's folder.
        return {name: size for name, size in listed.items() if not {"", ".", ".."} & set(name.split("/"))}

    def _manifest(self, step: int) -> dict[str, Any]:
        """Of a checkpoint that is whole as far as the sizes of its files tell; raises Damaged."""
        path = _path(step)
        data = self.read(f"{path}/{MANIFEST_FILE}")
        if data is None:
            raise Damaged(f"it has no {MANIFEST_FILE}, which is written last: it was not uploaded to its end")
        told = manifest.parse(data, step_name(step))
        _check_sizes(self._listed(path), path, told)
        return told

    def _looked_at(self, step: int) -> Saved | Damaged:
        try:
            value = self._manifest(step).get("value")
        except Damaged as problem:
            return problem
        return Saved(step, float(value) if isinstance(value, (int, float)) else None)

    def _free(self, path: str) -> str:
        number, chosen = 1, path
        while self._listed(chosen):
            number += 1
            chosen = f"{path}-{number}"
        return chosen

    def _copy(self, path: str, new: str) -> None:
        names = sorted((name for name, _ in self.files(path)), key=lambda name: name.endswith(f"/{MANIFEST_FILE}"))
        for name in names:
            self._fs.cp_file(self._at(name), self._at(f"{new}/{name.rpartition('/')[2]}"))


def cannot_be_used(url: Url, setting: str, doing: str, error: BaseException) -> str:
    """What to tell where a bucket does not do what it has to."""
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        remedy = f"Create the bucket {url.bucket}, or correct its name: Lockstep does not make buckets"
    elif isinstance(error, PermissionError) or "Credential" in name or "Forbidden" in name or "Auth" in name:
        remedy = (
            "Give credentials that may list, read, write and delete there, by the environment or the provider's own "
            "configuration (AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws; gcloud auth application-default login)"
        )
    else:
        remedy = "Check the network and the service's address (for S3 of one's own: AWS_ENDPOINT_URL)"
    return f"{setting} {url}: objects cannot be {doing} in {url.bucket}: {said(error)}. {remedy}"


def said(error: BaseException) -> str:
    """An error in a sentence, without what somebody may have put before an @ of an address."""
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
    if scheme == "s3":
        made.retries = 2  # of its own, around those of the client: whoever asks tries again anyway
    return made


def _path(step: int) -> str:
    return f"{CHECKPOINTS}/{step_name(step)}"


def _check_sizes(there: Mapping[str, int], path: str, told: Mapping[str, Any]) -> None:
    for name in manifest.files(told):
        size, expected = there.get(f"{path}/{name}"), told["files"][name]["bytes"]
        if size is None:
            raise Damaged(f"{name} is missing")
        if size != expected:
            raise Damaged(f"{name} has {size} bytes, the manifest says {expected}")


def _is_long(file: Path) -> bool:
    return file.stat().st_size > _LONG
