"""What cannot be read for now is not damaged: it is told as what it is, ends the run, and stays where it is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_storage import FILES, flip, names, snapshot

from lockstep import run_files
from lockstep.checkpoint import reader
from lockstep.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import write
from lockstep.distributed.group import Group
from lockstep.errors import CheckpointError

ALONE = Group(0, 1, 10.0)
NOBODY = 65534


@pytest.fixture
def store() -> Iterator[CheckpointStorage]:
    """Steps 1 and 2, in a folder that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    made = CheckpointStorage(folder / "checkpoints")
    for step in (1, 2):
        write(made, snapshot(step, about={"value": float(step)}))
    yield made
    shutil.rmtree(folder)


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def closed(path: Path) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(0)
    try:
        with as_an_ordinary_user():
            yield
    finally:
        path.chmod(before)


WAYS: dict[str, Callable[[CheckpointStorage], Any]] = {
    "the newest": lambda store: reader.restore(store, ALONE),
    "the best": lambda store: reader.restore(store, ALONE, best=True, mode="max"),
    "a step": lambda store: reader.restore(store, ALONE, step=2),
    "the newest, before ranks are started": lambda store: store.newest_good(),
    "the best, before ranks are started": lambda store: store.best_good("max"),
    "a step, before ranks are started": lambda store: store.problem(2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", [*FILES, "."])
def test_a_file_that_may_not_be_read_is_told_and_ends_the_run(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture, file: str, way: str
) -> None:
    with closed(store.path(2) / file), pytest.raises(CheckpointError) as told:
        WAYS[way](store)
    text = str(told.value)
    assert "step-00000002" in text and "cannot be read: Permission denied" in text
    assert (file if file != "." else MANIFEST_FILE) in text
    assert "It may be whole" in text and "damaged" not in text
    assert caplog.messages == [] and names(store) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("way", [each for each in WAYS if each != "a step, before ranks are started"])
def test_a_folder_of_checkpoints_that_may_not_be_read_is_not_one_without_any(
    store: CheckpointStorage, way: str
) -> None:
    with closed(store.folder), pytest.raises(CheckpointError, match=r"checkpoints: cannot be read: Permission denied"):
        WAYS[way](store)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [MANIFEST_FILE, MODEL_FILE])
def test_a_disk_that_fails_is_told_with_the_file(
    store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    """By a descriptor that fails as one of a failing disk: nothing here can break a real one."""
    open_ = run_files.open_descriptor

    def opened(path: Path, flags: int, depth: int = 1) -> int:
        failing = path.name == name and "step-00000002" in str(path)
        return os.open("/proc/self/mem", flags) if failing else open_(path, flags, depth)  # reading it gives EIO

    monkeypatch.setattr(run_files, "open_descriptor", opened)
    with pytest.raises(CheckpointError, match=f"step-00000002: {name} cannot be read: Input/output error"):
        WAYS[way](store)
    assert names(store) == ["step-00000001", "step-00000002"]


def test_retention_neither_counts_nor_deletes_what_it_cannot_read(store: CheckpointStorage) -> None:
    with closed(store.path(1) / MANIFEST_FILE):
        assert [(each.step, each.whole) for each in store.saved()] == [(1, False), (2, True)]


# None that can be used


@pytest.mark.parametrize("which", [{}, {"best": True}])
def test_where_there_are_checkpoints_and_none_can_be_used_nothing_begins_anew(
    store: CheckpointStorage, which: dict[str, Any]
) -> None:
    for step in (1, 2):
        flip(MODEL_FILE)(store.path(step))
    with pytest.raises(CheckpointError) as told:
        reader.restore(store, ALONE, **which)
    text = str(told.value)
    assert "of 2 checkpoints none can be used" in text
    assert "step-00000002: model.safetensors does not match" in text
    assert f"To start over on purpose, move or delete {store.folder}" in text
    assert names(store) == ["step-00000001", "step-00000002"]
    shutil.rmtree(store.folder)
    assert reader.restore(store, ALONE, **which) is None


# Of another step


def test_a_copy_under_another_name_is_not_the_checkpoint_of_that_step(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(store.path(1), store.path(7))
    loaded = reader.restore(store, ALONE)
    assert loaded is not None and loaded.step == 2
    assert "step-00000007 is damaged and is passed over: manifest.json is of step 1" in caplog.text
    assert store.newest_good() == 2
