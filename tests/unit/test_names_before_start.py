"""What a config names and its task does not have: told before any rank is started, by a child of the fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep.config.load import from_plain
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.launchers import checks
from lockstep.launchers.local import fork_server
from tasks import Tiny


class Computed(Tiny):
    """Names of metrics that are not written in the code as they are."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"".join(["a", "b"]): batch[0][:, 0]}


class Failing(Tiny):
    def __init__(self) -> None:
        raise RuntimeError("this is for ranks to show, with its traceback")


def config(task: str = "tasks:Tiny", **sections: Any) -> RunConfig:
    base = {"task": task, "processes": 2, "data": {"split": {"train": 0.8, "val": 0.2}}}
    return from_plain({**base, **sections}, "config")


def after(do: str, **values: Any) -> dict[str, Any]:
    return {"after": {"do": do, "run": "nowhere", "step": 1, **values}}


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    fork_server.warm_up(1)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"optimizer": {"type": "torch.optim.Adamm"}}, "torch.optim has no 'Adamm', did you mean Adam"),
        ({"optimizer": {"type": "torch.optim.SGD", "lrr": 1}}, "optimizer.lrr: SGD has no such argument"),
        ({"train": {"freeze": ["0.wieght"]}}, "train.freeze: 0.wieght: no parameter has a name like that"),
        (
            {"optimizer": {"type": "AdamW", "groups": [{"match": ["nope"], "lr": 1e-3}]}},
            r"optimizer.groups\[0\].match: nope",
        ),
        ({"optimizer": {"type": "Muon"}}, "optimizer: Muon is for matrices: set optimizer.others"),
        ({"optimizer": {"type": "Muon", "others": {"type": "AdamW", "lrr": 1}}}, "optimizer.others.lrr: AdamW has no"),
        ({"optimizer": {"type": "Muon", "others": {"match": "9.*"}}}, r"optimizer.others.match: 9.\*: no parameter"),
        ({"optimizer": {"type": "Muon", "others": {"match": "*"}}}, "none for the first: name those that it gets"),
        (
            {"optimizer": {"type": "Muon", "others": {}, "groups": [{"match": "*.bias", "lr": 1}]}},
            "optimizer.groups: optimizer.others divides the parameters already",
        ),
        ({"checkpoint": {"keep": {"metric": "val/acuracy"}}}, "no metric 'val/acuracy': did you mean val/accuracy"),
        ({"early_stop": {"criteria": [{"metric": "train/loss"}]}}, "did you mean train/epoch_loss"),
        (
            {"scheduler": {"type": "torch.optim.lr_scheduler.ReduceLROnPlateau", "monitor": "val/los"}},
            "scheduler.monitor: there is no metric 'val/los'",
        ),
        ({"task": "after_tasks:Useful", **after("evaluate", data="tset")}, "--data tset: the task has no such data"),
        ({"data": {}, **after("evaluate")}, "--data: the task has neither test nor validation data"),
        (after("predict", out="x.jsonl", data="val"), r"Tiny does not define predict\(self, model, batch\)"),
        (
            {"task": f"{__name__}:Computed", "early_stop": {"criteria": [{"metric": "val/ac"}]}},
            "This run has train/epoch_loss, val/ab, val/loss",
        ),
    ],
)
def test_a_name_that_is_not_there(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fork_server.check(config(**sections))


def test_before_ranks_start_on_other_machines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own; what cannot be imported here may be there."""
    with pytest.raises(ConfigError, match=r"torch\.optim has no 'Adamm', did you mean Adam"):
        checks.check_names(config(optimizer={"type": "torch.optim.Adamm"}))
    with pytest.raises(ConfigError, match=r"there is no module 'torch\.optimm'"):
        checks.check_names(config(optimizer={"type": "torch.optimm.Adam"}))
    assert capfd.readouterr().err == ""
    (tmp_path / "there.py").write_text("import only_on_the_hosts\nclass Mine: pass\n")
    checks.check_names(config(task=f"{tmp_path}/there.py:Mine", optimizer={"type": "only_on_the_hosts.Adam", "lr": 1}))
    told = capfd.readouterr().err
    assert "lockstep: names in the config are not all checked before the start: task: " in told
    assert "there.py:Mine cannot be imported: ModuleNotFoundError" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"freeze": ["0.*"]}, "checkpoint": {"keep": {"metric": "val/accuracy"}}},
        {"early_stop": {"criteria": [{"metric": "train/epoch_loss"}]}},
        {"task": f"{__name__}:Computed", "early_stop": {"criteria": [{"metric": "val/ab"}]}},
        {"task": f"{__name__}:Failing"},
        {"task": "after_tasks:Useful", **after("predict", out="x.jsonl", data="spare")},
    ],
)
def test_names_that_are_there_and_what_ranks_have_to_tell(sections: dict[str, Any]) -> None:
    fork_server.check(config(**sections))
