"""Harm to the folder of a run between two starts: links in the place of what it writes, and damage that it passes over.

A link must be refused by name or be replaced, and what it leads to must not change. Damage must change nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.checkpoint import manifest

LINKS = (
    ".lock", ".lock-rank", "config.yaml", "summary.json", "topology.json", "metrics.jsonl", "timeline.jsonl",
    "lags.jsonl", "live.json", "report.html", "logs", "logs/rank-0.log", "checkpoints", "tensorboard", "samples",
    "profile",
)  # fmt: skip
PARTS = (manifest.MANIFEST_FILE, manifest.TREE_FILE, "a model", "a state")
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a link": lambda file: file.symlink_to("/dev/zero"),
    "nothing": lambda file: file.write_bytes(b""),
    "JSON": lambda file: file.write_text('[{"files": []}]'),
    "absence": lambda file: None,
}
RECORDS = ("summary.json", "topology.json", "live.json", "lags.jsonl", "timeline.jsonl", ".lock")
STRANGE = ("step-\u00b2", "step-1", "step-00000000000000000001", "aside-step-\x1b[2J", ".partial-step-00000001-1")
KINDS = (
    *(f"link {name}" for name in LINKS),
    *(f"part {part} is {kind}" for part in PARTS for kind in DAMAGE),
    *(f"record {name}" for name in RECORDS),
    *(f"name {name}" for name in STRANGE),
)


@contextlib.contextmanager
def harmed(run: Path, kind: str, outside: Path) -> Iterator[None]:
    """Do harm for the length of one start; raises AssertionError where something outside of the folder changed."""
    what, _, name = kind.partition(" ")
    outside.mkdir(exist_ok=True)
    (outside / "precious").write_text("precious")
    links = _linked(run / name, outside) if what == "link" else contextlib.nullcontext()
    strange = _strange(run / "checkpoints" / name) if what == "name" else contextlib.nullcontext()
    if what == "part":
        _damage(run, *name.split(" is "))
    if what == "record" and (run / name).exists():
        (run / name).write_bytes(b'{"status": [\xff')
    with links, strange:
        yield
    found = {each.name: each.read_text() for each in outside.iterdir()}
    assert found == {"precious": "precious"}, f"{kind}: what it leads to has changed: {found}"


@contextlib.contextmanager
def _linked(place: Path, outside: Path) -> Iterator[None]:
    kept = place.with_name(f"{place.name}-kept")
    there = place.exists()
    if there:
        place.rename(kept)
    place.symlink_to(outside if place.name in ("logs", "checkpoints", "tensorboard", "samples", "profile")
                     else outside / "precious")  # fmt: skip
    try:
        yield
    finally:
        if place.is_symlink():
            place.unlink()
        if there:
            place.unlink() if place.is_file() else shutil.rmtree(place, ignore_errors=True)
            kept.rename(place)


@contextlib.contextmanager
def _strange(place: Path) -> Iterator[None]:
    if place.parent.is_dir():
        place.mkdir(exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _damage(run: Path, part: str, kind: str) -> None:
    """The newest checkpoint, where there is another whole one to go on from."""
    whole = [each for each in sorted((run / "checkpoints").glob("step-*")) if manifest.problem(each) is None]
    if len(whole) < 2:
        return
    told = json.loads((whole[-1] / manifest.MANIFEST_FILE).read_text())
    shards = [name for name in sorted(told["files"]) if name.startswith(part.removeprefix("a "))]
    file = whole[-1] / (shards[0] if part.startswith("a ") else part)
    file.unlink()
    DAMAGE[kind](file)
