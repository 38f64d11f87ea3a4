"""Models that change while they are trained, shared optimizers, and ranks that use different parts of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import edge_bodies
import pytest

import lockstep
from lockstep.errors import ConfigError, WorkerFailed

launch = partial(lockstep.launch, runtime="cpu", timeouts={"collective": "30 s"})
ANY = (ConfigError, WorkerFailed)


def close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> bool:
    return found.keys() == expected.keys() and all(
        mine == pytest.approx(expected[name], abs=1e-12) for name, mine in found.items()
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_weights_that_change_are_saved_and_unfrozen_ones_are_averaged(strategy: str, tmp_path: Path) -> None:
    (alone,) = launch(partial(edge_bodies.teacher, until=8), processes=1, folder=tmp_path / "alone")
    how = {"processes": 2, "strategy": strategy, "folder": tmp_path / "run"}
    launch(partial(edge_bodies.teacher, until=5), **how)
    for resumed in launch(partial(edge_bodies.teacher, until=8), **how):
        assert close(resumed, alone)


def test_all_models_of_an_optimizer_are_averaged_and_have_gradients(tmp_path: Path) -> None:
    (found,) = launch(edge_bodies.joint, processes=1, folder=tmp_path)
    assert found["names"] == ["bias", "encoder: bias", "encoder: weight", "weight"]
    assert found["differ"] < 1e-12


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("backward", r"run\.step: the parameters have gradients that run\.backward has not computed"),
        ("checkpoint", r"run\.checkpoint: comes inside of run\.averaged_weights"),
    ],
)
def test_what_would_train_or_save_something_else_is_refused(what: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ANY, match=message):
        launch(partial(edge_bodies.wrong, what=what), processes=1, folder=tmp_path)


@pytest.mark.parametrize("deep", [False, True])
def test_ranks_that_use_different_parameters_of_a_split_model_are_refused(deep: bool, tmp_path: Path) -> None:
    with pytest.raises(ANY, match=r"not used the same parameters in a step: experts\.0\S+, \S+, experts\.1"):
        launch(partial(edge_bodies.experts, deep=deep), processes=2, strategy="fsdp", folder=tmp_path)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_hook_on_a_parameter_that_sees_a_part_of_a_gradient_is_named(tmp_path: Path) -> None:
    launch(partial(edge_bodies.hook, late=False), processes=2, strategy="ddp", folder=tmp_path)
    assert "weight has a hook (register_hook), which is called with" in (tmp_path / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_parameter_that_torch_does_not_call_is_refused(late: bool, tmp_path: Path) -> None:
    with pytest.raises(ANY, match=r"weight has a hook \(register_hook\), and strategy: fsdp splits parameters"):
        launch(partial(edge_bodies.hook, late=late), processes=2, strategy="fsdp", folder=tmp_path)


def test_a_comm_hook_does_not_go_with_parameters_that_are_unfrozen(tmp_path: Path) -> None:
    strategy = {"type": "ddp", "comm_hook": "bf16_compress"}
    with pytest.raises(ANY, match=r"strategy\.comm_hook: exchanges gradients of the parameters that were trained at"):
        launch(edge_bodies.unfrozen, processes=2, strategy=strategy, folder=tmp_path)


def test_a_parameter_of_two_split_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ANY, match=r"weight belongs to a model that was set up before, too"):
        launch(edge_bodies.tied, processes=2, strategy="fsdp", folder=tmp_path)


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (edge_bodies.second_pass, {"strategy": "ddp"}),
        (edge_bodies.towers, {"strategy": "fsdp"}),
        (partial(edge_bodies.some_leaves, tokens=13), {"train": {"exact": True}}),
        (partial(edge_bodies.some_leaves, tokens=8), {"train": {"exact": 2}}),
    ],
)
def test_two_ranks_give_the_numbers_of_one(body: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    train = {"train": settings["train"]} if "train" in settings else {}
    (alone,) = launch(body, processes=1, folder=tmp_path / "alone", **train)
    for found in launch(body, processes=2, folder=tmp_path / "two", **settings):
        assert found == alone if train else close(found, alone)
