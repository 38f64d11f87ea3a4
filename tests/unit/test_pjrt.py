"""What PJRT reads from the environment, and what is refused before a process is started."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError
from lockstep.runtime import pjrt


def settings(**values: Any) -> RunSettings:
    return RunSettings.model_validate({"runtime": "xla", **values})


@pytest.mark.requirement("X01")
@pytest.mark.requirement("R13")
@pytest.mark.parametrize(
    ("config", "env", "expected"),
    [
        (None, {}, "CPU"),
        (None, {"PJRT_DEVICE": "TPU"}, "TPU"),
        (None, {"PJRT_DEVICE": "GPU"}, "CUDA"),  # its old name
        (None, {"PJRT_DEVICE": "cuda"}, "CUDA"),
        (None, {"PJRT_DEVICE": "TPU_C_API"}, "TPU"),
        ("CPU", {"PJRT_DEVICE": "TPU"}, "CPU"),
        ("GPU", {}, "CUDA"),
    ],
)
def test_the_device_family(config: str | None, env: dict[str, str], expected: str) -> None:
    assert pjrt.device_family(settings(xla={"device": config}), env) == expected


@pytest.mark.requirement("X03")
@pytest.mark.requirement("X05")
@pytest.mark.requirement("R09")
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"PJRT_DEVICE": "CPU"}),
        ({"devices": 4}, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}),
        ({"devices": 2, "xla": {"device": "CUDA"}}, {"PJRT_DEVICE": "CUDA", "GPU_NUM_DEVICES": "2"}),
        (
            {"xla": {"device": "CUDA", "memory_fraction": 0.5, "preallocate": False}},
            {"PJRT_DEVICE": "CUDA", "PJRT_ALLOCATOR_FRACTION": "0.5", "PJRT_ALLOCATOR_PREALLOCATE": "false"},
        ),
        (
            {"xla": {"device": "TPU", "chips": [0]}},
            {"PJRT_DEVICE": "TPU", "TPU_VISIBLE_CHIPS": "0", "TPU_PROCESS_BOUNDS": "1,1,1",
             "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"},
        ),
    ],
)  # fmt: skip
def test_the_variables_that_are_really_read(values: dict[str, Any], expected: dict[str, str]) -> None:
    assert pjrt.variables(settings(**values), {}) == expected


@pytest.mark.parametrize(
    ("values", "processes", "message"),
    [
        ({"strategy": "spmd"}, 2, r"spmd with 2 processes cannot work on PJRT CPU.*processes: 1 with devices: 2"),
        ({"strategy": "threads"}, 2, "threads drives all devices of one process, but there are 2"),
        ({"strategy": "ddp", "devices": 2}, 2, "devices: 2 with strategy: ddp"),
        ({"devices": 4}, 1, "devices: 4 with strategy: auto.*use strategy: spmd or threads"),
        ({"xla": {"device": "TPU"}}, 1, "PJRT_DEVICE=TPU, but this host has no TPU chip"),
        ({"xla": {"chips": [0]}}, 1, r"xla.chips: \[0\] names TPU chips, but the device family is CPU"),
        ({}, 1, "PJRT_DEVICE='ABACUS' is not known: use CPU, TPU or CUDA"),
    ],
)
def test_what_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], processes: int, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if torch_xla were there
    env = {"PJRT_DEVICE": "ABACUS"} if "ABACUS" in message else {}
    with pytest.raises(ConfigError, match=message):
        pjrt.check(settings(**values), env, processes)


def test_auto_is_one_process_where_there_is_no_chip() -> None:
    assert pjrt.processes(settings(), {}) == 1
    assert pjrt.processes(settings(strategy="ddp", xla={"device": "TPU", "chips": [0, 1]}), {}) == 2


@pytest.mark.requirement("R08")
def test_the_cuda_plugin_is_told_what_the_variables_say() -> None:
    env = {"PJRT_ALLOCATOR_FRACTION": "0.25", "PJRT_ALLOCATOR_PREALLOCATE": "true"}
    assert pjrt.client_options(env) == {"platform_name": "cuda", "memory_fraction": 0.25, "preallocate": True}
    assert pjrt.client_options({"GPU_NUM_DEVICES": "2"})["visible_devices"] == [0, 1]
    several = pjrt.client_options({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"})
    assert several == {"platform_name": "cuda", "num_nodes": 4, "node_id": 3, "visible_devices": [1]}


@pytest.fixture
def make_plugin(tmp_path: Path) -> Callable[[int], str]:
    """A library with the beginning of PJRT's table of functions, of a version, that calls its devices CUDA."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")

    def make(minor_version: int) -> str:
        source, library = tmp_path / "plugin.c", tmp_path / "xla_cuda_plugin.so"
        source.write_text(PLUGIN.replace("MINOR", str(minor_version)))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
        return str(library)

    return make


PLUGIN = """
#include <stddef.h>
struct asked { size_t size; void *extension; void *client; const char *name; size_t length; };
static void *tell(struct asked *asked) { asked->name = "cuda"; asked->length = 4; return 0; }
static const struct table {
    size_t size; void *extension;
    struct { size_t size; void *extension; int major, minor; } version;
    void *others[12]; void *(*platform_name)(struct asked *);
} api = { sizeof api, 0, { 24, 0, 0, MINOR }, { 0 }, tell };
const void *GetPjrtApi(void) { return &api; }
static const struct table *volatile looked_up = &api;
int platform_name_is(const char *expected) {
    struct asked asked = { sizeof asked };
    looked_up->platform_name(&asked);
    for (size_t at = 0; at < asked.length; at++) if (asked.name[at] != expected[at]) return 0;
    return expected[asked.length] == 0;
}
"""


def test_the_cuda_plugin_goes_by_a_name_that_torch_xla_does_not_refuse(make_plugin: Callable[[int], str]) -> None:
    """It ends the process over CUDA: seen on an NVIDIA H200."""
    library = make_plugin(75)
    loaded = ctypes.CDLL(library)
    assert loaded.platform_name_is(b"cuda")
    pjrt._go_by_another_name(library)
    assert loaded.platform_name_is(b"gpu")


@pytest.mark.requirement("X05")
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_torch_xla_is_told_of_the_cuda_plugin(
    make_plugin: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_xla.experimental import plugins

    library = make_plugin(75)
    monkeypatch.setattr(pjrt, "library_path", lambda: library)
    monkeypatch.setattr(pjrt, "gpu_count", lambda env: 2)
    for name, value in {"PJRT_DEVICE": "CUDA", "GPU_NUM_DEVICES": "1", "PJRT_DYNAMIC_PLUGINS": ""}.items():
        monkeypatch.setenv(name, value)
    pjrt.register_cuda_plugin()
    registered = plugins.default()
    assert plugins.using_dynamic_plugins()
    assert (registered.library_path(), registered.physical_chip_count()) == (library, 2)
    assert registered.client_create_options() == {"platform_name": "cuda", "visible_devices": [0]}
    assert not registered.requires_xla_coordinator()


def test_a_cuda_plugin_that_is_too_new_for_torch_xla_is_refused(make_plugin: Callable[[int], str]) -> None:
    with pytest.raises(ConfigError, match=r"speaks version 0\.76 of the PJRT API.*0\.75.*'jax-cuda12-pjrt==0\.7\.1'"):
        pjrt._go_by_another_name(make_plugin(76))


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="a PJRT plugin is installed")
def test_without_the_plugin_or_a_gpu_the_remedy_is_told() -> None:
    with pytest.raises(ConfigError, match=r"needs a PJRT plugin for CUDA.*pip install 'lockstep-train\[xla-cuda\]'"):
        pjrt.library_path()
    assert pjrt.gpu_count({"CUDA_VISIBLE_DEVICES": ""}) == 0
