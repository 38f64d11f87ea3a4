"""What a run calls its newest and its best checkpoint is its own, whatever else is in its folder."""

from __future__ import annotations

import importlib.metadata
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch's first optimizer imports it, and it sets an environment variable
from test_checkpoint_storage import flip
from test_run import set_up

from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.engine.run import Run
from lockstep.errors import CheckpointError

Runs = Callable[..., Run]
KEEP_ALL = {"async": False, "keep": {"last": 10, "best": 0}}


def train_and_save(run: Run, epochs: int) -> None:
    """Three steps an epoch, and a checkpoint after each, the better the later."""
    for epoch in run.epochs(epochs):
        train_one_pass(run)
        run.checkpoint(value=1.0 / (epoch + 1))


def train_one_pass(run: Run) -> None:
    from test_run import DATA

    for (batch,) in run.batches(DATA, 4):
        run.backward(run.model(batch).square().mean())
        run.step()


@pytest.fixture
def folder(new_run: Runs, tmp_path: Path) -> Path:
    """Checkpoints of steps 3, 6 and 9."""
    first = new_run(checkpoint=KEEP_ALL)
    set_up(first)
    train_and_save(first, 3)
    return tmp_path / "checkpoints"


def step(found: tuple[int, Path] | None) -> int | None:
    return None if found is None else found[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*"))


def test_damaged_and_newer(new_run: Runs, folder: Path) -> None:
    flip(MODEL_FILE)(folder / "step-00000009")
    run = new_run(checkpoint=KEEP_ALL)
    set_up(run)
    assert run.restore()
    assert step(run._engine.checkpointer.newest()) == 6
    assert run._engine.checkpointer.best() == {"value": 0.5, "step": 6}
    train_and_save(run, 3)
    assert step(run._engine.checkpointer.newest()) == 9
    assert names(folder) == ["damaged-step-00000009", "step-00000003", "step-00000006", "step-00000009"]


def test_of_a_branch_that_was_left(new_run: Runs, folder: Path) -> None:
    run = new_run(checkpoint=KEEP_ALL)
    set_up(run)
    assert run.restore(step=3)
    assert step(run._engine.checkpointer.newest()) == 3
    assert run._engine.checkpointer.best() == {"value": 1.0, "step": 3}
    for _ in run.epochs(2):
        train_one_pass(run)
    assert step(run._engine.checkpointer.newest()) == 3
    run.checkpoint()
    assert names(folder) == [
        "aside-step-00000006", "aside-step-00000009", "step-00000003", "step-00000006",
    ]  # fmt: skip


def test_a_loop_that_never_restores(new_run: Runs, folder: Path) -> None:
    run = new_run(checkpoint={"async": False, "keep": {"last": 1, "best": 1}})
    set_up(run)
    assert run._engine.checkpointer.newest() is None and run._engine.checkpointer.best() is None
    train_and_save(run, 1)
    assert step(run._engine.checkpointer.newest()) == 3
    aside = [f"aside-step-{each:08d}" for each in (3, 6, 9)]
    assert names(folder) == [*aside, "best", "step-00000003"]


def test_a_save_that_was_asked_for_is_on_the_disk_when_it_is_said(new_run: Runs, tmp_path: Path) -> None:
    run = new_run(checkpoint={"async": True})
    set_up(run)
    seen: list[list[str]] = []

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "saved at step" in record.getMessage():
                seen.append(names(tmp_path / "checkpoints"))

    logger, handler = logging.getLogger("lockstep.engine.engine"), Look()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)  # by its method, which forgets what other tests had it remember
    try:
        for (batch,) in run.batches(torch.utils.data.TensorDataset(torch.randn(10, 3)), 4):
            run.backward(run.model(batch).square().mean())
            run.step()
            run._engine.requests.save = "SIGUSR1"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert seen and seen[0] == ["step-00000001"]


# Who wrote it


def test_the_versions_that_wrote_a_checkpoint_are_in_its_manifest(folder: Path) -> None:
    written = manifest.read(folder / "step-00000009")["versions"]
    assert written == {"lockstep": importlib.metadata.version("lockstep-train"), "torch": torch.__version__}


def test_a_resume_by_other_versions_says_so_once_and_goes_on(
    new_run: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lockstep")
    same = new_run()
    set_up(same)
    assert same.restore() and "was written by" not in caplog.text
    monkeypatch.setattr(torch, "__version__", "9.9.0+next")
    run = new_run()
    set_up(run)
    assert run.restore()
    (line,) = [each for each in caplog.messages if "was written by" in each]
    assert line.startswith("step-00000009 was written by ") and "torch 9.9.0+next" in line


# A folder that goes away


def test_checkpoints_that_were_deleted_under_a_run_are_said_to_be_gone_and_saving_goes_on(
    new_run: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(checkpoint=KEEP_ALL)
    set_up(run)
    train_and_save(run, 1)
    run._engine.checkpointer.finish()
    shutil.rmtree(tmp_path / "checkpoints")
    train_and_save(run, 2)
    assert names(tmp_path / "checkpoints") == ["step-00000006"]
    assert f"{tmp_path / 'checkpoints'} is gone, with what was saved in it: made anew" in caplog.messages


def test_a_save_never_makes_the_runs_folder_anew(tmp_path: Path) -> None:
    storage = CheckpointStorage(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="could not be written"):
        storage.create(1, 0, lambda folder: None)
    assert not (tmp_path / "run").exists()
