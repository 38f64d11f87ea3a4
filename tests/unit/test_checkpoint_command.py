"""`lockstep checkpoint`: on what one rank has saved. What several have: tests/ranks/test_sliced_checkpoints.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from lockstep.checkpoint import codec
from lockstep.checkpoint.manifest import MODEL_FILE
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import Snapshot, write
from lockstep.cli import main
from lockstep.runs.reader import read_run

MODEL = {
    "w": torch.arange(6.0).reshape(2, 3),
    "flag": torch.ones(3, dtype=torch.bool),
    "z": torch.ones(2, dtype=torch.complex128),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 5 and 10, and something that was set aside."""
    storage = CheckpointStorage(tmp_path / "checkpoints")
    for step in (5, 10, 15):
        tree, tensors = codec.pack({"momentum": torch.ones(7)})
        about = {"value": step / 8, "epoch": 1, "world_size": 2, "metrics": {"val/loss": 0.5}, "created": "2026-01-01"}
        write(storage, Snapshot(step, MODEL, tree, tensors, {}, about))
    storage.set_aside_after(10)
    return tmp_path


def lockstep(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def damage(run: Path, step: int) -> None:
    file = CheckpointStorage(run / "checkpoints").path(step) / MODEL_FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_list(run: Path) -> None:
    (run / "checkpoints" / "step-00000010" / "state.json").unlink()
    found = lockstep("list", run)
    assert found.exit_code == 0, found.output
    header, first, second, aside = found.stdout.splitlines()
    assert header.split() == ["step", "epoch", "saved", "ranks", "format", "size", "value"]
    assert first.split()[:2] == ["5", "1"] and "0.625" in first
    assert second.split()[0] == "10" and second.endswith("state.json is missing")
    assert aside == "set aside: aside-step-00000015"


def test_verify(run: Path) -> None:
    assert lockstep("verify", run).stdout == "step-00000005 is whole\nstep-00000010 is whole\n"
    damage(run, 5)
    found = lockstep("verify", run)
    assert found.exit_code == 5
    told = "step-00000005 is damaged: model.safetensors does not match its digest in the manifest"
    assert found.stdout == f"{told}\nstep-00000010 is whole\n"
    assert lockstep("verify", run, "--step", 10).exit_code == 0
    missing = lockstep("verify", run, "--step", 6)
    assert missing.exit_code == 5 and "there is no checkpoint of step 6 (steps with one: 5, 10)" in missing.output


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", "--to", "safetensors", *map(str, arguments)])


def test_weights_are_exported_without_a_task_or_a_config(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    found = export(run, "--out", out, "--step", 5)
    assert found.exit_code == 0, found.output
    merged = load_file(out)
    assert torch.equal(merged["w"], MODEL["w"]) and torch.equal(merged["flag"], MODEL["flag"])
    assert torch.equal(torch.view_as_complex(merged["z"]), MODEL["z"])
    assert out.read_bytes() == (run / "checkpoints" / "step-00000005" / MODEL_FILE).read_bytes()
    again = export(run, "--out", out)
    assert again.exit_code == 2 and "is there already" in again.output
    damage(run, 10)
    refused = export(run, "--out", tmp_path / "other.safetensors")
    assert refused.exit_code == 5 and "step-00000010 is damaged: model.safetensors" in refused.output
    assert not (tmp_path / "other.safetensors").exists() and not list(tmp_path.glob(".*partial*"))


SAVES = """
import sys, torch
from pathlib import Path
from lockstep.checkpoint import codec
from lockstep.checkpoint.writer import Snapshot, write
from lockstep.checkpoint.storage import CheckpointStorage
storage, step = CheckpointStorage(Path(sys.argv[1])), 100
while True:
    tree, tensors = codec.pack({"momentum": torch.ones(7)})
    for each in (step, step):  # the second takes the place of the first
        write(storage, Snapshot(each, {"w": torch.ones(300_000)}, tree, tensors, {}, {"epoch": 1}))
    storage.delete(step - 1) if step > 100 else print("begun", flush=True)
    step += 1
"""


def test_checkpoints_of_a_run_at_work_are_not_damaged(run: Path) -> None:
    (run / "summary.json").write_text("{}")
    with subprocess.Popen([sys.executable, "-c", SAVES, str(run / "checkpoints")], stdout=subprocess.PIPE) as saves:
        assert saves.stdout is not None and saves.stdout.readline()
        try:
            found = [lockstep(verb, run) for _ in range(20) for verb in ("verify", "list")]
            pages = [read_run(run) for _ in range(50)]
        finally:
            saves.kill()
    assert {each.exit_code for each in found} == {0}
    assert not [each.output for each in found if "damaged" in each.output or "missing" in each.output]
    assert not [each.problem for page in pages for each in page.checkpoints if each.problem]


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_where_there_is_nothing(run: Path, tmp_path: Path, verb: str) -> None:
    nothing = lockstep(verb, tmp_path / "nowhere")
    assert nothing.exit_code == 2 and "there is no such folder" in nothing.output
    shutil.rmtree(run / "checkpoints")
    empty = lockstep(verb, run)
    assert empty.exit_code == 2 and f"there is no checkpoint in {run}/checkpoints" in empty.output
    bucket = lockstep(verb, "s3://bucket/run")
    assert bucket.exit_code == 2 and "copy the run's folder here first" in bucket.output


def test_none_of_it_imports_torch(run: Path) -> None:
    commands = [["list", run], ["verify", run]]
    code = (
        "import json, sys\nfrom lockstep.cli import main\n"
        "for each in json.loads(sys.argv[1]): main(['checkpoint', *each], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    argv = [sys.executable, "-c", code, json.dumps(commands, default=str)]
    subprocess.run(argv, timeout=60, check=True, capture_output=True)
