"""Pictures are taken at once and written while training goes on; a write that failed is never forgotten."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import same
from safetensors import safe_open
from torch import nn

from lockstep.checkpoint.manifest import MODEL_FILE
from lockstep.checkpoint.reader import read
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import WholeWriter
from lockstep.config.schema import Checkpoint, Keep
from lockstep.errors import CheckpointError


class Savers:
    """Makes savers, and sees to it that their threads end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[WholeWriter] = []

    def __call__(self, asynchronous: bool = True, **keep: Any) -> WholeWriter:
        self.made.append(
            WholeWriter(CheckpointStorage(self.folder), Checkpoint(keep=Keep(**keep), asynchronous=asynchronous))
        )
        return self.made[-1]


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Savers]:
    savers = Savers(tmp_path / "checkpoints")
    yield savers
    for each in savers.made:
        each.finish()
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-checkpoint"):
            thread.join(10)


def save(saver: WholeWriter, step: int, value: float | None = None, **tensors: torch.Tensor) -> None:
    saver.save(step, tensors or {"w": torch.full((2,), float(step))}, {"step": step}, {"value": value})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_is_there_after_finish(saver: Savers, asynchronous: bool) -> None:
    one = saver(asynchronous)
    save(one, 3)
    one.finish()
    loaded = read(one.store, 3)
    assert same((loaded.model, loaded.state), ({"w": torch.full((2,), 3.0)}, {"step": 3}))
    assert loaded.about["created"]
    assert one.last_step == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_picture_is_of_the_moment_of_the_save(saver: Savers, asynchronous: bool) -> None:
    one = saver(asynchronous)
    weight, momentum = torch.zeros(1000), torch.zeros(1000)
    for step in (1, 2):  # the second reuses the buffers of the first
        one.save(step, {"w": weight}, {"momentum": momentum}, {})
        weight += 1
        momentum += 1
    one.finish()
    for step in (1, 2):
        loaded = read(one.store, step)
        assert set(loaded.model["w"].tolist()) == set(loaded.state["momentum"].tolist()) == {step - 1.0}


def test_tensors_may_change_in_shape_and_type_between_saves(saver: Savers) -> None:
    one = saver()
    save(one, 1, w=torch.zeros(3))
    save(one, 2, w=torch.ones(2, 2).to(torch.bfloat16))
    one.finish()
    assert same(read(one.store, 2).model, {"w": torch.ones(2, 2).to(torch.bfloat16)})


def test_tensors_may_lie_in_memory_in_any_way(saver: Savers) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {"turned": whole.T, "row": whole[1], "every_other": whole[:, ::2], "spread": torch.ones(1).expand(4)}
    one = saver()
    save(one, 1, **tensors)
    one.finish()
    assert same(read(one.store, 1).model, {name: each.contiguous() for name, each in tensors.items()})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_saved_once_and_restored_into_a_tied_model(saver: Savers) -> None:
    model, other, one = Tied(), Tied(), saver()
    one.save(1, model.state_dict(), {}, {})
    one.finish()
    with safe_open(one.store.path(1) / MODEL_FILE, framework="pt") as opened:
        assert list(opened.keys()) == ["embed.weight"]
    other.load_state_dict(read(one.store, 1).model)
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)


def test_old_ones_are_deleted_and_the_best_is_kept(saver: Savers) -> None:
    one = saver(last=1, best=1)
    for step, value in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, None)]:
        save(one, step, value)
    one.finish()
    assert one.store.steps() == [2, 5]


def test_a_damaged_newer_one_is_set_aside_by_the_first_save_and_takes_nobodys_place(saver: Savers) -> None:
    first = saver(last=2, best=0)
    for step in (5, 10):
        save(first, step)
    first.finish()
    file = first.store.path(10) / MODEL_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    second = saver(last=1, best=0)
    assert second.store.newest_good() == 5
    second.resume_from(5)
    assert second.store.steps() == [5, 10], "whoever only looks changes nothing"
    for step in (6, 7):
        save(second, step)
    second.finish()
    assert sorted(path.name for path in saver.folder.glob("[!.]*")) == ["damaged-step-00000010", "step-00000007"]


def test_a_branch_that_was_left_is_set_aside_and_one_that_was_not_restored_at_all_too(saver: Savers) -> None:
    one = saver(last=2, best=1)
    for step, value in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        save(one, step, value)
    one.finish()
    other = saver(last=2, best=1)
    other.resume_from(2)
    save(other, 3, 0.5)
    other.finish()
    assert other.store.steps() == [2, 3] and (saver.folder / "aside-step-00000003").is_dir()
    anew = saver(last=1, best=1)
    anew.resume_from(None)
    save(anew, 1, 9.0)
    anew.finish()
    assert anew.store.steps() == [1], "the only one of this run, though others were newer and better"


# Failures


def blocked(saver: Savers, asynchronous: bool = True) -> WholeWriter:
    """A saver whose folder cannot be made."""
    saver.folder.write_text("in the way")
    return saver(asynchronous)


def test_a_failed_write_is_raised_where_it_is_waited_for(saver: Savers) -> None:
    one = blocked(saver)
    save(one, 1)
    with pytest.raises(CheckpointError, match="step-00000001: the checkpoint could not be written"):
        one.finish()


def test_a_failed_write_in_the_background_is_raised_by_the_next_check(saver: Savers) -> None:
    one = blocked(saver)
    save(one, 1)
    deadline = time.monotonic() + 30
    with pytest.raises(CheckpointError, match="step-00000001: the checkpoint could not be written"):
        while time.monotonic() < deadline:
            one.check()
            time.sleep(0.005)


def test_a_failed_write_is_raised_by_the_next_save(saver: Savers) -> None:
    one = blocked(saver)
    save(one, 1)
    with pytest.raises(CheckpointError, match="step-00000001"):
        save(one, 2)


def test_a_failed_write_is_raised_at_once_where_saving_is_not_asynchronous(saver: Savers) -> None:
    with pytest.raises(CheckpointError, match="step-00000001"):
        save(blocked(saver, asynchronous=False), 1)


@pytest.fixture
def stuck(saver: Savers, monkeypatch: pytest.MonkeyPatch) -> Iterator[WholeWriter]:
    """A saver whose disk does not answer, with a save under way."""
    answer = threading.Event()
    create = CheckpointStorage.create
    monkeypatch.setattr(CheckpointStorage, "create", lambda self, *how: answer.wait(30) and create(self, *how))
    one = WholeWriter(CheckpointStorage(saver.folder), Checkpoint(), limit=0.2)
    save(one, 1)
    yield one
    answer.set()
    for thread in threading.enumerate():
        if thread.name == "lockstep-checkpoint":
            thread.join(10)


def test_a_write_that_does_not_end_is_told_at_its_limit_and_holds_up_nobody(stuck: WholeWriter) -> None:
    with pytest.raises(CheckpointError, match=r"has taken more than 0\.2 s; .* timeouts\.checkpoint sets the limit"):
        stuck.finish()
    assert [each.daemon for each in threading.enumerate() if each.name == "lockstep-checkpoint"] == [True]


def test_a_run_that_failed_waits_for_its_last_write_and_not_for_long(stuck: WholeWriter, saver: Savers) -> None:
    began = time.monotonic()
    stuck.give_up()
    assert 0.15 < time.monotonic() - began < 5
    quick = saver()
    quick.give_up()


def test_a_failure_is_raised_once_and_saving_may_be_tried_again(saver: Savers) -> None:
    one = blocked(saver)
    save(one, 1)
    with pytest.raises(CheckpointError):
        one.finish()
    one.check()
    saver.folder.unlink()
    save(one, 2)
    one.finish()
    assert one.store.steps() == [2]


def test_what_cannot_be_saved_is_told_by_its_path_at_the_save(saver: Savers) -> None:
    with pytest.raises(CheckpointError, match=r"attached\.mine: a value of type set cannot be saved"):
        saver().save(1, {}, {"attached": {"mine": {1, 2}}}, {})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(2).to_sparse(), "it is a torch.sparse_coo tensor; only dense tensors can be saved"),
        (torch.zeros(2, dtype=torch.bits8), "its type is torch.bits8, which the safetensors format does not have"),
    ],
)
def test_a_tensor_that_cannot_be_saved_is_told_by_its_name_at_the_save(
    saver: Savers, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"model: 'w' cannot be saved: {message}"):
        save(saver(), 1, w=tensor)
    with pytest.raises(CheckpointError, match=f"state: 'mine.w' cannot be saved: {message}"):
        saver().save(1, {}, {"mine": {"w": tensor}}, {})


def test_complex_numbers_of_any_width_are_saved(saver: Savers) -> None:
    tensors = {
        str(kind): torch.tensor([[1 + 2j], [3 - 4j]], dtype=kind) for kind in (torch.complex64, torch.complex128)
    }
    one = saver()
    one.save(1, tensors, {"deep": tensors}, {})
    one.finish()
    loaded = read(one.store, 1)
    assert same(loaded.model, tensors) and same(loaded.state, {"deep": tensors})
    with safe_open(one.store.path(1) / MODEL_FILE, framework="pt") as opened:
        assert opened.get_tensor("torch.complex128").tolist() == [[[1.0, 2.0]], [[3.0, -4.0]]]


def test_a_saver_that_never_saved_can_be_finished(saver: Savers) -> None:
    one = saver()
    one.check()
    one.finish()
    assert one.last_step is None


# Nothing that is not of this run takes the place of what it saves


def test_a_copy_that_comes_in_the_midst_of_a_run_does_not_cost_what_is_saved_after_it(saver: Savers) -> None:
    one = saver(last=1, best=0)
    save(one, 1)
    one.finish()
    other = WholeWriter(CheckpointStorage(saver.folder.parent / "other"), Checkpoint(asynchronous=False))
    save(other, 99)
    shutil.copytree(other.store.path(99), one.store.path(99))
    for step in (2, 3):
        save(one, step)
        one.finish()
        assert step in one.store.steps(), "what was announced is there"
    assert one.store.steps() == [3, 99]


def test_what_cannot_be_deleted_or_set_aside_is_told(saver: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saver(last=1, best=0)
    for step in (1, 2):
        save(one, step)
    one.finish()

    def refused(self: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match=r"step-00000002: cannot be deleted: Permission denied"):
        one.store.delete(2)
    with pytest.raises(CheckpointError, match=r"step-00000002: cannot be set aside: Permission denied"):
        one.store.set_aside_after(None)
