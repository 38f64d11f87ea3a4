"""Optimizers, schedules, frozen parts, averages and precision, by the names that a config has for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from lockstep.config.schema import RunConfig
from lockstep.config.training import ParameterGroup, Schedule
from lockstep.engine.models import MATCH
from lockstep.engine.stepper import FIRST, LossScale
from lockstep.errors import ConfigError
from lockstep.strategy.compiled import how_to_compile
from lockstep.tasks.changes import OptimizerArguments
from lockstep.tasks.parameters import freeze, parameter_groups
from lockstep.tasks.schedules import NamedSchedule, factor, run_length

if TYPE_CHECKING:
    from lockstep.engine.run import Run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def groups(*given: dict[str, Any]) -> list[ParameterGroup]:
    return [ParameterGroup.model_validate(each) for each in given]


# Parameter groups


def test_every_parameter_is_in_one_group_that_of_the_first_match(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with caplog.at_level(logging.INFO):
        (found,) = parameter_groups(
            {"model": model},
            groups({"match": ["*.bias", "encoder.1.*"], "weight_decay": 0}, {"match": "head*", "lr": 1}),
        ).values()
    names = {id(each): name for name, each in model.named_parameters()}
    listed = [([names[id(each)] for each in group["params"]], group.get(MATCH)) for group in found]
    assert listed == [
        (["encoder.0.weight"], None),
        (["encoder.0.bias", "encoder.1.weight", "encoder.1.bias", "head.bias"], "*.bias, encoder.1.*"),
        (["head.weight"], "head*"),
    ]
    assert [group.get("weight_decay") for group in found] == [None, 0, None]
    assert "the rest: 1 parameters, 12 numbers" in caplog.text and "weight_decay 0" in caplog.text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"match": "haed.*"}, r"groups\[0\]\.match: haed\.\*: no parameter has a name like that; the nearest are head"),
        ({"match": ["*.bias", "norm*"]}, r"norm\*: no parameter has a name"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_names_the_nearest(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parameter_groups({"model": Net()}, groups(given))


def test_a_group_that_others_left_nothing_for_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"groups\[1\]\.match: head\.bias: what it matches \(head\.bias\) is frozen, or"
    ):
        parameter_groups({"model": Net()}, groups({"match": "*.bias"}, {"match": "head.bias"}))


def test_with_several_models_names_begin_with_theirs() -> None:
    models = {"generator": Net(), "critic": Net()}
    found = parameter_groups(models, groups({"match": "critic.head.*", "lr": 1.0}))
    assert [len(group["params"]) for group in found["generator"]] == [6]
    assert [len(group["params"]) for group in found["critic"]] == [4, 2]


def optimizer_config(**values: Any) -> Any:
    return RunConfig.model_validate({"task": "a:B", "optimizer": {"type": "AdamW", **values}}).optimizer


def test_arguments_of_a_group_that_changed_are_brought_to_the_restored_optimizer() -> None:
    """Each group goes by its own arguments: one that has its own rate keeps it where the optimizer's changes."""
    before = optimizer_config(lr=0.1, groups=[{"match": "*.bias", "weight_decay": 0.0}, {"match": "head*", "lr": 1.0}])
    after = optimizer_config(lr=0.2, groups=[{"match": "*.bias", "weight_decay": 0.5}, {"match": "head*", "lr": 4.0}])
    parameters = parameter_groups({"model": Net()}, before.groups)["model"]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    schedule = NamedSchedule(optimizer, Schedule(type="constant", warmup=4), None)
    arguments = OptimizerArguments(after)
    arguments.load_state_dict(OptimizerArguments(before).state_dict())
    told = arguments.apply(optimizer, schedule)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.05, 1.0])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.5, 0.01]
    assert schedule.base_lrs == pytest.approx([0.2, 0.2, 4.0])
    assert [each.split(" from here")[0] for each in told] == [
        "optimizer.lr: 0.1 -> 0.2",
        "optimizer.groups (*.bias).weight_decay: 0.0 -> 0.5",
        "optimizer.groups (head*).lr: 1.0 -> 4.0",
    ]


# Frozen parts


def test_what_is_frozen_computes_the_same_at_the_end_as_at_the_start() -> None:
    model = Net()
    freeze({"model": model}, ["encoder.*"])
    assert [name for name, each in model.named_parameters() if each.requires_grad] == ["head.weight", "head.bias"]
    model.train()
    inputs = torch.randn(5, 3)
    before = model(inputs)
    model(torch.randn(5, 3) + 100)
    assert torch.equal(model(inputs), before), "the statistics of a frozen layer moved"


def test_statistics_that_no_pattern_matches_go_on() -> None:
    model = Net()
    freeze({"model": model}, ["encoder.*.weight"])
    model.train()
    model(torch.randn(5, 3) + 100)
    assert model.encoder[1].running_mean.abs().sum() > 1


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (["encodr.*"], r"train\.freeze: encodr\.\*: no parameter has a name like that; the nearest are encoder"),
        (["*"], r"train\.freeze: \*: matches all parameters, so that nothing is left to train"),
    ],
)
def test_freezing_nothing_or_everything_is_refused(patterns: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        freeze({"model": Net()}, patterns)


# Schedules


def rates(schedule: Schedule, total: int | None, steps: int) -> list[float]:
    at = factor(schedule, total)
    return [at(step) for step in range(steps)]


def test_schedules_rise_fall_and_end_where_they_say() -> None:
    cosine = rates(Schedule(type="cosine", warmup=2, final=0.1), 10, 11)
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert cosine[6] == pytest.approx(0.55)
    assert cosine[10] == pytest.approx(0.1)
    assert rates(Schedule(type="linear"), 4, 6) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert rates(Schedule(type="polynomial", power=2.0), 4, 3) == [1.0, 0.5625, 0.25]
    assert rates(Schedule(type="constant", warmup=4), None, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(Schedule(type="constant", warmup="50%"), 4, 3) == [0.5, 1.0, 1.0]


def test_the_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    ours = rates(Schedule(type="cosine"), 20, 20)
    theirs = CosineAnnealingLR(optimizer, T_max=20)
    for rate in ours:
        assert theirs.get_last_lr()[0] == pytest.approx(2.0 * rate)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("schedule", "total", "told"),
    [
        (Schedule(type="cosine"), None, r"scheduler: cosine has to know how many steps the run has.*set train\.steps"),
        (Schedule(type="constant", warmup="5%"), None, r"scheduler: warmup: 5% has to know how many steps"),
        (Schedule(type="linear", warmup=10), 10, r"scheduler\.warmup: 10 is 10 steps, but the run has 10"),
    ],
)
def test_a_schedule_that_cannot_be_known_is_refused(schedule: Schedule, total: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        factor(schedule, total)


def test_how_many_steps_a_run_has() -> None:
    def total(of: int | None = 50, **train: Any) -> int | None:
        return run_length(RunConfig.model_validate({"task": "a:B", "train": {"batch_size": 16, **train}}), of).steps

    assert (total(epochs=3), total(steps=7), total(), total(of=None), total(of=None, steps=7)) == (12, 7, 4, None, 7)


def test_resumed_with_more_steps_a_schedule_is_that_of_so_many() -> None:
    def made(total: int) -> tuple[Any, NamedSchedule]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, NamedSchedule(optimizer, Schedule(type="linear"), total)

    optimizer, schedule = made(10)
    for _ in range(5):
        optimizer.step()
        schedule.step()
    again, longer = made(20)
    again.load_state_dict(optimizer.state_dict())
    longer.load_state_dict(schedule.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert again.param_groups[0]["lr"] == 0.75


# Averages


def steps(run: Run, count: int, **how: Any) -> list[torch.Tensor]:
    """Train so many steps; the weight after each."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), **how)
    run.restore()
    found = [model.weight.detach().clone()]
    data = TensorDataset(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.ones(8, 1))
    for _ in run.epochs(None):
        for inputs, targets in run.batches(data, 4):
            run.backward((run.model(inputs) - targets).square().mean())
            run.step()
            found.append(model.weight.detach().clone())
            if run.progress.step == count:
                return found
    raise AssertionError


def test_an_average_is_what_it_says(new_run: Callable[..., Run]) -> None:
    run = new_run()
    weights = steps(run, 6, ema={"decay": 0.5, "every": "2 steps", "warmup": False})
    expected = weights[0]
    for step in (2, 4, 6):
        expected = torch.lerp(expected, weights[step], 0.5)
    with run.averaged_weights():
        assert torch.equal(run.module.weight, expected)
    assert torch.equal(run.module.weight, weights[-1]), "the weights are back, bit for bit"


def test_a_warm_up_lets_the_first_values_fade(new_run: Callable[..., Run]) -> None:
    run = new_run()
    weights = steps(run, 2, ema=0.999)
    expected = weights[0]
    for update in (1, 2):
        expected = torch.lerp(expected, weights[update], 1 - (1 + update) / (10 + update))
    with run.averaged_weights():
        assert torch.equal(run.module.weight, expected)


def test_an_average_is_saved_and_restored(new_run: Callable[..., Run]) -> None:
    whole, first, second = new_run(), new_run(), new_run()
    steps(whole, 6, ema=0.9)
    steps(first, 3, ema=0.9)
    first.checkpoint()
    steps(second, 6, ema=0.9)
    (expected,), (found,) = ([each.state() for each in run._engine.models.averages] for run in (whole, second))
    assert found["updates"] == expected["updates"] == 6
    assert torch.equal(found["weights"]["weight"], expected["weights"]["weight"])


def test_an_average_that_no_checkpoint_has_starts_from_the_weights(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = new_run(), new_run()
    weights = steps(first, 3)
    first.checkpoint()
    with caplog.at_level(logging.INFO):
        steps(second, 4, ema={"decay": 0.9, "every": "100 steps"})
    assert "has no average of these weights: it starts from them" in caplog.text
    with second.averaged_weights():
        assert torch.equal(second.module.weight, weights[-1])


def test_an_average_that_is_none_is_refused(new_run: Callable[..., Run]) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=r"ema must be a decay between 0 and 1, or a mapping.* got 2"):
        new_run().setup(model, ema=2)
    run = new_run()
    run.setup(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="no model has an average"), run.averaged_weights():
        pass


# Precision


def test_half_precision_on_a_cpu_is_refused_with_the_remedy(new_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match=r"fp16 is for CUDA GPUs, but the runtime is cpu: use bf16"):
        new_run().setup(nn.Linear(2, 1), precision="fp16")
    with pytest.raises(ConfigError, match=r"precision must be one of float32, tf32, bf16, fp16, fp8, got 'half'"):
        new_run().setup(nn.Linear(2, 1), precision="half")


def test_tf32_on_a_cpu_is_float32_and_says_so(new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        new_run().setup(nn.Linear(2, 1), precision="tf32")
    assert "with runtime: cpu it is float32" in caplog.text
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_loss_scale_grows_and_shrinks_between_steps_alone() -> None:
    scale = LossScale()
    assert scale.of(1) == FIRST
    scale.noted(1, finite=False)  # the first optimizer of the step
    assert scale.of(1) == FIRST, "the second one's gradients were made with it"
    scale.noted(1, finite=True)
    assert scale.next == FIRST / 2
    for step in range(2, 2002):
        assert scale.of(step) == FIRST / 2
        scale.noted(step, finite=True)
    restored = LossScale()
    restored.load_state_dict(scale.state_dict())
    assert restored.of(2002) == scale.of(2002) == FIRST


# Gradients


def test_the_norm_of_the_gradients_is_logged_as_it_was_before_clipping(new_run: Callable[..., Run]) -> None:
    norms = []
    for clip in (None, 1e-3):
        run = new_run(log={"every": "1 step", "gradient_norm": True})
        steps(run, 1, clip_norm=clip)
        run._engine.aggregator.write_last_row(run.progress)
        norms.append(run._engine.aggregator.latest["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 0.1 and math.isfinite(norms[0])


def test_every_group_that_has_a_name_has_its_rate_logged(new_run: Callable[..., Run]) -> None:
    run = new_run()
    model = nn.Linear(2, 1)
    made = parameter_groups({"model": model}, groups({"match": "bias", "lr": 0.5}))["model"]
    run.setup(model, torch.optim.SGD(made, lr=0.1))
    run.restore()
    for _ in run.steps(1):
        run.backward(model(torch.ones(1, 2)).sum())
        run.step()
    assert run._engine.aggregator.learning_rates == {"lr": 0.1, "lr/bias": 0.5}


def test_ways_to_compile() -> None:
    assert how_to_compile(False) is None
    assert how_to_compile("blocks").blocks
    assert how_to_compile({"mode": "max-autotune", "dynamic": True}).mode == "max-autotune"
    with pytest.raises(ConfigError, match="compile must be True, False, 'blocks', or a mapping"):
        how_to_compile({"mode": "fast"})
