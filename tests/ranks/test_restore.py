"""A checkpoint comes back to all ranks, and all of them pass over what is damaged on the disk of any."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import bodies
import pytest
import torch

import lockstep
from lockstep.checkpoint import codec
from lockstep.checkpoint.manifest import MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Snapshot, write

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": 20})


def fill(folder: Path) -> CheckpointStorage:
    """Steps 1 to 3, with weights that need more than one piece, and tied and odd ones."""
    folder.parent.mkdir(exist_ok=True)
    store = CheckpointStorage(folder)
    for step in (1, 2, 3):
        model = {
            "big": torch.arange(3_000_000.0) + step,
            "odd": torch.ones(3, dtype=torch.bool),
            "none": torch.zeros(0),
        }
        tree, tensors = codec.pack({"momentum": torch.full((1001,), float(step)), "bytes": b"\x00\x01", "step": step})
        shared = {"tied": "big"}
        write(store, Snapshot(step, model, tree, tensors, shared, {"value": float(step)}))
    return store


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def test_what_is_damaged_on_any_host_is_passed_over_by_all(tmp_path: Path) -> None:
    """Ranks 0 and 2 on one host, 1 on another; and what they find on disks of their own."""
    stores = {host: fill(tmp_path / "run" / host) for host in ("a", "b")}
    flip_a_bit(stores["b"].path(3) / MODEL_FILE)  # whole where rank 0 looks
    (stores["a"].path(1) / MODEL_FILE).unlink()
    flip_a_bit(stores["a"].path(1) / "manifest.json")
    zero, one, two = launch(bodies.restores, processes=3, folder=tmp_path / "run")
    for each in (zero, one, two):
        assert each["newest"] == {"step": 2, "sum": zero["newest"]["sum"], "momentum": 2.0, "tied": True}
        assert each["best"]["step"] == 2, "the lowest value of what is whole"
        assert "there is no checkpoint of step 7 (steps with one: 1, 2, 3)" in each["missing"]
        assert (
            "step-00000003 is damaged: as rank 1 reads it, model.safetensors does not match its digest" in each["asked"]
        )
        assert each["empty"] is None
    # What ranks 0 and 2 divide between them for the digests, rank 1 reads alone; and each reads all once more.
    assert zero["opened"][MODEL_FILE] + two["opened"][MODEL_FILE] == 3 and one["opened"][MODEL_FILE] == 2
    assert [len(each["warnings"]) for each in (zero, one, two)] == [1, 0, 0]
    assert "checkpoint step-00000003 is damaged and is passed over: as rank 1 reads it" in zero["warnings"][0]


def test_a_host_that_does_not_see_a_checkpoint_gets_it_from_rank_0(tmp_path: Path) -> None:
    """Rank 1's has an older one of the same name, which does not count, and lacks the others."""
    store = fill(tmp_path / "run" / "a")
    flip_a_bit(store.path(3) / MODEL_FILE)
    other = CheckpointStorage(tmp_path / "run" / "b")
    write(other, Snapshot(2, {"big": torch.zeros(3)}, {}, {}))
    zero, one, two = launch(bodies.restores, processes=3, folder=tmp_path / "run")
    for each in (zero, one, two):
        assert each["newest"] == {"step": 2, "sum": zero["newest"]["sum"], "momentum": 2.0, "tied": True}
        assert each["best"]["step"] == 1
    assert not list((tmp_path / "run" / "b").glob(".partial-*")), "nothing of the copy stays"
    assert "passed over: model.safetensors does not match its digest" in zero["warnings"][0]


def test_a_reader_that_does_not_get_on_is_named_by_those_who_wait_for_it(tmp_path: Path) -> None:
    fill(tmp_path / "run" / "a")
    with pytest.raises(lockstep.WorkerFailed) as failed:
        launch(bodies.reads_for_ever, processes=2, folder=tmp_path / "run", timeouts={"collective": 2})
    text = str(failed.value)
    assert "waited 2 s for 'step-00000003, which rank 0 reads' (limit 2 s). Did not arrive: rank 0 (in" in text


@pytest.mark.parametrize("own_data", [False, True])
def test_a_loop_is_saved_as_often_as_it_was_set(tmp_path: Path, own_data: bool) -> None:
    main = partial(bodies.saves_as_set, own_data=own_data)
    found = lockstep.launch(main, processes=2, runtime="cpu", out=tmp_path, checkpoint={"every": "3 steps"})
    assert found[0] == [3, 6]
    assert lockstep.launch(main, processes=1, runtime="cpu", out=tmp_path) == [[]]
