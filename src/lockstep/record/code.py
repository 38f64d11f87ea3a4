"""Keeps the code that a run was started with in its folder: the source of the task, the git commit and the diff."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep import run_files
from lockstep.config.secrets import LEFT_OUT, is_secret, redacted
from lockstep.record.writers import write_json

FOLDER, FACTS_FILE, DIFF_FILE = "code", "code.json", "uncommitted.diff"
_MOST_BYTES = 2**20  # of the source, and of the diff
_GIT_SECONDS = 3.0
_ASSIGNED = re.compile(r"""(?P<name>\w+)(?P<by>["']?\s*[:=]\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,"')]+)""")
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
        known = _read(home / str(before) / FACTS_FILE)
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


def _read(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return dict(json.loads(run_files.read_text(file, depth=3)).get("files") or {})
    return {}
