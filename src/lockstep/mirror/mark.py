"""The mark in a folder that stands for one in a bucket; imports nothing of buckets where there is none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import run_files
from lockstep.errors import ConfigError
from lockstep.mirror.url import Url, parse
from lockstep.record import run_folder

if TYPE_CHECKING:
    from lockstep.config.schema import RunSettings
    from lockstep.distributed.activity import Activity
    from lockstep.mirror.mirror import Mirror

MARK_FILE = ".bucket.json"


def own_place(url: Url) -> Path:
    """Returns the folder on this host that stands for a run's folder in a bucket."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "lockstep" / "runs" / hashlib.sha256(str(url.parent).encode()).hexdigest()[:16] / url.name


@dataclass(frozen=True)
class Mark:
    url: Url
    tokens: tuple[str, ...] = ()  # of the leases that were taken for this folder last

    def write(self, folder: Path) -> None:
        run_folder.write_text(folder / MARK_FILE, json.dumps({"url": str(self.url), "tokens": self.tokens}) + "\n")


def mark_of(folder: Path) -> Mark | None:
    """Returns the mark of a folder; None if it stands for no bucket."""
    file = folder / MARK_FILE
    try:
        found = json.loads(run_files.read_text(file))
        tokens = found["tokens"]
        if not all(isinstance(each, str) for each in tokens):
            raise ValueError("tokens are not text")
        return Mark(parse(found["url"], str(file)), tuple(tokens))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: does not say which bucket the run's folder is kept in: {error}. Delete the file to use "
            "this folder by itself"
        ) from None


def named(folder: Path) -> str:
    """Returns what users resume: the URL that a folder stands for, or the folder."""
    mark = mark_of(folder)
    return str(folder if mark is None or not _is_own_place(folder, mark.url) else mark.url)


def _is_own_place(folder: Path, url: Url) -> bool:
    return folder.resolve() == own_place(url).resolve()


def mirrored(
    folder: Path, settings: RunSettings, tell: Callable[[str], object], url: Url | None = None
) -> contextlib.AbstractContextManager[Mirror | None]:
    """Mirrors a folder that this process holds, if it stands for one in a bucket.

    A folder of a stranger could name any bucket, or any folder as file://. So its mark counts only at the URL's own
    place on this host, or if the caller knows the `url`; ConfigError elsewhere.
    At the end of the block everything is in the bucket, or BucketBehind is raised, unless another error is.
    """
    mark = mark_of(folder)
    if mark is None:
        return contextlib.nullcontext()
    if mark.url != url and not _is_own_place(folder, mark.url):
        raise ConfigError(
            f"{folder / MARK_FILE} names {mark.url}, but this folder is not this host's copy of it. Resume {mark.url} "
            "instead, or delete the file to resume this folder by itself"
        )
    from lockstep.mirror.mirror import mirrored_by

    return mirrored_by(mark, folder, settings, tell)


def uploaded(mirror: Mirror, limit: float, activity: Activity) -> Callable[[bool], None]:
    """Returns what makes rank 0 wait until a save is in the bucket."""

    def wait(leaving: bool) -> None:
        with activity.within(f"the upload to {mirror.url}", limit=limit + activity.patience):
            mirror.settle(limit if leaving else None)

    return wait
