"""A checkpoint is whole or absent, a damaged one is named and passed over, and nothing is ever unpickled."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import same
from safetensors import safe_open

from conftest import ROOT
from lockstep.checkpoint import codec
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import MANIFEST_FILE, MODEL_FILE, STATE_FILE, TREE_FILE
from lockstep.checkpoint.reader import read
from lockstep.checkpoint.retention import Saved
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Snapshot, delete_old, write
from lockstep.config.schema import Keep
from lockstep.errors import CheckpointError

FILES = (MODEL_FILE, STATE_FILE, TREE_FILE, MANIFEST_FILE)
MODEL = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.zeros(3).to(torch.bfloat16)}
STATE = {"optimizer": {"state": {0: {"momentum": torch.ones(3)}}}, "progress": {"step": 1}, "rng": b"\x01\x02"}


def snapshot(step: int, state: Any = STATE, **changes: Any) -> Snapshot:
    tree, tensors = codec.pack(state)
    about = {"epoch": step // 2, "value": None, "metrics": {}}
    return Snapshot(
        **{"step": step, "model": MODEL, "shared": {}, "tree": tree, "tensors": tensors, "about": about, **changes}
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStorage:
    """A store with checkpoints of steps 1 and 2."""
    made = CheckpointStorage(tmp_path / "checkpoints")
    write(made, snapshot(1))
    write(made, snapshot(2))
    return made


def names(store: CheckpointStorage) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name != ".branch.json")


# Whole


def test_a_checkpoint_reads_back(store: CheckpointStorage) -> None:
    loaded = read(store, 2)
    assert same(loaded.model, MODEL)
    assert same(loaded.state, STATE)
    assert (loaded.step, loaded.about["step"], loaded.about["epoch"]) == (2, 2, 1)


def test_its_folder_holds_four_files_and_nothing_else_is_left(store: CheckpointStorage) -> None:
    assert names(store) == ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in store.path(1).iterdir()) == sorted(FILES)
    assert store.steps() == [1, 2]
    assert store.problem(1) is None
    assert store.newest_good() == 2


def test_the_manifest_names_every_other_file_with_its_size_and_digest(store: CheckpointStorage) -> None:
    manifest = manifests.read(store.path(1))
    assert sorted([*manifest["files"], MANIFEST_FILE]) == sorted(FILES)
    for name, told in manifest["files"].items():
        assert told["bytes"] == (store.path(1) / name).stat().st_size
        assert len(told["sha256"]) == 64


def test_the_manifest_is_json_even_where_a_metric_is_no_number(store: CheckpointStorage) -> None:
    """Other programs read it, and NaN is a word that only Python's JSON knows."""
    write(store, snapshot(3, about={"value": float("nan"), "metrics": {"val/loss": float("inf")}}))
    text = (store.path(3) / MANIFEST_FILE).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert store.problem(3) is None


def test_the_weights_open_with_plain_safetensors(store: CheckpointStorage) -> None:
    with safe_open(store.path(1) / MODEL_FILE, framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(MODEL)
        assert same({name: opened.get_tensor(name) for name in MODEL}, MODEL)


def test_tied_weights_are_saved_once_and_restored(store: CheckpointStorage) -> None:
    write(store, snapshot(3, shared={"head.weight": "layer.weight"}))
    with safe_open(store.path(3) / MODEL_FILE, framework="pt") as opened:
        assert "head.weight" not in opened.keys()  # noqa: SIM118  safe_open is no mapping
    model = read(store, 3).model
    assert same(model["head.weight"], MODEL["layer.weight"])
    assert model["head.weight"].data_ptr() == model["layer.weight"].data_ptr()


@pytest.mark.parametrize("state", [{}, None, [], {"only": "words"}])
def test_a_state_without_a_tensor_reads_back(store: CheckpointStorage, state: Any) -> None:
    write(store, snapshot(3, state))
    assert same(read(store, 3).state, state)


def test_a_model_without_weights_reads_back(store: CheckpointStorage) -> None:
    write(store, snapshot(3, model={}))
    assert store.problem(3) is None
    assert read(store, 3).model == {}


def test_the_same_step_written_again_replaces_what_was_there(store: CheckpointStorage) -> None:
    write(store, snapshot(2, {"second": True}))
    assert read(store, 2).state == {"second": True}
    assert names(store) == ["step-00000001", "step-00000002"]


def test_steps_are_in_order_of_their_numbers_and_other_names_are_not_steps(store: CheckpointStorage) -> None:
    write(store, snapshot(123456789))
    for name in ("step-old", "step-", "notes", ".partial-step-00000007-1"):
        (store.folder / name).mkdir()
    assert store.steps() == [1, 2, 123456789]


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    empty = CheckpointStorage(tmp_path / "nowhere")
    assert (empty.steps(), empty.saved(), empty.newest_good()) == ([], [], None)
    empty.sweep()


# Damaged

Damage = Callable[[Path], None]


def truncate(name: str) -> Damage:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return change


def flip(name: str, place: float = 0.5) -> Damage:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        (folder / name).write_bytes(data)

    return change


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def empty(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"") and None


def lengthen(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\0") and None


def manifest(text: str | bytes) -> Damage:
    return lambda folder: (
        (folder / MANIFEST_FILE).write_bytes(text if isinstance(text, bytes) else text.encode()) and None
    )


def rewrite(**changes: Any) -> Damage:
    def change(folder: Path) -> None:
        told = json.loads((folder / MANIFEST_FILE).read_bytes())
        (folder / MANIFEST_FILE).write_text(json.dumps({**told, **changes}))

    return change


def leave_out(name: str) -> Damage:
    def change(folder: Path) -> None:
        told = json.loads((folder / MANIFEST_FILE).read_bytes())
        del told["files"][name]
        (folder / MANIFEST_FILE).write_text(json.dumps(told))
        (folder / name).unlink()

    return change


def replaced_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


DAMAGES: dict[str, tuple[Damage, str]] = {
    **{f"{name} truncated": (truncate(name), name) for name in FILES},
    **{f"{name} with a bit flipped": (flip(name), name) for name in (MODEL_FILE, STATE_FILE, TREE_FILE)},
    **{f"{name} with its first bit flipped": (flip(name, 0.0), name) for name in FILES},
    **{f"{name} with its last bit flipped": (flip(name, 1.0), name) for name in FILES},
    **{f"{name} missing": (remove(name), name) for name in FILES},
    **{f"{name} empty": (empty(name), name) for name in FILES},
    **{f"{name} too long": (lengthen(name), name) for name in FILES},
    "a manifest of garbage": (manifest(b"\xff\xfe garbage"), MANIFEST_FILE),
    "a manifest that is a list": (manifest("[1, 2]"), MANIFEST_FILE),
    "a manifest that is null": (manifest("null"), MANIFEST_FILE),
    "a manifest that is empty": (manifest("{}"), MANIFEST_FILE),
    "a manifest without files": (manifest('{"format": 1}'), MANIFEST_FILE),
    "a manifest with files of another kind": (rewrite(files=[1]), MANIFEST_FILE),
    "a manifest that names no file": (rewrite(files={}), MANIFEST_FILE),
    "a manifest of another format": (rewrite(format=2), MANIFEST_FILE),
    "a manifest that leaves out a file that is not there": (leave_out(MODEL_FILE), "manifest"),
    "a file in its place": (replaced_by_a_file, MANIFEST_FILE),
    "an empty folder": (lambda folder: [each.unlink() for each in folder.iterdir()] and None, MANIFEST_FILE),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, file = DAMAGES[kind]
    damage(store.path(2))
    problem = store.problem(2)
    assert problem is not None
    assert file in problem
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert store.newest_good() == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [f"checkpoint step-00000002 is damaged and is passed over: {problem}"]


def test_a_file_of_another_length_is_told_with_both_numbers(store: CheckpointStorage) -> None:
    whole = (store.path(1) / MODEL_FILE).stat().st_size
    lengthen(MODEL_FILE)(store.path(1))
    assert store.problem(1) == f"model.safetensors has {whole + 1} bytes, the manifest says {whole}"


def test_another_format_is_told_with_both_numbers(store: CheckpointStorage) -> None:
    rewrite(format=7)(store.path(1))
    assert store.problem(1) == "manifest.json has format 7, this version reads 1 and 2"


def test_a_bit_that_flips_anywhere_in_the_manifest_is_noticed(store: CheckpointStorage) -> None:
    """The manifest says what the others must be; who says what it must be?"""
    file = store.path(2) / MANIFEST_FILE
    whole = file.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        file.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
        if store.problem(2) is None:
            unnoticed.append(whole[max(place - 15, 0) : place + 5].decode())
    assert unnoticed == []


def test_where_all_are_damaged_there_is_none_and_each_is_named(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture
) -> None:
    truncate(MODEL_FILE)(store.path(1))
    remove(MANIFEST_FILE)(store.path(2))
    assert store.newest_good() is None
    assert ["step-00000002" in caplog.messages[0], "step-00000001" in caplog.messages[1]] == [True, True]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_does_not_hinder_saving(store: CheckpointStorage, kind: str) -> None:
    damage, _ = DAMAGES[kind]
    damage(store.path(2))
    assert [each.step for each in store.saved()] == [1, 2]
    write(store, snapshot(3))
    write(store, snapshot(2))
    assert store.problem(2) is None
    assert store.newest_good() == 3


@pytest.mark.parametrize(
    ("value", "expected"), [(1.5, 1.5), (0, 0.0), (None, None), ("much", None), ([1], None), ({}, None)]
)
def test_retention_takes_from_a_manifest_a_number_or_nothing(
    store: CheckpointStorage, value: Any, expected: float | None
) -> None:
    write(store, snapshot(1, about={"value": value}))
    assert store.saved()[0] == Saved(1, expected)


@pytest.mark.parametrize("kind", DAMAGES)
def test_retention_does_not_weigh_what_is_damaged_as_far_as_can_be_told_without_reading_it(
    store: CheckpointStorage, kind: str
) -> None:
    damage, _ = DAMAGES[kind]
    damage(store.path(2))
    flipped = "bit flipped" in kind and MANIFEST_FILE not in kind
    assert [each.whole for each in store.saved()] == [True, flipped]


def test_reading_what_cannot_be_read_is_told_with_its_folder(store: CheckpointStorage) -> None:
    truncate(MODEL_FILE)(store.path(1))
    with pytest.raises(CheckpointError, match=r"step-00000001 is damaged: model.safetensors has \d+ bytes"):
        read(store, 1)
    with pytest.raises(
        CheckpointError, match=r"checkpoints: there is no checkpoint of step 9 \(steps with one: 1, 2\)$"
    ):
        read(store, 9)


# Absent


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"sparse": torch.eye(2).to_sparse()}}, id="a sparse tensor"),
        pytest.param({"tensors": {"huge": torch.zeros(1).expand(2**55)}}, id="more than the disk holds"),
        pytest.param({"tree": {"z": 1j}}, id="a state that is not JSON"),
        pytest.param({"about": {"z": 1j}}, id="a manifest that is not JSON"),
    ],
)
def test_a_write_that_fails_half_way_leaves_nothing(store: CheckpointStorage, changes: dict[str, Any]) -> None:
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()}
    for step in (2, 3):
        with pytest.raises(Exception):  # noqa: B017  whatever it is: what stays behind is what matters here
            write(store, snapshot(step, **changes))
    assert {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file()} == before
    assert names(store) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_told_with_what_is_needed_and_what_is_free(store: CheckpointStorage) -> None:
    huge = snapshot(3, tensors={"huge": torch.zeros(1).expand(2**50)})
    with pytest.raises(CheckpointError) as refused:
        write(store, huge)
    text = str(refused.value)
    assert "step-00000003: the checkpoint could not be written: [Errno 28] No space left on device" in text
    assert "It needs 4503.6 TB and " in text
    assert "B are free. Earlier checkpoints are untouched: make room" in text


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="step-00000001: the checkpoint could not be written"):
        write(CheckpointStorage(tmp_path / "checkpoints"), snapshot(1))
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_deleted_checkpoint_is_gone_altogether(store: CheckpointStorage) -> None:
    store.delete(1)
    assert names(store) == ["step-00000002"]


def test_what_is_replaced_is_there_until_what_replaces_it_is(
    store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between two renames leaves no step without a checkpoint."""
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if Path(target) == store.path(2):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        write(store, snapshot(2, {"second": True}))
    monkeypatch.undo()
    assert store.steps() == [1]
    store.sweep()
    assert names(store) == ["step-00000001", "step-00000002"]
    assert same(read(store, 2).state, STATE)


def test_sweeping_removes_what_was_interrupted_and_nothing_else(store: CheckpointStorage) -> None:
    for leftover in (".partial-step-00000003-99", ".partial-deleted-00000001-99"):
        (store.folder / leftover).mkdir()
        (store.folder / leftover / MODEL_FILE).write_bytes(b"half")
    for kept in ("notes", "step-old"):
        (store.folder / kept).mkdir()
    (store.folder / "partial.txt").write_text("the user's")
    store.sweep()
    assert names(store) == ["notes", "partial.txt", "step-00000001", "step-00000002", "step-old"]
    assert store.newest_good() == 2


# Set aside


def test_what_is_newer_than_where_the_run_goes_on_is_set_aside_by_name(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4, 5):
        write(store, snapshot(step))
    flip(MODEL_FILE)(store.path(4))
    truncate(STATE_FILE)(store.path(5))
    store.pass_over(4, "by whoever has read it")
    before = {name: (store.path(4) / name).read_bytes() for name in FILES}
    caplog.clear()
    store.set_aside_after(2)
    assert names(store) == [
        "aside-step-00000003", "damaged-step-00000004", "damaged-step-00000005", "step-00000001", "step-00000002",
    ]  # fmt: skip
    assert before == {name: (store.folder / "damaged-step-00000004" / name).read_bytes() for name in FILES}
    assert caplog.messages[0] == (
        "step-00000003 is newer than step-00000002, which the run resumes from: set aside as aside-step-00000003, "
        "where nothing reads, counts or deletes it"
    )
    assert store.steps() == [1, 2] and store.newest_good() == 2
    store.sweep()
    write(store, snapshot(3))
    store.set_aside_after(2)
    assert "aside-step-00000003-2" in names(store), "nothing takes the place of what was set aside before"
    with pytest.raises(CheckpointError, match="aside-step-00000003-2 was set aside: name it step-00000003 to use it"):
        store.require(3)
    store.set_aside_after(2)
    assert store.steps() == [1, 2]


def test_a_run_that_begins_anew_sets_all_aside(store: CheckpointStorage, caplog: pytest.LogCaptureFixture) -> None:
    store.set_aside_after(None)
    assert names(store) == ["aside-step-00000001", "aside-step-00000002"]
    assert caplog.messages[0].startswith("step-00000001 is of before this run: set aside as aside-step-00000001")


@pytest.mark.parametrize(("mode", "damaged", "expected"), [("min", [], 2), ("max", [], 1), ("min", [2], 3)])
def test_the_best_good_one(store: CheckpointStorage, mode: str, damaged: list[int], expected: int) -> None:
    for step, value in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None)]:
        write(store, snapshot(step, about={"value": value}))
    for step in damaged:
        flip(MODEL_FILE)(store.path(step))
    assert store.best_good(mode) == expected


# Who may read


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_whom_the_umask_allows_to_read_may_read_the_weights(
    store: CheckpointStorage, umask: int, expected: int
) -> None:
    before = os.umask(umask)
    try:
        write(store, snapshot(3))
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in store.path(3).iterdir()} == dict.fromkeys(
        FILES, expected
    )
    assert store.path(3).stat().st_mode & 0o777 == 0o777 & ~umask


# Never unpickled


def test_no_file_of_a_checkpoint_is_a_pickle(store: CheckpointStorage) -> None:
    for file in store.path(2).iterdir():
        start = file.read_bytes()[:4]
        assert not start.startswith((b"\x80", b"PK")), (
            file.name
        )  # pickle's protocol mark; the zip that torch.save makes


# Functions go to the processes that the launcher itself has just started, through pipes that nobody else can write to;
# torch's elastic does the same. Nothing that comes from a file or over the network passes there.
# `verify FILE.py` sends functions to its processes as launch() does, and they read tensors (weights_only) of a private
# folder. A data worker sends its error to its rank as multiprocessing sends batches.
MAY_PICKLE = {
    "launchers/local/child.py", "launchers/launch.py", "verify/parity.py", "verify/parity_rank.py",
    "distributed/from_worker.py", "data/workers.py",
}  # fmt: skip
PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
PICKLING_CALLS = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    *(("dist", f"{name}") for name in ("broadcast_object_list", "all_gather_object", "gather_object")),
    *(("dist", f"{name}") for name in ("scatter_object_list", "send_object_list", "recv_object_list")),
}


def pickling(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.split(".")[0] in PICKLING_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING_MODULES:
            found.append(str(node.module))
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in PICKLING_CALLS
        ):
            found.append(f"{node.value.id}.{node.attr}")
    return found


def test_nothing_but_the_launcher_can_pickle() -> None:
    source = ROOT / "src" / "lockstep"
    found = {str(path.relative_to(source)): pickling(path.read_text()) for path in source.rglob("*.py")}
    assert {path for path, uses in found.items() if uses} <= MAY_PICKLE, found
    assert pickling("import pickle\nfrom dill import x\ntorch.load(f)") == ["pickle", "dill", "torch.load"]


# The link to the best


def judged(store: CheckpointStorage, step: int, value: float | None, keep: Keep) -> None:
    """Save a step that has a value, and delete what need not be kept, as a run does."""
    write(store, snapshot(step, about={"epoch": 0, "value": value, "metrics": {}}))
    delete_old(store, step, keep)


def test_best_leads_to_the_best_that_is_kept_and_nowhere_else(tmp_path: Path) -> None:
    store, keep = CheckpointStorage(tmp_path / "checkpoints"), Keep(last=1, best=1)
    link = store.folder / "best"
    for step, value, best in ((1, None, None), (2, 0.5, 2), (3, 0.7, 2), (4, 0.4, 4), (5, float("nan"), 4)):
        judged(store, step, value, keep)
        assert (link.resolve().name if link.exists() else None) == (None if best is None else store.path(best).name)
    assert str(link.readlink()) == "step-00000004"  # relative: the run's folder may be moved
    assert store.steps() == [4, 5]
    # Going back to before it takes its name away, and the link with it.
    store.set_aside_after(None)
    assert not link.is_symlink()
    assert not list(store.folder.glob(".partial*"))


def test_the_link_never_leads_nowhere_whatever_is_deleted(tmp_path: Path) -> None:
    store = CheckpointStorage(tmp_path / "checkpoints")
    judged(store, 1, 0.1, Keep(last=1, best=1))
    store.delete(1)
    assert not (store.folder / "best").is_symlink()
    judged(store, 2, 0.1, Keep(last=1, best=0))  # nobody asked for the best
    assert not (store.folder / "best").is_symlink()


def test_a_disk_without_links_and_a_name_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, keep = CheckpointStorage(tmp_path / "checkpoints"), Keep(last=1, best=1)

    def refused(*arguments: Any, **more: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", refused)
        judged(store, 1, 0.1, keep)
    assert store.steps() == [1] and not (store.folder / "best").exists()
    (store.folder / "best").mkdir()
    judged(store, 2, 0.05, keep)
    assert (store.folder / "best").is_dir() and not (store.folder / "best").is_symlink()


def test_what_an_interrupted_link_left_behind_is_swept(store: CheckpointStorage) -> None:
    (store.folder / ".partial-best-1").symlink_to("step-00000001")
    store.sweep()
    assert not (store.folder / ".partial-best-1").is_symlink()
    assert store.steps() == [1, 2] and store.problem(1) is None
