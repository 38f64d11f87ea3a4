# ruff: noqa: E501  # a compiler's lines are as long as they are
"""Plans for slices of TPUs: what goes to the compiler, and what is read of its answers. It itself: tests/xla."""

from __future__ import annotations

import importlib.util
import itertools
import math
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.planner.devices import known, slice_of, target, topology
from lockstep.planner.tpu import engine
from lockstep.planner.tpu.compile import group_of, padded_bytes, parsed
from lockstep.planner.tpu.engine import refused
from lockstep.planner.tpu.trace import REPLICATED, Entry, of_crash, part, words

MESHES: list[dict[str, int]] = [{"data": 8}, {"data": 4, "model": 2}, {"replica": 2, "data": 2, "model": 2}]


def tiles(text: str, devices: int) -> np.ndarray:
    """The tile of every device, by XLA's own rule: numbers in order, reshaped, transposed, reshaped to the tiles."""
    inside = text.strip("{}").removeprefix("devices=").replace(" last_tile_dim_replicate", "")
    shape, _, source = inside.partition("<=")
    sizes, _, order = source.partition("T")
    numbers = np.arange(devices).reshape([int(each) for each in sizes.strip("[]").split(",")])
    if order:
        numbers = numbers.transpose([int(each) for each in order.strip("()").split(",")])
    grid = numbers.reshape([int(each) for each in shape.strip("[]").split(",")])
    found = np.empty((devices, grid.ndim), dtype=int)
    for place in np.ndindex(*grid.shape):
        found[grid[place]] = place
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_sharding_gives_every_device_the_part_that_the_mesh_says(mesh: Mapping[str, int]) -> None:
    names = list(mesh)
    entries: list[Entry] = [None, *names, *itertools.permutations(names, 2)]
    for spec in itertools.product(entries, repeat=2):
        axes = [axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or [])]
        if len(set(axes)) != len(axes):
            continue
        text = words(spec, mesh)
        if not axes:
            assert text == REPLICATED
            continue
        found = tiles(text, math.prod(mesh.values()))
        for device, place in enumerate(np.ndindex(*mesh.values())):
            at = dict(zip(names, place, strict=True))
            for dimension, entry in enumerate(spec):
                expected = 0
                for axis in [entry] if isinstance(entry, str) else entry or []:
                    expected = expected * mesh[axis] + at[axis]
                assert found[device][dimension] == expected, (spec, text, device)


def test_what_a_device_has_of_a_tensor() -> None:
    mesh = {"data": 4, "model": 2}
    assert part([64, 30], words(["data", "model"], mesh)) == [16, 15]
    assert part([64, 30], words([None, "model"], mesh)) == [64, 15]
    assert part([64, 30], REPLICATED) == [64, 30]


PROGRAM = """\
HloModule step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={(f32[8,128]{1,0})->(f32[8,128]{1,0})}

%all-reduce-scatter.1 (p: f32[16,128]) -> f32[16,128] {
  %p = f32[16,128]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.9 = f32[16,128]{1,0:T(8,128)} all-reduce(%p), channel_id=3, replica_groups=[2,8]<=[16], to_apply=%add
}

ENTRY %main (a: f32[8,128], b: s32[4]) -> (f32[8,128]) {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={devices=[16,1]<=[16]}
  %b = s32[4]{0:T(128)} parameter(1)
  %all-gather-start.1 = (f32[8,128]{1,0:T(8,128)}, f32[128,128]{1,0:T(8,128)}) all-gather-start(%a), channel_id=1, replica_groups={{0,4,8,12},{1,5,9,13}}, dimensions={0}
  %all-gather-done.1 = f32[128,128]{1,0:T(8,128)} all-gather-done(%all-gather-start.1)
  %fusion.1 = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%all-gather-done.1), kind=kLoop, calls=%f1, metadata={op_name="aten__gelu" source_file="task.py" source_line=7}
  %copy-start.1 = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%fusion.1)
  %copy-done.1 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %fusion.2 = f32[8,128]{1,0:T(8,128)} fusion(%copy-done.1, %fusion.1), kind=kLoop, calls=%f2, metadata={op_name="aten__gelu_backward" source_file="task.py" source_line=9}
  %fusion.3 = f32[8,128]{1,0:T(8,128)} fusion(%a, %fusion.2), kind=kLoop, calls=%f3
  ROOT %tuple.1 = (f32[8,128]{1,0:T(8,128)}) tuple(%fusion.3)
}
"""


def test_a_program_says_what_it_exchanges_and_is_given() -> None:
    found = parsed(PROGRAM, ["weights", "batch"])
    exchanges = {each["name"]: each for each in found["exchanges"]}
    assert exchanges["all-gather"] == {"name": "all-gather", "group": [0, 4, 8, 12], "bytes": 128 * 128 * 4, "count": 1}
    assert exchanges["reduce-scatter"]["bytes"] == 16 * 128 * 4  # an all-reduce that keeps a part is one
    assert found["by_argument"] == {"weights": 8 * 128 * 4, "batch": 128 * 4}


@pytest.mark.parametrize(
    ("type", "dims", "layout", "wanted"),
    [
        ("f32", (5, 100), "1,0:T(8,128)", 8 * 128 * 4),
        ("bf16", (5, 100), "1,0:T(8,128)(2,1)", 8 * 128 * 2),
        ("f32", (100, 5), "0,1:T(8,128)", 8 * 128 * 4),  # columns first
        ("f32", (7,), "0:T(1024)", 1024 * 4),
        ("pred", (3, 5), "", 15),
        ("f32", (), "", 4),
    ],
)
def test_tiles_round_up(type: str, dims: tuple[int, ...], layout: str, wanted: int) -> None:
    assert padded_bytes(type, dims, layout) == wanted


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,1},{2,3}}", [0, 1]),
        ("replica_groups=[2,8]<=[16]", list(range(8))),
        ("replica_groups=[4,4]<=[4,4]T(1,0)", [0, 4, 8, 12]),
        ("source_target_pairs={{0,1},{1,2},{2,0},{4,5},{5,4}}", [0, 1, 2]),
        ("replica_groups={}", []),
    ],
)
def test_groups_are_read_in_all_their_forms(text: str, group: list[int]) -> None:
    assert group_of(f"all-reduce(%p), {text}, to_apply=%add") == group


def test_a_group_of_devices_is_called_by_the_axis_along_which_it_lies() -> None:
    mesh = {"replica": 2, "data": 4, "model": 2}
    assert engine.axis_of([0, 1], mesh) == "model"
    assert engine.axis_of([0, 2, 4, 6], mesh) == "data"
    assert engine.axis_of([0, 8], mesh) == "replica"
    assert engine.axis_of(list(range(8)), mesh) == "data x model"
    assert engine.axis_of(list(range(16)), mesh) == "replica x data x model"
    assert engine.axis_of([0, 3], mesh) == "2 devices"


# What libtpu 0.0.21 said of a GPT that is too large for a v5e, without its list of allocations.
REFUSED = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 102.14G of 15.75G hbm. Exceeded hbm capacity by 86.39G.

Total hbm usage >= 102.39G:
    reserved        258.01M
    program         102.14G
    arguments            0B

Output size 0B; shares 0B with arguments.

Program hbm requirement 102.14G:
    global           784.5K
    scoped           177.0K
    HLO temp        102.14G (100.0% utilization: Unpadded (101.94G) Padded (101.94G), 0.2% fragmentation (204.48M))
"""


def test_what_does_not_fit_is_read_of_the_compilers_refusal() -> None:
    assert refused(REFUSED) == (round(102.14 * 2**30), 0)
    assert refused("INVALID_ARGUMENT: something else") is None


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("v4-32", {"topology_name": "v4:2x2x4", "chips_per_host_bounds": (2, 2, 1), "chip_config_name": "megacore"}),
        ("v5e-16", {"topology_name": "v5e:4x4", "chips_per_host_bounds": (2, 2, 1)}),
        ("v5litepod-8", {"topology_name": "v5e:2x4", "chips_per_host_bounds": (2, 4, 1)}),
        ("v6e-1", {"topology_name": "v6e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        ("v2-8", {"topology_name": "v2:2x2", "chips_per_host_bounds": (2, 2, 1)}),
    ],
)
def test_slices_are_asked_for_as_libtpu_knows_them(name: str, asked: dict[str, object]) -> None:
    assert topology(slice_of(name)) == asked


def test_a_slice_is_a_target_with_the_devices_that_a_mesh_is_made_of() -> None:
    found = target("v4-32")
    assert (found.count, found.hosts, found.per_host, found.title) == (16, 4, 4, "v4-32")
    assert found.device is known()["v4"]
    assert target("V5E-16").device is known()["v5e"]
    assert (target("v3-8").count, target("v3-8").device.memory) == (8, 16.0)
    with pytest.raises(ConfigError, match="did you mean v4-32"):
        target("v4-33")
    with pytest.raises(ConfigError, match="come in slices"):
        target("v4x8")


def test_a_crash_over_a_value_names_the_line_that_asked_for_it(tmp_path: Path) -> None:
    task = tmp_path / "reads.py"
    task.write_text("def loss():\n    return loss.item()\n")
    log = f"""W1116 something before
Fatal Python error: Segmentation fault

Current thread 0x00007f5a7e99d740 (most recent call first):
  File "/opt/lib/python3.12/site-packages/torch/_tensor.py", line 9 in item
  File "{task}", line 2 in loss
  File "{engine.__file__}", line 16 in step

Extension modules: numpy (total: 1)
"""
    told = of_crash(log)
    assert told is not None and f"{task}:2 (return loss.item())" in told
    assert of_crash("Check failed: something inside") is None


def test_where_libtpu_does_not_exist_it_is_said_what_to_run_where() -> None:
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        pytest.skip("it does exist here")
    with pytest.raises(ConfigError, match=r"Linux on x86_64 only, and this is .*the same lockstep plan"):
        engine.require_tools()


def test_versions_that_do_not_belong_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(engine, "WANTED", {"numpy": "0.1"})
    with pytest.raises(
        ConfigError, match=rf"numpy is {np.__version__}, and a step for TPUs is compiled with numpy 0\.1"
    ):
        engine.require_tools()
    monkeypatch.setattr(engine, "WANTED", {"no-such-package": "1"})
    with pytest.raises(
        ConfigError, match=r"no-such-package is not installed.*pip install 'lockstep-train\[tpu-plan\]'"
    ):
        engine.require_tools()
