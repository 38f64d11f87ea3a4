"""The runtime itself: what it says of its devices, its generator, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from xla_ways import needs_torch_xla, on_xla

from conftest import Project, losses

pytestmark = needs_torch_xla

BODY = Path(__file__).with_name("xla_bodies.py")


def call(body: str, **env: str) -> Any:
    """What a function of bodies.py returned, called in a process of its own."""
    finished = subprocess.run(
        [sys.executable, str(BODY), body], env={**os.environ, **env}, capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.requirement("X01")
def test_pjrt_device_alone_selects_the_runtime() -> None:
    assert call("what_auto_is", PJRT_DEVICE="CPU") == ["xla", "CPU"]


@pytest.mark.requirement("P01")
@pytest.mark.requirement("P02")
@pytest.mark.requirement("R11")
def test_devices_meshes_and_processes_are_told() -> None:
    found = call("devices_of_a_mesh")
    assert found == {
        "addressable": 4, "global": 4, "process": [0, 1], "mesh": {"data": 2, "model": 2},
        "wide": {"data": 2, "model": 2, "height": 1, "width": 1}, "weight": True, "bias": False,
    }  # fmt: skip


@pytest.mark.requirement("X11")
@pytest.mark.requirement("X07")
def test_two_processes_talk_through_their_hosts() -> None:
    found = call("two_processes")
    assert found["weights"][0] == found["weights"][1]  # each drew its own, and both have rank 0's
    assert found["exchanged"] == [["rank 0", "rank 1"]] * 2
    assert found["devices"] == [[1, 2]] * 2
    assert len(set(found["identities"])) == 2


@pytest.mark.requirement("R05")
def test_a_process_that_sees_several_devices_uses_that_of_its_local_rank(project: Project) -> None:
    assert call("two_processes")["used"] == ["xla:0", "xla:0"]  # each sees its own, under the same name
    assert call("two_processes", CPU_NUM_DEVICES="2")["used"] == ["xla:0", "xla:1"]
    train = {"epochs": 1, "batch_size": 16}
    reference = project.train(out="cpu", train=train, processes=1)
    config = project.config(train=train, **on_xla("ddp", processes=2))
    finished = project.run("train", config, "--out", "xla", env={"CPU_NUM_DEVICES": "2"})
    assert finished.code == 0, finished.text
    assert losses(project.only_run("xla")) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.requirement("P02")
def test_spmd_comes_too_late_where_a_device_was_used_before() -> None:
    finished = subprocess.run(
        [sys.executable, str(BODY), "spmd_after_a_device_was_used"], capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 2, finished.stderr
    assert "strategy: spmd must be switched on before any XLA device is used" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.requirement("R04")
@pytest.mark.requirement("R07")
def test_a_collective_that_does_nothing_is_caught_by_the_roll_call(project: Project) -> None:
    """PJRT CPU says that it reduced over both processes, and leaves the tensor as it was."""
    finished = subprocess.run(
        [sys.executable, str(BODY), "silent_collective"], capture_output=True, text=True, timeout=180
    )
    assert finished.returncode == 3, finished.stderr
    assert "rank 0 received nothing from rank 1" in finished.stderr


def test_the_generator_is_seeded_and_goes_on_where_it_was() -> None:
    found = call("random_numbers")
    assert found["first"] == found["again"] != found["other seed"]
    assert found["after"] == found["after restoring"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (on_xla({"type": "spmd", "mesh": {"data": 3, "model": 2}}, 4), "is a mesh of 6 devices, but there are 4"),
        (on_xla({"type": "spmd", "mesh": {"data": -1, "model": 3}}, 4), "make 3, which does not divide the 4 devices"),
        (
            on_xla({"type": "spmd", "shard": {"7.weights": ["data", None]}}, 4),
            r"strategy.shard.7.weights: no parameter has a name like that; the nearest are ",
        ),
        (
            on_xla({"type": "spmd", "shard": {"0.weight": ["data", None, None]}}, 4),
            "[data, null, null] has 3 entries, but '0.weight' has 2 dimensions [16, 8]",
        ),
        (
            on_xla({"type": "spmd", "mesh": {"data": 1, "model": 3}, "shard": {"0.weight": ["model", None]}}, 3),
            "dimension 0 of '0.weight' [16, 8] is 16, which model (3 devices) does not divide",
        ),
        (on_xla("spmd", processes=2), "strategy: spmd with 2 processes cannot work on PJRT CPU"),
        (on_xla("ddp", 2, processes=2), "devices: 2 with strategy: ddp"),
        ({**on_xla("single"), "xla": {"device": "TPU"}}, "this host has no TPU chip"),
        ({**on_xla("single"), "xla": {"device": "CUDA"}}, "PJRT_DEVICE=CUDA"),  # no plugin, or no GPU
    ],
)
@pytest.mark.requirement("P03")
@pytest.mark.requirement("P04")
def test_what_cannot_work_is_refused_with_the_numbers(project: Project, values: Any, message: str) -> None:
    finished = project.run("train", project.config(**{**values, "train": {"steps": 1, "batch_size": 12}}))
    assert finished.code == 2, finished.text
    assert message in finished.err
    assert "Traceback" not in finished.err


def test_a_task_that_uses_a_device_at_import_comes_after_spmd_is_on(project: Project) -> None:
    (project.folder / "early.py").write_text(
        "import torch, torch_xla\nimport sys; sys.path.insert(0, " + repr(str(Path(__file__).parents[1])) + ")\n"
        "torch.zeros(1, device=torch_xla.device())\nfrom tasks import Tiny\n"
    )
    finished = project.run("train", project.config(**{**on_xla("spmd", 2), "task": {"type": "early.py:Tiny"}}))
    # The device is chosen before the task is imported, so that nothing of the task's can come first.
    assert finished.code == 0, finished.text


def test_an_unknown_family_is_told(project: Project) -> None:
    config = project.config(**{**on_xla("single"), "xla": {}})
    finished = project.run("train", config, env={"PJRT_DEVICE": "QUANTUM"})
    assert finished.code == 2
    assert "PJRT_DEVICE='QUANTUM' is not known: use CPU, TPU or CUDA" in finished.err


def test_the_doctor_takes_a_step_on_it(project: Project) -> None:
    finished = project.run("doctor", "--runtime", "xla", "--processes", "1", env={"PJRT_DEVICE": "CPU"})
    assert "a training step works" in finished.text, finished.text
