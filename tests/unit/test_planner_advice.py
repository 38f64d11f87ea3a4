"""What a plan advises, by its figures: each piece with what it brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.planner.advice import Advice, advice
from lockstep.planner.figures import Step, UnevenSize, Weight, Work
from lockstep.planner.plan import GIB, Plan
from planned_steps import compiled, plan, step


def config(**values: Any) -> RunConfig:
    train = {"steps": 1, "batch_size": 64, "precision": "bf16", **values.pop("train", {})}
    return RunConfig.model_validate({"task": "tasks.py:Tiny", "train": train, **values})


def refused(overrides: Sequence[str]) -> Step:
    raise ConfigError("not here")


def told(made: Plan, settings: RunConfig | None = None, trace: Any = refused) -> list[Advice]:
    return list(advice(made, settings or config(), trace))


def one(found: Sequence[Advice], beginning: str) -> Advice:
    (only,) = [each for each in found if each.text.startswith(beginning)]
    return only


def test_copies_of_ddp_are_told_by_name() -> None:
    found = one(told(plan()), "every device has all weights")
    assert "tokens.weight [65536, 4096], 1 GiB; blocks.*.out.weight [4096, 4096], 1 GiB, 16 of them" in found.text
    assert found.gib == pytest.approx(8 * 15 / 16)  # 2 of weights, 2 of gradients, 4 of Adam's


TENSOR = {"type": "tensor", "mesh": {"data": 4, "model": 4}, "shard": {"blocks.*": ["model", None]}}


def test_what_no_rule_splits_is_told_by_name() -> None:
    """Of two matrices of a GiB, a rule splits one over four places; the other is whole."""
    weights = [Weight("tokens.weight", 1, [65536, 4096], [65536, 4096], GIB, GIB, True),
               Weight("blocks.*.out.weight", 16, [4096, 4096], [1024, 4096], GIB // 16, GIB // 64, True)]  # fmt: skip
    found = told(plan(weights=weights, mesh={"data": 4, "model": 4}), config(strategy=TENSOR))
    whole = one(found, "what no rule splits")
    assert "tokens.weight" in whole.text and "blocks" not in whole.text and whole.gib == pytest.approx(4 * 15 / 16)
    assert one(found, "what the rules split is there 4 times").gib == pytest.approx(1 * 3 / 4)
    for type in ("fsdp",):
        split = told(plan(weights=weights, mesh={"data": 4, "model": 4}), config(strategy={**TENSOR, "type": type}))
        assert not [each for each in split if "rule" in each.text]


def test_a_first_dimension_that_is_shorter_than_the_axis_is_told() -> None:
    weights = [Weight("head.weight", 1, [2, 2**27], [1, 2**27], GIB, GIB // 2, True)]
    made = plan(weights=weights, weights_bytes=GIB, optimizer_bytes=2 * GIB)
    found = one(told(made, config(strategy="fsdp")), "head.weight [2, 134217728]")
    assert "2 places for 16 devices" in found.text and found.gib == pytest.approx(4 * (1 / 2 - 1 / 16))


def test_offload_is_for_those_who_are_short_of_memory() -> None:
    def trace(overrides: Sequence[str]) -> Step:
        if overrides[0].startswith("train.activation_checkpointing"):
            raise ConfigError("it has no blocks")
        assert "offload: true" in overrides[0]
        return step(peak=6 * GIB, host_bytes=8 * GIB)

    found = one(told(plan(), trace=trace), "strategy: {type: fsdp, offload: true}")
    assert "needs 6 GiB instead of 12" in found.text and "8 GiB for each device" in found.text and found.gib == 6
    roomy = plan(peak=9 * GIB)
    assert not [each for each in told(roomy, trace=trace) if "offload" in each.text]


def test_recompute_is_told_with_what_it_costs() -> None:
    found = told(plan(), trace=lambda overrides: step(peak=8 * GIB, flops=10 * 10**12))
    assert (
        one(found, "train.activation_checkpointing: blocks needs 8 GiB instead of 12, for 25% more arithmetic").gib == 4
    )


def test_products_that_wait_for_memory_want_a_larger_batch() -> None:
    """At 100 FLOP for a byte, where the device's roof is flat from 200 on: twice as many take no longer."""
    slow = [Work("bfloat16", 10**11, 10**9, 60)]
    made = replace(plan(work=slow, mesh={"data": 16}, collectives=[]), largest_batch=128)

    def trace(overrides: Sequence[str]) -> Step:
        if overrides != ["train.batch_size=128"]:
            raise ConfigError("not here")
        return step(batch=128, work=[Work("bfloat16", 2 * 10**11, 10**9, 60)], collectives=[])

    found = one(told(made, trace=trace), "products wait for memory in 100% of their time, with 4 examples at once")
    assert "a batch of 128 fits, and takes 469 us for an example instead of 938" in found.text
    assert not [each for each in told(replace(made, largest_batch=64), trace=trace) if "products" in each.text]


def test_a_batch_has_to_reach_all_shares_of_the_mesh() -> None:
    small = plan(batch=8)
    assert "8 is less than the 16 shares" in one(told(small), "train.batch_size").text
    tensor = plan(batch=8, mesh={"data": 4, "model": 4})
    assert not [each for each in told(tensor) if each.text.startswith("train.batch_size")]


def test_sizes_are_told_with_what_rounding_costs_and_where_they_come_from() -> None:
    odd = [UnevenSize(50257, "gpt.py:86 logits", 4 * 10**12), UnevenSize(1001, "gpt.py:9 x", 10**12)]
    weights = [Weight("expand.weight", 1, [2002, 64], [1001, 64], 512512, 256256, True)]
    found = told(plan(uneven=odd, mesh={"data": 8, "model": 2}, weights=weights))
    first = one(found, "50257 in gpt.py:86").text
    assert "in 50% of the arithmetic: 50264 is 0.014 % more, 50304 (their tiles) 0.094 %" in first
    assert "(2002 of expand.weight over the 2 of model)" in one(found, "1001 in").text
    rare = [UnevenSize(77, "gpt.py:1", 10**9)]
    assert not [each for each in told(plan(uneven=rare)) if "multiple of 8" in each.text]


def test_a_plan_that_a_compiler_made_is_advised_too() -> None:
    assert one(told(plan(compiled())), "every device has all weights").gib == pytest.approx(8 * 15 / 16)


def test_where_a_trace_takes_long_there_is_none_for_advice() -> None:
    def trace(overrides: Sequence[str]) -> Step:
        raise AssertionError(overrides)

    assert told(plan(seconds=61.0), trace=trace)
