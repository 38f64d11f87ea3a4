"""What the example programs work out before they start anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import ROOT
from lockstep.config.schema import RunSettings
from lockstep.config.strategy import Strategy
from lockstep.errors import ConfigError
from lockstep.strategy import mesh as meshing
from lockstep.strategy.mesh import shard_rules


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, Any]]:
    """The programs as modules, gone again afterwards: other tests load them from their files."""
    names = ("idx", "program", "mnist", "mnist_xla", "resnet50")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "examples"))
        for name in names:
            sys.modules.pop(name, None)


def split(program: Any, devices: int, hosts: int = 1) -> dict[str, Any]:
    """How the weights of mnist_xla.py are split on so many devices, by what Lockstep itself holds rules to."""
    settings = Strategy.model_validate(program.strategy(hosts))
    meshes = meshing.resolve_meshes(settings, devices)
    weights = {name: tuple(each.shape) for name, each in program.MNISTNet().named_parameters()}
    found = meshing.shardings(weights, meshes, settings, shard_rules(program.shard_rules(devices)))
    return {name: (tuple(meshes[each.mesh].values()), each.spec) for name, each in found.items()}


@pytest.mark.requirement("P05")
@pytest.mark.parametrize(("devices", "data"), [(2, 1), (4, 2)])
def test_the_weights_are_split_as_in_the_tutorial(examples: dict[str, Any], devices: int, data: int) -> None:
    linear, conv = (data, 2), (data, 2, 1, 1)
    assert split(examples["mnist_xla"], devices) == {
        "conv1.weight": (conv, ("data", None, None, None)),
        "conv2.weight": (conv, ("data", None, None, None)),
        "fc1.weight": (linear, ("data", None)),
        "fc2.weight": (linear, ("data", "model")),
    }


@pytest.mark.parametrize(("devices", "hosts"), [(8, 1), (16, 4), (32, 8)])
def test_classes_that_do_not_divide_are_kept_together(examples: dict[str, Any], devices: int, hosts: int) -> None:
    found = split(examples["mnist_xla"], devices, hosts)
    assert found["fc2.weight"] == ((devices // 2, 2), (None, "model"))
    assert found["conv1.weight"] == ((devices // 2, 2, 1, 1), ("data", None, None, None))


def test_several_hosts_spread_their_batches_over_all_devices(examples: dict[str, Any]) -> None:
    one, several = (Strategy.model_validate(examples["mnist_xla"].strategy(hosts)) for hosts in (1, 4))
    assert meshing.resolve_meshes(one, 16)[meshing.MAIN] == {"data": 8, "model": 2}
    assert meshing.resolve_meshes(several, 16)[meshing.MAIN] == {"data": 16}


def test_an_odd_number_of_devices_is_refused_with_the_numbers(examples: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which does not divide the 3 devices"):
        split(examples["mnist_xla"], 3)


@pytest.mark.parametrize(
    ("arguments", "env", "devices"),
    [
        ([], {}, 4),
        ([], {"PJRT_DEVICE": "CPU"}, 4),
        ([], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, "auto"),
        (["--devices", "2"], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, 2),
        ([], {"PJRT_DEVICE": "TPU"}, "auto"),
    ],
)
def test_all_devices_are_used_and_a_cpu_pretends_to_have_some(
    examples: dict[str, Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], env: dict[str, str], devices: Any
) -> None:
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    program = examples["mnist_xla"]
    settings = RunSettings.model_validate(program.launch_settings(program.parse(["out", *arguments])))
    assert (settings.runtime, settings.strategy.type, settings.devices) == ("xla", "spmd", devices)


@pytest.mark.parametrize(
    ("env", "processes"),
    [({"PJRT_DEVICE": "CPU"}, 2), ({"PJRT_DEVICE": "TPU"}, "auto"), ({"PJRT_DEVICE": "GPU"}, "auto")],
)
def test_ddp_takes_two_processes_on_a_cpu_and_all_devices_elsewhere(
    examples: dict[str, Any], env: dict[str, str], processes: int | str
) -> None:
    assert examples["program"].processes_for_ddp(env) == processes


def test_a_number_that_cannot_be_used_is_shown(examples: dict[str, Any]) -> None:
    assert examples["program"].positive("12") == 12
    for text in ("0", "-1", "many", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"1 or more, got '{text}'"):
            examples["program"].positive(text)


def test_the_network_is_a_resnet_50(examples: dict[str, Any]) -> None:
    """The published network has 25,557,032 parameters in 161 tensors."""
    parameters = list(examples["resnet50"].ResNet50().parameters())
    assert sum(each.numel() for each in parameters) == 25_557_032
    assert len(parameters) == 161
