"""Device families: which one is used, with how many processes, and what is said where that cannot be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import runtime
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError
from lockstep.runtime.cpu import CpuRuntime
from lockstep.runtime.cuda import CudaRuntime
from lockstep.runtime.gpus import check_devices, visible_of
from lockstep.runtime.moving import map_tensors

Pair = namedtuple("Pair", "x y")


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("without_gpus")
@pytest.mark.parametrize(
    ("family", "processes", "expected"),
    [
        ("auto", "auto", ("cpu", 1)),
        ("auto", 3, ("cpu", 3)),
        ("cpu", "auto", ("cpu", 1)),
        ("cpu", 2, ("cpu", 2)),
    ],
)
def test_auto_stands_for_what_is_there(family: str, processes: Any, expected: tuple[str, int]) -> None:
    assert runtime.resolve(RunSettings(runtime=family, processes=processes)) == expected


@pytest.mark.requirement("D13")
@pytest.mark.usefixtures("without_gpus")
def test_gpus_that_are_not_there_are_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"runtime: cuda was asked for but torch .* sees no GPU .*runtime: cpu"):
        runtime.resolve(RunSettings(runtime="cuda"))


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed here")
@pytest.mark.requirement("R12")
def test_without_torch_xla_its_runtime_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"runtime: xla needs torch_xla.*pip install 'lockstep-train\[xla\]'"):
        runtime.resolve(RunSettings(runtime="xla"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "threads"}, "strategy: threads needs runtime: xla"),
        ({"strategy": "spmd"}, "strategy: spmd needs runtime: xla, .* Use strategy: fsdp or hsdp, or tensor"),
        ({"devices": 4}, "devices: 4 is for XLA devices of one process.*set processes: 4 instead"),
    ],
)
def test_what_only_xla_can_do_is_not_ignored_elsewhere(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runtime.resolve(RunSettings.model_validate({"runtime": "cpu", **settings}))


@pytest.mark.requirement("D13")
@pytest.mark.parametrize(
    ("wanted", "present", "visible", "message"),
    [
        (1, 1, None, None),
        (2, 4, None, None),
        (
            2,
            1,
            None,
            r"processes: 2 processes need 2 GPUs on this host, but 1 are visible \(CUDA_VISIBLE_DEVICES is not",
        ),
        (3, 2, "4,5", r"but 2 are visible \(CUDA_VISIBLE_DEVICES=4,5\)\. Set processes to 2 or less"),
        (1, 0, None, "sees no GPU"),
        (1, 0, "", r"sees no GPU \(CUDA_VISIBLE_DEVICES=\)"),
    ],
)
def test_two_processes_never_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch, wanted: int, present: int, visible: str | None, message: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if message is None:
        check_devices(wanted, present)
        return
    with pytest.raises(ConfigError, match=message):
        check_devices(wanted, present)


@pytest.mark.requirement("D03")
def test_the_local_rank_picks_the_device_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    assert [str(CudaRuntime(local_rank).device) for local_rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("family", ["cpu", "cuda"])
def test_a_family_is_made_by_its_name(family: str) -> None:
    assert runtime.create(family, 1, 2, RunSettings()).name == family


def test_a_batch_keeps_its_nesting_when_its_tensors_change() -> None:
    one = torch.ones(1)
    batch = {"a": [one, (one, "text")], "b": Pair(one, None), "c": 3}
    changed = map_tensors(lambda tensor: tensor * 2, batch)
    two = torch.full((1,), 2.0)
    assert changed == {"a": [two, (two, "text")], "b": Pair(two, None), "c": 3}
    assert isinstance(changed["b"], Pair)


def test_precision_is_what_was_asked_for() -> None:
    cpu = CpuRuntime()
    weight = torch.ones(2, 2)
    with cpu.autocast("float32"):
        assert (weight @ weight).dtype == torch.float32
    with cpu.autocast("bf16"):
        assert (weight @ weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("present", "visible", "usable"),
    [
        (8, None, 8),
        (8, "0,1", 2),
        (2, " 1", 1),
        (2, "0,5,1", 1),  # CUDA stops at the first that is not there
        (4, "1,1", 0),
        (4, "GPU-5ac1", None),
        (4, "0,MIG-7", None),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(present: int, visible: str | None, usable: int | None) -> None:
    assert visible_of(present, visible) == usable


NVML = """
extern "C" int nvmlInit_v2() { return 0; }
extern "C" int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
extern "C" int nvmlDeviceGetCount_v2(int *count) { *count = 4; return 0; }
"""


@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="makes a driver's library by g++")
def test_gpus_are_counted_by_the_driver_without_torch(tmp_path: Path) -> None:
    """With a driver of four GPUs, and a torch that is there and cannot be imported."""
    (tmp_path / "nvml.cpp").write_text(NVML)
    command = ["g++", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.cpp"]
    subprocess.run(command, check=True)
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch is imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    code = "from lockstep import runtime; from lockstep.config.schema import RunSettings as Settings; "
    code += "print(runtime.resolve(Settings(runtime='cuda', processes='auto')))"
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "0,2,3",
    }  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "('cuda', 3)", ended.stderr
