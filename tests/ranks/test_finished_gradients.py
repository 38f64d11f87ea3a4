"""`run.gradients` and the callback `before_optimizer_step`: gradients of the whole batch, on every strategy."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import gradient_bodies
import pytest

import lockstep
from lockstep.errors import ConfigError, WorkerFailed

HSDP = {"type": "hsdp", "mesh": {"data": 2, "replica": 2}}
TENSOR = {"type": "tensor", "mesh": {"model": 2}, "shard": {"0.weight": ["model", None], "2.weight": [None, "model"]}}


def launched(main: Any, processes: int, folder: Path, strategy: Any = "auto", **train: Any) -> Any:
    settings = {"strategy": strategy, "train": train, "runtime": "cpu", "folder": folder}
    return lockstep.launch(main, processes=processes, **settings)


@pytest.mark.parametrize(
    ("processes", "strategy", "accumulate", "exact"),
    [
        (1, "auto", 1, None),
        (1, "auto", 3, None),
        (2, "ddp", 2, None),
        (3, "fsdp", 2, None),
        (2, "auto", 1, 4),
        (2, TENSOR, 2, None),
        pytest.param(4, HSDP, 2, None, marks=pytest.mark.long),
    ],
)
def test_they_are_those_of_the_batch_and_what_is_done_to_them_counts(
    tmp_path: Path, processes: int, strategy: Any, accumulate: int, exact: int | None
) -> None:
    main = partial(gradient_bodies.clipped, accumulate=accumulate)
    train = {"exact": exact} if exact else {}
    weights, norms = gradient_bodies.by_hand()
    for found in launched(main, processes, tmp_path / "run", strategy, **train):
        assert found[0] == pytest.approx(weights, rel=1e-4, abs=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)


def test_a_loss_after_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, WorkerFailed), match=r"run\.backward: comes after run.gradients"):
        launched(gradient_bodies.after_gradients, 1, tmp_path / "run")


def test_a_batch_may_be_dropped_after_a_look_at_them(tmp_path: Path) -> None:
    assert launched(gradient_bodies.dropped, 2, tmp_path / "run") == [[4, 0, 4, 4, 0, 4, 0, 4, 0, 4]] * 2


def test_in_a_closure_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, WorkerFailed), match=r"run\.gradients: in a closure"):
        launched(gradient_bodies.in_a_closure, 1, tmp_path / "run")


def trained(folder: Path, processes: int, noise: float = 0.0, **settings: Any) -> list[Any]:
    found = lockstep.train(
        task={"type": f"{gradient_bodies.__file__}:Small", "noise": noise}, processes=processes, runtime="cpu",
        out=folder, train={"batch_size": gradient_bodies.BATCH, "epochs": 1, **settings}, data={"shuffle": False},
    )  # fmt: skip
    return [ast.literal_eval((found["folder"] / f"callback-{rank}").read_text()) for rank in range(processes)]


def test_a_callback_has_them_before_the_optimizer_steps(tmp_path: Path) -> None:
    ((weights, called),) = trained(tmp_path / "one", 1, accumulate=2)
    assert weights == pytest.approx(gradient_bodies.by_hand()[0], rel=1e-4, abs=1e-5)
    assert called == ["before 6", "after 6", "before 6", "step", "after 6"] * gradient_bodies.STEPS
    ((noisy, _),) = trained(tmp_path / "noisy", 1, noise=0.1)
    assert noisy != pytest.approx(weights, rel=1e-2)
    for several, _ in trained(tmp_path / "two", 2, noise=0.1):  # ranks draw the same
        assert several == pytest.approx(noisy, rel=1e-4, abs=1e-5)


def test_a_callback_learns_of_an_exception(tmp_path: Path) -> None:
    task = {"type": f"{gradient_bodies.__file__}:Small", "fails_at": 3}
    with pytest.raises(WorkerFailed, match="no good"):
        lockstep.train(task=task, processes=2, runtime="cpu", out=tmp_path, train={"batch_size": 12, "epochs": 1})
    (file,) = tmp_path.glob("*/failed-1")
    assert file.read_text() == "no good at step 2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_anomalies_are_looked_for_in_one_step(tmp_path: Path, strategy: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailed, match=r"Function 'MulBackward0' returned nan values"):
        lockstep.train(
            task={"type": f"{gradient_bodies.__file__}:Rooted"}, processes=2, runtime="cpu", out=tmp_path,
            strategy=strategy, train={"batch_size": 12, "epochs": 1},
        )  # fmt: skip
    (log,) = tmp_path.glob("*/logs/rank-1.log")
    assert "(outputs * 0).sqrt()" in log.read_text(), "the line of the forward pass is named"
