"""Device families: which one is used, with how many processes, and what is said where that cannot be."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from lockstep import runtime
from lockstep.errors import ConfigError
from lockstep.runtime.base import map_tensors
from lockstep.runtime.cpu import CpuRuntime
from lockstep.runtime.cuda import CudaRuntime, check_devices

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
    assert runtime.resolve(family, processes) == expected


@pytest.mark.requirement("D13")
@pytest.mark.usefixtures("without_gpus")
def test_gpus_that_are_not_there_are_told_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"runtime: cuda was asked for but torch .* sees no GPU .*runtime: cpu"):
        runtime.resolve("cuda", "auto")


def test_a_family_of_a_later_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="runtime: xla is not part of this version"):
        runtime.resolve("xla", "auto")


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
    assert runtime.create(family, local_rank=1).name == family


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
