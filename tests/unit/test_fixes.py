"""What would make a step fit: what is tried, what is found enough, and what is called cheap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import Failure, ended_by_the_kernel, find_cause
from lockstep.launchers import checks
from lockstep.launchers.local import limits
from lockstep.planner.devices import Device, Target, known
from lockstep.planner.explain import like
from lockstep.planner.figures import Step, Work, estimate
from lockstep.planner.fixes import Found, find, lines
from lockstep.planner.plan import GIB, Plan
from lockstep.planner.traces import NO_TIME


def step(fixed: float, growing: float, batch: int, flops: int = 10**12) -> Step:
    """GiB that stay, and GiB that go with what is computed at once."""
    kinds = {"weights": int(fixed * GIB), "activations": int(growing * GIB)}
    return Step(
        world_size=1, batch=batch, examples=10**6, parameters=1, weights_bytes=1, optimizer_bytes=1,
        peak=sum(kinds.values()), phase="backward", by_kind=kinds, largest=[], flops=flops, bytes=1,
        work=[Work("float32", flops, 1, 1)], collectives=[], uneven=[], timeline=[], phases=[], seconds=1.0,
    )  # fmt: skip


class Model:
    """A step of 4 GiB and a quarter of a GiB for every example; what is asked of it is noted."""

    def __init__(self, **without: str) -> None:
        self.asked: list[str] = []
        self._without = without

    def __call__(self, asked: Sequence[Sequence[str]]) -> list[Step | str]:
        return [self._step(dict(each.split("=", 1) for each in one)) for one in asked]

    def _step(self, values: dict[str, str]) -> Step | str:
        self.asked.append(" ".join(f"{name}={value}" for name, value in values.items()))
        for name, why in self._without.items():
            if any(name in each for each in values):
                return why
        batch, parts = int(values.get("train.batch_size", 64)), int(values.get("train.accumulate", 1))
        kept = 0.2 if "train.activation_checkpointing" in values else 1
        fixed = 2.5 if "strategy" in values else 4
        work = batch * 10**12 * (1.3 if "train.activation_checkpointing" in values else 1) * (1.02 if parts > 1 else 1)
        return step(fixed, 0.25 * batch / parts * kept, batch, int(work))


def config(**values: Any) -> RunConfig:
    given = {"task": {"type": "a:B"}, "runtime": "cpu", "train": {"batch_size": 64}, **values}
    return RunConfig.model_validate(given)


def found(memory: float, model: Model, count: int = 1, **values: Any) -> tuple[Found, Plan]:
    device = Device(memory=memory, peak={"float32": 10}, bandwidth=100, link=10, network=1, per_host=8)
    target, now = Target("box", device, count), model([[]])[0]
    assert isinstance(now, Step)
    plan = Plan(target, now, estimate(now, target, "float32"), None, False)
    return find(plan, config(**values), model), plan


def told(found: Found) -> list[dict[str, Any]]:
    return [dict(each.values) for each in found.fixes]


def test_the_cheapest_comes_first_and_what_computes_the_same_before_another_batch() -> None:
    result, plan = found(16, Model())
    assert told(result) == [
        {"train.batch_size": 41},  # as long for every example as now, and parts take 2 % longer
        {"train.accumulate": 2},
        {"train.activation_checkpointing": "blocks"},
    ]
    text = list(lines(result, plan))
    assert text[3] == "  --set train.accumulate=2"
    assert text[4] == "      needs 12.0 GiB, 8.0 GiB less; takes 2% more time; the same batch in more parts"


def test_what_is_called_enough_leaves_what_plans_are_off_by() -> None:
    """12 GiB would go into 12.8 less 0.8, and do not."""
    result, _ = found(12.8, Model())
    assert {"train.accumulate": 2} not in told(result) and {"train.accumulate": 4} in told(result)


def test_what_the_config_has_already_is_not_tried() -> None:
    model = Model()
    found(16, model, train={"batch_size": 64, "activation_checkpointing": "blocks", "accumulate": 2})
    assert not any("activation_checkpointing" in each for each in model.asked)
    assert "train.accumulate=4" in model.asked


def test_where_nothing_alone_is_enough_some_are_tried_together() -> None:
    result, plan = found(4, Model(), count=2)
    (one,) = result.fixes
    assert set(one.values) == {"train.activation_checkpointing", "strategy", "train.accumulate"}
    assert one.plan.step.peak < plan.capacity


@pytest.mark.parametrize(
    ("without", "untried", "told"),
    [
        ({"train": "it has no blocks"}, [], "nothing that was tried fits: more devices, or a smaller model"),
        (
            {"train": NO_TIME},
            ["train.activation_checkpointing"],
            "there was no time to try train.activation_checkpointing",
        ),
    ],
)
def test_what_cannot_be_traced_is_left_out(without: dict[str, str], untried: list[str], told: str) -> None:
    result, plan = found(16, Model(**without))
    assert not result.fixes and set(untried) <= set(result.untried)
    assert any(told in line for line in lines(result, plan))


def test_of_a_step_that_fits_and_failed_whatever_needs_less_is_a_remedy() -> None:
    result, plan = found(100, Model())
    assert plan.fits and {"train.accumulate": 2} in told(result)


@pytest.mark.parametrize(
    ("name", "memory", "wanted"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 79.1, "a100-80g"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("Tesla T4", 14.6, "t4"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16g"),
    ],
)
def test_gpus_are_known_by_what_torch_calls_them(name: str, memory: float, wanted: str) -> None:
    assert like(name, memory, known()) == (wanted, known()[wanted])


def test_of_a_gpu_that_nobody_knows_the_nearest_has_the_figures() -> None:
    assert like("NVIDIA Foo 9000", 23.0, known()) == ("nvidia-foo-9000", known()["a10"])


def test_what_torch_lets_a_process_have_is_read_from_its_words() -> None:
    cause = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 139.8 GiB. 1.50 GiB allowed; Of the allocated"
    assert checks.allowed_bytes(cause) == 1.5 * GIB
    assert checks.allowed_bytes("CUDA out of memory. Tried to allocate 2.00 GiB") is None


def test_kills_by_the_kernel_are_told_from_others(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 3\n")
    assert limits.kills_for_memory(counters) == 3 and limits.kills_for_memory(tmp_path / "none") == 0
    killed = ended_by_the_kernel(find_cause([], {0: -9}, "box"))
    assert (killed.memory, killed.cause) == ("host", "killed by SIGKILL: the kernel has ended it for lack of memory")
    left: Failure = find_cause([], {0: 1}, "box")
    assert ended_by_the_kernel(left) is left
