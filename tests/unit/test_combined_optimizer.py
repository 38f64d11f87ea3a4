"""Several optimizers that are stepped as one, and which parameters each of them gets."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon

import lockstep
from lockstep import CombinedOptimizer
from lockstep.config.schema import RunConfig
from lockstep.tasks.changes import OptimizerArguments
from lockstep.tasks.parameters import OTHERS, matrices_and_others


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for each in self.layers:
            hidden = hidden + each(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def combined(model: Text) -> CombinedOptimizer:
    matrices, others = matrices_and_others({"model": model}, None)["model"]
    return CombinedOptimizer(Muon(matrices, lr=0.1), AdamW([{"params": others, "weight_decay": 0.0}], lr=0.01))


def step(model: nn.Module, *optimizers: Any) -> None:
    model(torch.arange(10)).square().mean().backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def test_it_steps_saves_and_loads_as_its_optimizers_do() -> None:
    torch.manual_seed(0)
    model = Text()
    apart = copy.deepcopy(model)
    one, several = combined(model), combined(apart).parts
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (one, *several)]
    for _ in range(3):
        step(model, one)
        step(apart, *several)
        for schedule in schedules:
            schedule.step()
    again = copy.deepcopy(model)
    other = combined(again)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for net, optimizers in ((model, (one,)), (apart, several), (again, (other,))):
        step(net, *optimizers)
    for found in (apart, again):
        assert all(torch.equal(mine, its) for mine, its in zip(model.parameters(), found.parameters(), strict=True))
    assert [group["lr"] for group in other.param_groups] == [each.param_groups[0]["lr"] for each in several]
    assert other.parts[0].state is other.state and other.parts[1].param_groups[0] is other.param_groups[1]


def test_a_parameter_belongs_to_one_of_them() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        CombinedOptimizer(SGD([weight]), AdamW([weight]))
    with pytest.raises(NotImplementedError, match="before they are combined"):
        CombinedOptimizer(SGD([weight])).add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("model", "match", "matrices"),
    [
        (Text(), None, ["layers.0.1.weight", "layers.1.1.weight"]),
        (Text(), ["layers.0.*"], ["embed.weight", "layers.1.1.weight", "head.weight"]),
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), None, ["0.weight"]),
    ],
)
def test_matrices_of_hidden_layers(
    model: nn.Module, match: list[str] | None, matrices: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    names = {id(each): name for name, each in model.named_parameters()}
    found, others = matrices_and_others({"model": model}, match)["model"]
    assert [names[id(each)] for each in found] == matrices
    assert {names[id(each)] for each in others} == set(names.values()) - set(matrices)
    assert f"optimizer: {len(matrices)} matrices; others: " in caplog.text


def optimizer_config(rate: float, **others: Any) -> Any:
    section = {"type": "Muon", "lr": rate, "others": {"type": "AdamW", **others}}
    return RunConfig.model_validate({"task": "a:B", "optimizer": section}).optimizer


def test_each_of_them_is_given_its_own_changed_arguments() -> None:
    model = Text()
    matrices, others = matrices_and_others({"model": model}, None)["model"]
    optimizer = CombinedOptimizer(Muon(matrices, lr=0.1), AdamW([{"params": others, "match": OTHERS}], lr=0.01))
    arguments = OptimizerArguments(optimizer_config(0.2, lr=0.03, weight_decay=0.5))
    arguments.load_state_dict(OptimizerArguments(optimizer_config(0.1, lr=0.01)).state_dict())
    told = arguments.apply(optimizer, None)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.2, 0.1), (0.03, 0.5)]
    assert [each.split(" from here")[0] for each in told] == [
        "optimizer.lr: 0.1 -> 0.2", "optimizer.others.lr: 0.01 -> 0.03", "optimizer.others.weight_decay: 0.01 -> 0.5",
    ]  # fmt: skip


def test_by_yaml_both_are_scheduled_and_logged(tmp_path: Path) -> None:
    done = lockstep.train(
        out=tmp_path, task={"type": "tasks:Tiny"}, processes=1, runtime="cpu", train={"epochs": 1, "batch_size": 20},
        optimizer={"type": "Muon", "lr": 0.02, "others": {"lr": 0.005}}, scheduler={"type": "linear"},
        log={"every": "1 step"},
    )  # fmt: skip
    rows = [json.loads(line) for line in (Path(done["folder"]) / "metrics.jsonl").read_text().splitlines()]
    rates = [(row["lr"], row["lr/optimizer.others"]) for row in rows if "lr" in row]
    assert len(rates) == 5 and rates[0][0] == 4 * rates[0][1] and rates[-1][0] < rates[0][0]
