"""Which ways a search traces: by a table of what each would need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import TASK_FILE
from lockstep.config.load import load, with_values
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.planner.devices import Device, Target
from lockstep.planner.plan import GIB, Estimate, Plan, Step
from lockstep.planner.search import Way, search, write
from planned_steps import DEVICE, step


def config(batch: int = 256, **strategy: Any) -> RunConfig:
    return RunConfig.model_validate({
        "task": f"{TASK_FILE}:Tiny", "train": {"steps": 1, "batch_size": batch},
        "strategy": strategy or {"type": "auto"},
    })  # fmt: skip


class Table:
    """A model of so many GiB with its state, and activations of so many for the whole batch on one device."""

    def __init__(self, target: Target, model: float, activations: float, axes: Sequence[str] = ()) -> None:
        self.target, self.model, self.activations, self.axes = target, model, activations, list(axes)
        self.asked: list[str] = []

    def __call__(self, overrides: Sequence[str]) -> Plan:
        given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in overrides)}
        self.asked.append(" ".join(overrides))
        if given["train.activation_checkpointing"] and self.model == 0:
            raise ConfigError("it has no blocks")
        mesh = given["strategy"].get("mesh", {"data": self.target.count})
        count = self.target.count
        copies = {"fsdp": 1, "hsdp": mesh.get("replica", 1), "tensor": mesh["data"]}.get(
            given["strategy"]["type"], count
        )
        weights = self.model * copies / count
        held = (
            self.activations / count / given["train.accumulate"] / (4 if given["train.activation_checkpointing"] else 1)
        )
        made: Step = step(
            world_size=count, axes=self.axes, peak=int((weights + held) * GIB),
            by_kind={"weights": int(weights * GIB), "activations": int(held * GIB)},
        )  # fmt: skip
        time = 1.0 + given["train.accumulate"] / 10 + bool(given["train.activation_checkpointing"]) / 3 + 1 / copies
        return Plan(self.target, made, Estimate(time, 0, 0, 0), None, False)


def searched(table: Table, settings: RunConfig | None = None) -> list[Way]:
    return search(settings or config(), table.target, table)


def titles(found: Sequence[Way], fits: bool | None = None) -> list[str]:
    return [each.title for each in found if fits is None or each.fits is fits]


ONE_HOST, TWO_HOSTS = Target("card", DEVICE, 8), Target("card", DEVICE, 16)


def test_what_fits_as_it_is_is_not_computed_twice_nor_in_parts() -> None:
    found = searched(Table(ONE_HOST, 1, 1))
    assert titles(found) == ["ddp", "hsdp 4 x 2", "hsdp 2 x 4", "fsdp"] and all(each.fits for each in found)


def test_a_batch_goes_into_as_many_parts_as_it_takes() -> None:
    found = searched(Table(Target("card", DEVICE, 1), 1, 400))
    assert titles(found, True) == ["whole, in 32 parts", "whole, activation checkpointing, in 8 parts"][::-1]
    assert "whole, in 4 parts" not in titles(found), "a part that cannot fit is not traced"


def test_parts_divide_a_devices_share() -> None:
    found = searched(Table(ONE_HOST, 0, 8 * 16 * 5), config(batch=8 * 9))
    assert "ddp, in 9 parts" in titles(found, True) and not [each for each in titles(found) if "in 8" in each]


def test_a_model_that_is_too_large_is_not_traced_in_parts() -> None:
    table = Table(ONE_HOST, 8 * 10, 1)
    found = searched(table)
    assert titles(found, True) == ["fsdp"]
    assert len(table.asked) == 4, table.asked  # ddp, fsdp, hsdp twice: neither parts nor activation checkpointing help


def test_axes_that_a_task_has_rules_for_are_tried_within_hosts() -> None:
    found = searched(Table(TWO_HOSTS, 1, 1, ["model"]))
    sizes = {"2 x 8 model", "4 x 4 model", "8 x 2 model"}
    assert sizes | {f"fsdp {each}" for each in sizes} <= set(titles(found))
    assert not [each for each in titles(found) if "16 model" in each]
    (one,) = [each for each in found if each.title == "fsdp 4 x 4 model"]
    assert one.values["strategy"]["mesh"] == {"data": 4, "model": 4}
    assert {"hsdp 2 x 8", "hsdp 4 x 4", "hsdp 8 x 2"} <= set(titles(found))


def test_sequences_are_split_where_nothing_else_fits() -> None:
    """Of four sequences a device has one, with 80 GiB, and 20 with activation checkpointing."""
    found = searched(Table(Target("card", DEVICE, 4), 0, 320), config(4))
    (one,) = [each for each in found if each.title == "fsdp 2 x 2 context"]
    assert one.values["strategy"]["type"] == "fsdp" and one.values["strategy"]["mesh"] == {"data": 2, "context": 2}
    assert "fsdp 1 x 4 context" in titles(found)


def test_a_mesh_that_splits_sequences_is_tried_in_other_sizes() -> None:
    found = titles(searched(Table(ONE_HOST, 8, 8), config(type="fsdp", mesh={"data": 2, "context": 4})))
    assert {"fsdp 4 x 2 context", "fsdp 2 x 4 context", "fsdp 1 x 8 context"} < set(found)
    assert "2 x 4 context" not in found, "which is no strategy: tensor"


def test_rules_of_the_config_go_along_where_the_mesh_has_their_axes() -> None:
    rules = {"a.*": ["model", None], "b.*": ["expert", None]}
    own = config(type="tensor", mesh={"data": 2, "model": 2, "expert": 2}, shard=rules)
    found = searched(Table(ONE_HOST, 1, 1, ["expert", "model"]), own)
    strategies = {each.title: each.values["strategy"] for each in found}
    assert set(strategies["fsdp 4 x 2 model"]["shard"]) == {"a.*"}
    assert set(strategies["fsdp 2 x 2 expert x 2 model"]["shard"]) == {"a.*", "b.*"}
    assert "shard" not in strategies["fsdp"]


def test_options_of_ddp_stay() -> None:
    found = searched(Table(ONE_HOST, 1, 1), config(type="ddp", find_unused_parameters=True))
    assert found[0].values["strategy"] == {"type": "ddp", "find_unused_parameters": True}


def test_there_is_an_end_to_traces() -> None:
    wide = Device(**{**DEVICE.model_dump(), "per_host": 64, "memory": 2})
    table = Table(Target("card", wide, 64), 1, 64 * 100, ["a", "b"])
    found = searched(table)
    assert len(table.asked) == 40
    assert [each for each in found if each.why_not == "not traced: 40 are traced at most"]


def test_recompute_is_for_fewer_parts_than_without() -> None:
    found = searched(Table(Target("card", DEVICE, 1), 1, 28))
    assert titles(found) == ["whole, in 2 parts", "whole, activation checkpointing", "whole"] and found[1].fits
    short = searched(Table(Target("card", DEVICE, 1), 1, 100))
    assert "whole, in 7 parts" not in titles(short) and "whole, activation checkpointing, in 2 parts" in titles(
        short, True
    )


def test_what_is_refused_is_told_last() -> None:
    found = searched(Table(Target("card", DEVICE, 1), 0, 400))
    assert found[-1].why_not == "it has no blocks" and found[0].fits


def test_the_best_is_written_with_its_processes_on_all_hosts(tmp_path: Path) -> None:
    table = Table(TWO_HOSTS, 16 * 10, 1)
    own = with_values(config(), {"processes": 1})
    write(own, searched(table, own)[0], TWO_HOSTS, tmp_path / "best.yaml")
    written = load(tmp_path / "best.yaml")
    assert written.processes == 16 and written.strategy.type == "fsdp" and written.strategy.mesh == {"data": 16}
