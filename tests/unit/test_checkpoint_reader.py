"""Which checkpoint is restored, and that what is restored depends on no file any more."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import same
from safetensors.torch import load_file, save_file
from test_checkpoint_storage import DAMAGES, FILES, flip, snapshot

from lockstep.checkpoint import reader, tensor_file
from lockstep.checkpoint.manifest import MODEL_FILE, STATE_FILE
from lockstep.checkpoint.reader import read
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.tensor_file import OpenFiles
from lockstep.checkpoint.writer import write
from lockstep.distributed.activity import Activity
from lockstep.distributed.group import Group
from lockstep.errors import CheckpointError

ALONE = Group(0, 1, 10.0)


def restored(store: CheckpointStorage, **which: Any) -> int | None:
    loaded = reader.restore(store, ALONE, **which)
    return None if loaded is None else loaded.step


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStorage:
    """Steps 1 to 4 with the values 3, 1, 2 and none."""
    made = CheckpointStorage(tmp_path / "checkpoints")
    for step, value in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None)]:
        write(made, snapshot(step, about={"value": value}))
    return made


@pytest.mark.parametrize(
    ("which", "damaged", "expected"),
    [
        ({}, [], 4),
        ({}, [4], 3),
        ({}, [4, 3], 2),
        ({"step": 2}, [4], 2),
        ({"best": True}, [], 2),
        ({"best": True, "mode": "max"}, [], 1),
        ({"best": True}, [2], 3),
    ],
)
def test_which_one_is_restored(
    store: CheckpointStorage,
    caplog: pytest.LogCaptureFixture,
    which: dict[str, Any],
    damaged: list[int],
    expected: int,
) -> None:
    for step in damaged:
        flip(MODEL_FILE)(store.path(step))
    assert restored(store, **which) == expected
    passed_over = [] if "step" in which else damaged
    assert sorted(caplog.messages) == sorted(
        f"checkpoint step-{step:08d} is damaged and is passed over: model.safetensors does not match its digest in the "
        "manifest"
        for step in passed_over
    )


def test_where_there_is_none(tmp_path: Path) -> None:
    store = CheckpointStorage(tmp_path / "nowhere")
    assert restored(store) is None and restored(store, best=True) is None
    with pytest.raises(CheckpointError, match=r"nowhere: there is no checkpoint of step 3 \(steps with one: none\)"):
        restored(store, step=3)


def test_what_was_asked_for_must_be_there_and_whole(store: CheckpointStorage) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 9 \(steps with one: 1, 2, 3, 4\)"):
        restored(store, step=9)
    flip(STATE_FILE)(store.path(3))
    with pytest.raises(CheckpointError, match=r"step-00000003 is damaged: state.safetensors does not match its digest"):
        restored(store, step=3)
    for step in (1, 2, 3):
        store.delete(step)
    with pytest.raises(CheckpointError, match=r"no checkpoint has a value to be the best by \(steps with one: 4\)"):
        restored(store, best=True)


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_found_while_reading(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, file = DAMAGES[kind]
    damage(store.path(4))
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert restored(store) == 3
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("checkpoint step-00000004 is damaged and is passed over: ")
    assert file in caplog.messages[0]


def test_a_bit_that_flips_anywhere_in_a_header_is_found_while_reading(store: CheckpointStorage) -> None:
    file = store.path(4) / MODEL_FILE
    whole = file.read_bytes()
    for place in range(8 + int.from_bytes(whole[:8], "little")):
        file.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        with pytest.raises(CheckpointError, match=r"step-00000004 is damaged: model\.safetensors does not match"):
            read(store, 4)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_what_was_restored_has_memory_of_its_own(store: CheckpointStorage) -> None:
    state = {"optimizer": {"momentum": torch.arange(100_000.0)}, "array": torch.ones(5).numpy()}
    write(store, snapshot(5, state, model={"weight": torch.arange(100_000.0)}))
    loaded = read(store, 5)
    assert str(store.folder) not in Path("/proc/self/maps").read_text()
    assert str(store.folder) not in " ".join(str(each.readlink()) for each in _open_files())
    for name in FILES:
        file = store.path(5) / name
        with file.open("r+b") as stream:  # in place: a mapping would see it
            stream.write(bytes(file.stat().st_size))
    shutil.rmtree(store.path(5))
    assert same(loaded.state, state) and same(loaded.model, {"weight": torch.arange(100_000.0)})
    weight = loaded.model["weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes, "and nobody else's"


def _open_files() -> list[Path]:
    return [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


# The format is that of the library, in both directions

KINDS = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
]  # fmt: skip
SHAPES: list[list[int]] = [[], [0], [1], [3], [2, 3], [2, 0, 3], [1, 1, 1, 5]]


def examples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {}
    for kind in KINDS:
        for shape in SHAPES:
            numbers = torch.randint(0, 2, [*shape, kind.itemsize], dtype=torch.uint8)
            made[f'{kind} {shape} é"\n'] = numbers.view(kind).reshape(shape) if shape != [] else numbers.view(kind)[0]
    return made


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    return {name: (each.dtype, list(each.shape), bytes(tensor_file.memory(each))) for name, each in tensors.items()}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors, file = examples(), tmp_path / "file.safetensors"
    with file.open("wb") as stream:
        tensor_file.write(stream.write, tensors, {"format": "pt"})
    loaded = load_file(file)
    assert as_bytes({name: each.contiguous() for name, each in loaded.items()}) == as_bytes(tensors)
    assert all(each.data_ptr() % each.itemsize == 0 for each in loaded.values()), "each where its type may begin"


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors, file = examples(), tmp_path / "file.safetensors"
    save_file(tensors, file, metadata={"format": "pt", "by": "the library"})
    files = OpenFiles(Activity())
    files.add(os.open(file, os.O_RDONLY), file)
    assert as_bytes({name: each.whole() for name, each in files.tensors.items()}) == as_bytes(tensors)
    files.close()
