"""Checkpoints by owners: every rank writes its own parts, and reads those that it needs, whoever wrote them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sliced_bodies as bodies
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import lockstep
from conftest import small_file_system
from lockstep.checkpoint import manifest
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.cli import main
from lockstep.config.schema import Keep
from lockstep.launchers import resume as start
from lockstep.mirror import staging
from lockstep.mirror.bucket import Bucket
from lockstep.mirror.uploads import Uploads
from lockstep.mirror.url import parse
from lockstep.verify.examine import batch_statistics

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": 30})

MESHES: dict[str, tuple[int, dict[str, int] | None]] = {
    "fsdp 2": (2, {"data": 2}),
    "fsdp 3": (3, {"data": 3}),
    "fsdp 4": (4, {"data": 4}),
    "hsdp 2x2": (4, {"replica": 2, "data": 2}),
    "data x model 2x2": (4, {"data": 2, "model": 2}),
    "fsdp 1": (1, {"data": 1}),
    "whole 1": (1, None),
    "whole 2": (2, None),
}


def run_on(body: Any, mesh: str, folder: Path, **settings: Any) -> list[Any]:
    processes, shape = MESHES[mesh]
    return launch(partial(body, mesh=shape, **settings), processes=processes, folder=folder)


def of_many(*cases: Any) -> list[Any]:
    """Cases beside a shorter one: for --long."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in cases]


@pytest.mark.parametrize("mesh", ["data x model 2x2", *of_many("fsdp 2", "fsdp 4", "hsdp 2x2")])
def test_what_a_rank_has_of_a_tensor(tmp_path: Path, mesh: str) -> None:
    ranks = run_on(bodies.slices, mesh, tmp_path / "run")
    for name, first in ranks[0].items():
        parts: dict[tuple[int, ...], list[int]] = {}
        for rank, found in enumerate(ranks):
            parts.setdefault(tuple(found[name]["numbers"]), []).append(rank)
        numbers = sorted(number for part in parts for number in part)
        assert numbers == list(range(first["count"])), "the parts make up the tensor, each once"
        for part, holders in parts.items():
            for rank in holders if part else []:
                told = ranks[rank][name]["holders"]
                assert rank in told and set(told) <= set(holders), name
    assert any(not found["norm.weight"]["numbers"] for found in ranks) == (mesh == "fsdp 4"), "a rank without a row"


def test_what_has_no_value_or_was_made_by_hand_is_refused(tmp_path: Path) -> None:
    for partial_sum, odd in launch(bodies.bad_slices, processes=2, folder=tmp_path / "run"):
        assert "is not reduced yet" in partial_sum
        assert odd == "" or "it was made from parts of other sizes" in odd


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each mesh, with the same values."""
    folders = {}
    for mesh in SAVED:
        folders[mesh] = tmp_path_factory.mktemp(mesh.replace(" ", "-")) / "run"
        shape, _, hosts = mesh.partition(" on ")
        found = run_on(bodies.saves, shape, folders[mesh], steps=2, hosts=int(hosts[:1] or 1),
                       **{"async": mesh != "fsdp 3"})  # fmt: skip
        for rank in found:
            assert rank["held"] <= rank["mine"] + 100, "no rank holds more than a copy of what it has"
    return folders


def lockstep_checkpoint(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def export(run: Path, out: Path) -> Result:
    return CliRunner().invoke(main, ["export", str(run), "--to", "safetensors", "--out", str(out)])


def checkpoint(run: Path, step: int = 2) -> Path:
    return CheckpointStorage(run / "run" / "checkpoints").path(step)


@pytest.mark.parametrize("mesh", ["fsdp 3", "data x model 2x2", "fsdp 2", "hsdp 2x2"])
def test_files_open_with_plain_safetensors_and_have_an_index(saved: dict[str, Path], mesh: str) -> None:
    folder = checkpoint(saved[mesh])
    assert manifest.problem(folder) is None
    told = manifest.read(folder)
    assert told["format"] == 2 and told["world_size"] == MESHES[mesh][0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        found = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in found)
        weights |= found
    assert set(weights) == set(index["weight_map"]) and "head.weight" not in weights
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights.values())
    for name, tensor in weights.items():
        if name == "angles":
            tensor = torch.view_as_complex(tensor)
        assert torch.equal(tensor, bodies.value(name, tuple(tensor.shape), tensor.dtype)), name
    assert sorted(path.name for path in folder.iterdir()) == sorted([*manifest.files(told), "manifest.json"])
    assert not list(folder.parent.glob(".partial-*"))


SAVED = (
    "fsdp 2", "fsdp 3", "data x model 2x2", "hsdp 2x2", "whole 2", "fsdp 1",
    "fsdp 3 on 3 hosts", "data x model 2x2 on 2 hosts",
)  # fmt: skip


@pytest.mark.parametrize("mesh", ["fsdp 3 on 3 hosts", "data x model 2x2 on 2 hosts"])
def test_ranks_on_several_hosts_write_no_file_together(saved: dict[str, Path], tmp_path: Path, mesh: str) -> None:
    folder = checkpoint(saved[mesh])
    assert manifest.problem(folder) is None
    told = manifest.read(folder)
    parts = manifest.read_parts(folder, told)
    assert len(parts) > 3 and all(len(ranks) == 1 for ranks in parts.values()), "of every file one writer"
    merged = export(saved[mesh] / "run", tmp_path / "one.safetensors")
    assert merged.exit_code == 0, merged.output
    weights = load_file(tmp_path / "one.safetensors")
    weights["angles"] = torch.view_as_complex(weights["angles"])
    expected = export(saved["fsdp 2"] / "run", tmp_path / "other.safetensors")
    assert expected.exit_code == 0 and set(weights) == set(load_file(tmp_path / "other.safetensors"))
    assert all(torch.equal(each, bodies.value(name, tuple(each.shape), each.dtype)) for name, each in weights.items())
    assert batch_statistics(saved[mesh] / "run") == ["norm"]


@pytest.mark.parametrize("to", ["fsdp 3", *of_many(*(each for each in MESHES if each != "fsdp 3"))])
def test_from_any_mesh_to_any_other_to_the_last_bit(saved: dict[str, Path], tmp_path: Path, to: str) -> None:
    ranks = run_on(bodies.restores_each, to, tmp_path / "run", folders=[saved[mesh] / "run" for mesh in SAVED])
    for found in ranks:
        for mesh, each in zip(SAVED, found, strict=True):
            assert each["wrong"] == [] and each["step"] == 2, mesh
            assert each["array"] == [0, 1, 2] and each["open"] == 0


def test_a_rank_reads_what_it_needs_and_every_byte_is_checked_once(saved: dict[str, Path]) -> None:
    """Three ranks: all of them together read all for the digests, and each again what it keeps."""
    folder = checkpoint(saved["fsdp 2"])
    told = manifest.read(folder)
    tensors = sum(told["files"][name]["bytes"] for name in manifest.shards(told))
    ranks = run_on(bodies.restores, "fsdp 3", saved["fsdp 2"])
    read = sum(found["read"] for found in ranks)
    assert 1.9 * tensors < read < 2.4 * tensors, "headers and what is not spread are read by all of them"
    assert max(found["read"] for found in ranks) < 1.2 * tensors


def test_a_model_of_another_shape_is_refused_by_name(saved: dict[str, Path]) -> None:
    for text in run_on(bodies.refuses, "fsdp 3", saved["fsdp 2"]):
        assert "the saved weights do not fit this model" in text
        assert "size mismatch for odd.weight: copying a param with shape torch.Size([33, 65]) from checkpoint" in text
        assert "the shape in current model is torch.Size([34, 65])" in text


def flip_a_bit(file: Path, at: int = -5) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


SHARD = "model-00002-of-00002.safetensors"
DAMAGES = {
    "part": f"{SHARD} does not match its digest in the manifest: the part that rank 1 wrote",
    "header": f"{SHARD} does not match its digest in the manifest: the part that rank 0 wrote",
    "missing": f"{SHARD} is missing",
    "shorter": f"{SHARD} has ",
    "parts.json": "parts.json does not match its digest in the manifest",
    "index": "model.safetensors.index.json does not match its digest in the manifest",
}


def damage(checkpoint: Path, kind: str) -> None:
    file = checkpoint / {"parts.json": "parts.json", "index": "model.safetensors.index.json"}.get(kind, SHARD)
    if kind == "missing":
        file.unlink()
    elif kind == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        flip_a_bit(file, 100 if kind == "header" else -5)


@pytest.mark.parametrize("mesh", ["fsdp 3", *of_many("fsdp 2", "whole 2")])
def test_what_is_damaged_is_named_and_passed_over(saved: dict[str, Path], tmp_path: Path, mesh: str) -> None:
    for kind, told in DAMAGES.items():
        shutil.copytree(saved["fsdp 2"] / "run", tmp_path / kind)
        newest = CheckpointStorage(tmp_path / kind / "checkpoints").path(2)
        damage(newest, kind)
        assert (manifest.problem(newest) or "").startswith(told)
    ranks = run_on(bodies.restores_each, mesh, tmp_path / "run", folders=[tmp_path / kind for kind in DAMAGES])
    for number, (kind, told) in enumerate(DAMAGES.items()):
        for rank, found in enumerate(each[number] for each in ranks):
            assert (found["wrong"], found["step"]) == ([], 1), kind
            assert len(found["warnings"]) == (rank == 0)
        (warning,) = ranks[0][number]["warnings"]
        assert "checkpoint step-00000002 is damaged and is passed over: " in warning and told in warning


@pytest.mark.parametrize(("rank", "at"), of_many((1, "writing"), (0, "writing"), (0, "renaming")))
def test_a_rank_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path, rank: int, at: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(lockstep.WorkerFailed, match=f"rank {rank}"):
        run_on(bodies.ends_while_saving, "fsdp 3", run, rank=rank, at=at)
    storage = CheckpointStorage(run / "run" / "checkpoints")
    assert storage.steps() == [1]
    assert len(list(storage.folder.glob(".partial-step-00000002-*"))) == 1, "where it was at work"
    assert storage.problem(1) is None
    if at == "writing":
        return
    ranks = run_on(bodies.restores, "fsdp 2", run)
    assert [(found["wrong"], found["step"], found["warnings"]) for found in ranks] == [([], 1, [])] * 2
    assert [path.name for path in storage.folder.glob("[!.]*")] == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "512k") as disk:
        yield disk


@pytest.mark.parametrize(("rank", "blind"), [(1, False), *of_many((0, False), (0, True))])
def test_a_disk_that_is_full_on_one_rank_is_told_by_all_and_the_next_save_works(
    tmp_path: Path, small_disk: Path, rank: int, blind: bool
) -> None:
    ranks = run_on(bodies.fills_the_disk, "fsdp 2", tmp_path / "run", disk=small_disk, rank=rank, blind=blind)
    for found in ranks:
        assert "step-00000002: the checkpoint could not be written: " in found["told"]
        assert "No space left on device" in found["told"] and "make room" in found["told"]
        assert found["left"] == ["step-00000001"]
    storage = CheckpointStorage(small_disk / "run" / "checkpoints")
    assert storage.steps() == [1, 3] and [storage.problem(step) for step in (1, 3)] == [None, None]


def test_a_rank_that_does_not_write_is_named_within_the_limit(tmp_path: Path) -> None:
    ranks = run_on(bodies.writes_for_ever, "fsdp 3", tmp_path / "run")
    for found in (ranks[0], ranks[2]):
        assert "the checkpoint was not written: rank 1 did not write the parts within 1.5 s" in found["told"]
        assert found["left"] == []


def test_ranks_whose_state_differs_are_named(tmp_path: Path) -> None:
    for shape, more in run_on(bodies.saves_what_differs, "fsdp 2", tmp_path / "run"):
        assert "no checkpoint can be written: on rank 1 'model/odd.weight' is" in shape
        assert "[34, 65]" in shape and "[33, 65]" in shape
        assert "on rank 1 the state has 'state/attached.average.weights.extra', which rank 0 has not" in more


@pytest.mark.parametrize(("mesh", "blind"), [("fsdp 3", [1]), *of_many(("data x model 2x2", [2, 3]))])
def test_hosts_with_disks_of_their_own_save_to_rank_0_and_restore_from_it(
    tmp_path: Path, mesh: str, blind: list[int]
) -> None:
    run = tmp_path / "run"
    for rank, found in enumerate(run_on(bodies.apart, mesh, run, blind=blind, saving=True)):
        assert found["left"] == ([] if rank in blind else ["step-00000001", "step-00000002"])
    storage = CheckpointStorage(run / "a" / "checkpoints")
    assert [storage.problem(step) for step in (1, 2)] == [None, None]
    flip_a_bit(
        storage.path(2) / "state-00001-of-00003.safetensors" if mesh == "fsdp 3" else storage.path(2) / "state.json"
    )
    for rank, found in enumerate(run_on(bodies.apart, mesh, run, blind=blind, saving=False)):
        assert found["wrong"] == [] and found["step"] == 1
        assert found["left"] == ([] if rank in blind else ["step-00000001", "step-00000002"])


# What else reads checkpoints


def test_commands_know_what_several_ranks_wrote(saved: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved["data x model 2x2"] / "run", run)
    listed = lockstep_checkpoint("list", run).stdout.splitlines()
    assert [line.split()[:1] for line in listed[1:]] == [["1"], ["2"]] and listed[1].split()[3:5] == ["4", "2"]
    assert lockstep_checkpoint("verify", run).exit_code == 0
    merged = export(run, tmp_path / "model.safetensors")
    assert merged.exit_code == 0, merged.output
    weights = load_file(tmp_path / "model.safetensors")
    weights["angles"] = torch.view_as_complex(weights["angles"])
    index = json.loads((CheckpointStorage(run / "checkpoints").path(2) / "model.safetensors.index.json").read_text())
    assert set(weights) == set(index["weight_map"])
    assert all(torch.equal(each, bodies.value(name, tuple(each.shape), each.dtype)) for name, each in weights.items())
    flip_a_bit(CheckpointStorage(run / "checkpoints").path(1) / "state-00003-of-00004.safetensors")
    verified = lockstep_checkpoint("verify", run)
    assert verified.exit_code == 5 and "step-00000002 is whole" in verified.stdout
    assert re.search(
        r"step-00000001 is damaged: state-00003-of-00004.safetensors .* the part that rank \d wrote", verified.stdout
    )
    assert batch_statistics(run) == ["norm"]


def test_a_bucket_keeps_all_files_and_gives_them_back(saved: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved["fsdp 3"] / "run", run)
    bucket = Bucket(parse(f"file://{tmp_path}/bucket/run", "--out"))
    Uploads(bucket, run, Keep(), print).push()
    assert list(bucket.digests()) == [1, 2]
    kept = tmp_path / "bucket" / "run" / "checkpoints"
    flip_a_bit(kept / "step-00000002" / "state-00001-of-00003.safetensors")
    assert staging.pull_checkpoint(bucket, tmp_path / "back") == 1
    assert CheckpointStorage(tmp_path / "back" / "checkpoints").problem(1) is None
    (kept / "step-00000001" / "parts.json").unlink()
    assert 1 not in bucket.digests()


def test_going_back_and_deleting_old_ones(saved: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved["fsdp 2"] / "run", run)
    assert start.go_back(run, start.Wanted(step=1), "min") == 1
    assert sorted(path.name for path in (run / "checkpoints").glob("*step*")) == [
        "aside-step-00000002",
        "step-00000001",
    ]
    once = tmp_path / "few"
    run_on(bodies.saves, "fsdp 2", once, steps=3, keep={"last": 1, "best": 0})
    assert CheckpointStorage(once / "run" / "checkpoints").steps() == [3]
