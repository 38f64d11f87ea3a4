"""Hooks of one's own: when they are called, what is kept of them, and what is said of one that is wrong."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.checkpoint.manifest import read
from lockstep.config.schema import RunConfig
from lockstep.distributed.failure import report
from lockstep.engine.run import Run
from lockstep.engine.stop_requests import Preempted, StopRequests
from lockstep.errors import CallbackFailed, ConfigError
from lockstep.tasks.callbacks import UserCallbacks, check_callback
from lockstep.tasks.config_checks import check_parts
from lockstep.tasks.trainer import fit

calls: list[Any] = []
chosen: list[Any] = []  # the callbacks of the task below


class Line(lockstep.Task):
    """Ten examples, five steps in an epoch of batches of two."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> Dataset[Any]:
        x = torch.linspace(-1, 1, 10).reshape(10, 1)
        return TensorDataset(x, 2 * x)

    def val_data(self) -> Any:
        return self.train_data()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().mean()

    def callbacks(self) -> list[Any]:
        return list(chosen)


class Noting(lockstep.Callback):
    def __init__(self, name: str = "", stop: tuple[str, int] = ("", 0)) -> None:
        self.name, self.stop, self.seen = name, stop, 0

    def before_training(self, run: Run) -> None:
        calls.append(f"{self.name}before {run.progress.step}")

    def after_step(self, run: Run) -> str | None:
        self.seen += 1
        return self._note("step", run)

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> str | None:
        assert metrics.keys() == {"train/epoch_loss", "val/loss"}
        return self._note("validation", run)

    def after_epoch(self, run: Run) -> str | None:
        return self._note("epoch", run)

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        calls.append(f"{self.name}after {run.progress.step}")

    def _note(self, moment: str, run: Run) -> str | None:
        calls.append(f"{self.name}{moment} {run.progress.step}")
        return "enough" if (moment, run.progress.step) == self.stop else None

    def state_dict(self) -> dict[str, Any]:
        calls.append(f"{self.name}save")
        return {"seen": self.seen, "weights": torch.arange(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["weights"], torch.arange(state["seen"]))
        self.seen = state["seen"]


def config(**sections: Any) -> RunConfig:
    base = {
        "task": f"{__name__}:Line",
        "train": {"epochs": 1, "batch_size": 2},
        "optimizer": {"type": "torch.optim.SGD", "lr": 0.1},
    }
    return RunConfig.model_validate({**base, **sections})


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    calls.clear()
    chosen.clear()


def without_saves() -> list[Any]:
    return [each for each in calls if not each.endswith("save")]


def test_the_order_is_step_validation_epoch_save(new_run: Callable[..., Run]) -> None:
    chosen.append(Noting("t:"))
    fit(new_run(), config(callbacks=[{"type": f"{__name__}:Noting", "name": "y:"}]))
    both = [f"{name}{what}" for what in ("before 0", "step 1") for name in ("t:", "y:")]
    assert without_saves()[:4] == both
    last = [f"{name}{what} 5" for what in ("step", "validation", "epoch") for name in ("t:", "y:")]
    assert without_saves()[-8:] == [*last, "t:after 5", "y:after 5"]
    assert calls.index("t:epoch 5") < calls.index("t:save"), "a save has all that was done for the step"


@pytest.mark.parametrize("moment", [("step", 3), ("validation", 5), ("epoch", 5)])
def test_a_reason_to_stop_ends_the_run_at_once(moment: tuple[str, int], new_run: Callable[..., Run]) -> None:
    chosen.append(Noting(stop=moment))
    run = new_run()
    found = fit(run, config(train={"epochs": 9, "batch_size": 2}))
    assert (found["status"], found["reason"], run.progress.step) == (
        "stopped early",
        "enough (callback Noting)",
        moment[1],
    )


class Asking(Noting):
    """Asks the run to stop, as any part of the user's code may."""

    def after_batch(self, run: Run, batch: Any) -> None:
        if run.progress.step == 5:
            run.stop("enough")


@pytest.mark.parametrize("by", ["a callback", "run.stop", "the task", "early_stop"])
def test_a_run_that_is_killed_at_its_stop_stops_there_still(
    by: str, new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save of its stop has the reason; a run that has stopped may be resumed to go on."""
    chosen[:] = [Asking() if by == "run.stop" else Noting(stop=("step", 5) if by == "a callback" else ("", 0))]
    patience = {"criteria": [{"metric": "val/loss", "delta": 100.0}], "patience": 1}
    early = {"early_stop": patience} if by == "early_stop" else {}
    long = config(train={"epochs": 9, "batch_size": 2}, **early)
    at = 10 if early else 5
    if by == "the task":
        monkeypatch.setattr(Line, "should_stop", lambda self, metrics: "enough" if len(calls) < 40 else None)
    with monkeypatch.context() as patched:
        patched.setattr(UserCallbacks, "have_stopped", lambda self, run: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            fit(new_run(), long)
    chosen[:] = [Noting()]
    run, calls[:] = new_run(), ["many"] * 40
    reason = fit(run, long)["reason"]
    assert ("no improvement of val/loss" if early else "enough") in reason
    assert run.progress.step == at
    chosen[:] = [Noting()]
    run = new_run()
    longer = fit(run, config(train={"epochs": 9, "batch_size": 2}))
    assert (longer["status"], run.progress.step) == ("completed", 45)
    assert chosen[0].seen == (40 if by == "run.stop" else 45), "the state of a callback of another class is not taken"


def test_the_state_of_each_hook_is_saved_and_restored_by_its_name(new_run: Callable[..., Run]) -> None:
    chosen[:] = [Noting("a:"), Noting("b:")]
    fit(new_run(), config())
    chosen[:] = [Noting("a:"), Noting("b:")]
    run = new_run()
    fit(run, config(train={"epochs": 2, "batch_size": 2}))
    assert [each.seen for each in chosen] == [10, 10]
    assert "a:before 5" in calls
    attached = run._engine.checkpointer.registered._parts
    assert {"callback Noting", "callback Noting 2"} <= attached.keys()


def test_a_reason_is_not_lost_where_the_validation_is_given_up(new_run: Callable[..., Run]) -> None:
    """The callbacks of the step were called before the run left, and are not called again."""

    class Leaving(Noting):
        asks = True

        def after_step(self, run: Run) -> str | None:
            if self.asks and run.progress.step == 5:
                requests.leave = "SIGTERM"
            return super().after_step(run)

    requests = StopRequests()
    chosen[:] = [Leaving(stop=("step", 5))]
    with pytest.raises(Preempted):
        fit(new_run(requests), config(train={"epochs": 9, "batch_size": 2}))
    Leaving.asks = False
    chosen[:] = [Leaving()]
    run = new_run()
    found = fit(run, config(train={"epochs": 9, "batch_size": 2}))
    assert (found["reason"], run.progress.step, chosen[0].seen) == ("enough (callback Leaving)", 5, 5)
    assert calls.count("step 5") == calls.count("validation 5") == calls.count("epoch 5") == 1


def test_a_hook_that_raises_is_named_with_its_traceback(new_run: Callable[..., Run]) -> None:
    class Broken:
        def after_step(self, run: Run) -> None:
            if run.progress.step == 2:
                raise KeyError("not there")

    chosen.append(Broken())
    with pytest.raises(CallbackFailed) as failed:
        fit(new_run(), config())
    assert str(failed.value) == "callback Broken.after_step failed after step 2 on rank 0: KeyError: 'not there'"
    told = report(failed.value, 0, "here")
    assert told.message == str(failed.value) and "raise KeyError" in told.traceback and told.exit_code == 5


class Forgetful:
    def after_step(self, run: Run) -> None:
        pass

    def state_dict(self) -> Any:
        raise ValueError("nothing to save")

    def load_state_dict(self, state: Any) -> None:
        pass


def test_a_state_that_cannot_be_had_is_named(new_run: Callable[..., Run]) -> None:
    chosen.append(Forgetful())
    with pytest.raises(
        CallbackFailed, match=r"callback Forgetful.state_dict failed after step 5 on rank 0: ValueError"
    ):
        fit(new_run(), config())


def returning(value: Any, annotated: bool) -> Any:
    class Returning:
        def after_step(self, run: Run):  # type: ignore[no-untyped-def]
            return value

    if annotated:
        Returning.after_step.__annotations__["return"] = None
    return Returning()


def test_what_a_hook_returns_is_text_or_nothing(new_run: Callable[..., Run]) -> None:
    for callback, told in [
        (
            returning(7, False),
            "callback Returning.after_step returned 7: it may return a reason to stop, as text, or None",
        ),
        (returning("stop", True), "callback Returning.after_step returned 'stop': it may return nothing"),
    ]:
        chosen[:] = [callback]
        with pytest.raises(ConfigError) as refused:
            fit(new_run(), config())
        assert str(refused.value) == told


def callback(*methods: str, base: type = object) -> type:
    return type("Mine", (base,), {name: lambda self, *args: None for name in methods})


@pytest.mark.parametrize("base", [object, lockstep.Callback])
@pytest.mark.parametrize(
    ("methods", "told"),
    [
        (["after_setp"], "Mine is no callback: a callback has before_training, before_batch"),
        (["after_step", "after_epochs"], "Mine defines after_epochs, which Lockstep does not call; a callback has "),
        (["after_step", "on_validation_end"], "Mine defines on_validation_end, which Lockstep does not call; "),
        (["after_step", "state_dict"], "Mine defines one of state_dict and load_state_dict: a state needs both"),
        ([], "Mine is no callback: a callback has before_training"),
    ],
)
def test_a_method_that_is_not_ours_is_refused(methods: list[str], told: str, base: type) -> None:
    with pytest.raises(ConfigError) as refused:
        check_callback(callback(*methods, base=base)(), "callbacks[1]")
    assert str(refused.value).startswith(f"callbacks[1]: {told}")


def test_helpers_of_ones_own_are_left_alone() -> None:
    check_callback(callback("after_step", "draw", "save_image", "evaluate", "_after_setp", "log")(), "callbacks[0]")


class Misspelt:
    def after_epohc(self, run: Run) -> None:
        pass


def test_a_dry_run_tells_what_an_import_shows() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: Misspelt is no callback: a callback has .*after_epoch"):
        check_parts(config(callbacks=[f"{__name__}:Misspelt"]))
    with pytest.raises(ConfigError, match=r"callbacks\[1\].nmae: Noting has no such argument, did you mean name\?"):
        check_parts(config(callbacks=[f"{__name__}:Noting", {"type": f"{__name__}:Noting", "nmae": "x"}]))


def test_what_a_task_returns_for_hooks_is_checked_before_training(new_run: Callable[..., Run]) -> None:
    for given, told in [([Noting], r"callbacks\(\)\[0\] is the class Noting: return Noting\(...\)"),
                        ([Misspelt()], r"task: callbacks\(\)\[0\]: Misspelt is no callback")]:  # fmt: skip
        chosen[:] = given
        with pytest.raises(ConfigError, match=told):
            fit(new_run(), config())
    assert not calls


def test_a_file_of_hooks_that_travelled_is_found_next_to_the_tasks(tmp_path: Any, new_run: Callable[..., Run]) -> None:
    (tmp_path / "travelled_callbacks.py").write_text("class Quiet:\n    def after_step(self, run) -> None: pass\n")
    (tmp_path / "travelled_task.py").write_text(f"from {__name__} import Line\n")
    sys.modules[__name__] = sys.modules[Line.__module__]
    here = config(task=f"{tmp_path}/travelled_task.py:Line", callbacks=["/elsewhere/travelled_callbacks.py:Quiet"])
    assert fit(new_run(), here)["status"] == "completed"


# Values beside the loss, several validation sets, schedules


class Beside(Line):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        shift = lockstep.Mean(batch[0].sum(), len(batch[0]))
        return loss, {"half": loss / 2, "shift": shift}

    def val_data(self) -> Any:
        data = self.train_data()
        return {"all": data, "few": torch.utils.data.Subset(data, [0, 1, 2])}


def rows(run: Run) -> list[dict[str, Any]]:
    import json

    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_values_beside_the_loss_and_several_sets_have_names_of_their_own(new_run: Callable[..., Run]) -> None:
    run = new_run()
    keep = {"keep": {"metric": "val/few/half"}, "async": False}
    stop = {"criteria": [{"metric": "train/epoch_half"}, {"metric": "val/all/loss"}], "patience": 9}
    found = fit(run, config(task=f"{__name__}:Beside", checkpoint=keep, early_stop=stop))
    names = {f"val/{name}/{value}" for name in ("all", "few") for value in ("loss", "half", "shift")}
    assert set(found["metrics"]) == names | {"train/epoch_loss", "train/epoch_half", "train/epoch_shift"}
    assert found["best"]["metric"] == "val/few/half"
    metrics = found["metrics"]
    assert metrics["val/all/half"] == pytest.approx(metrics["val/all/loss"] / 2, rel=1e-6)
    assert metrics["val/few/shift"] == pytest.approx((-1 - 7 / 9 - 5 / 9) / 3, rel=1e-6)
    trained = [row for row in rows(run) if "examples_per_second" in row]
    assert len(trained) == 5
    assert all(row["train/half"] == pytest.approx(row["train/loss"] / 2, rel=1e-6) for row in trained)
    assert sum(row["train/shift"] for row in trained) / 5 == pytest.approx(metrics["val/all/shift"], abs=1e-7)


def test_every_row_of_a_step_has_names_of_its_own_and_epochs_are_counted_alike(new_run: Callable[..., Run]) -> None:
    run = new_run()
    metrics = fit(run, config(train={"epochs": 2, "batch_size": 2}, checkpoint={"every": "3 steps"}))["metrics"]
    written = rows(run)
    names = [(row["step"], name) for row in written for name in row if name not in ("step", "epoch")]
    assert len(names) == len(set(names))
    interval = [row["train/loss"] for row in written if "train/loss" in row]
    assert metrics["train/epoch_loss"] == pytest.approx(sum(interval[5:]) / 5, rel=1e-6)
    epochs = {row["step"]: row["epoch"] for row in written}
    run._engine.checkpointer.finish()  # the last save is written and an old one deleted in the background
    saved = {
        step: read(run._engine.checkpointer.storage.path(step))["epoch"]
        for step in run._engine.checkpointer.storage.steps()
    }
    assert saved and saved == {step: epochs[step] for step in saved} and saved[10] == 2


forward_passes: list[int] = []


class Counting(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not self.training:
            forward_passes.append(len(given))
        return super().forward(given)


class ThreePasses(Line):
    """What a task measures, written as three methods."""

    def model(self) -> nn.Module:
        return Counting(1, 1)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"near": ((model(batch[0]) - batch[1]).abs() < 0.5).float().reshape(-1)}

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        return {"errors": (model(batch[0]) - batch[1]).abs()}

    def epoch_metrics(self, outputs: Any) -> Any:
        return {"median": outputs["errors"].median()}


class OnePass(Line):
    """The same, from one forward pass."""

    model, epoch_metrics = ThreePasses.model, ThreePasses.epoch_metrics  # type: ignore[assignment]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = (model(batch[0]) - batch[1]).square().mean()
        return loss, {"half": loss / 2}

    def evaluate_step(self, model: nn.Module, batch: Any) -> Any:
        apart = model(batch[0]) - batch[1]
        metrics = {"loss": apart.square().mean(), "near": (apart.abs() < 0.5).float().reshape(-1)}
        return metrics, {"errors": apart.abs()}


def test_a_validation_batch_takes_one_forward_pass_by_evaluate_step(new_run: Callable[..., Run]) -> None:
    found, passes = {}, {}
    for task in ("ThreePasses", "OnePass"):
        forward_passes.clear()
        run = new_run()
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # of the run before
        metrics = fit(run, config(task=f"{__name__}:{task}"))["metrics"]
        found[task] = {name: value for name, value in metrics.items() if name.startswith("val/")}
        passes[task] = len(forward_passes)
    assert found["OnePass"] == found["ThreePasses"]
    assert found["OnePass"].keys() == {"val/loss", "val/near", "val/median"}
    assert passes == {"ThreePasses": 3 * 6, "OnePass": 6}  # five batches, and one to know the names


class Bare(Line):
    returned: Any = None

    def evaluate_step(self, model: nn.Module, batch: Any) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (torch.ones(2), r"Bare.evaluate_step\(\) returned a tensor of shape \[2\]: return metrics by name"),
        ({"near": torch.ones(2)}, "returned near, but no 'loss'"),
        ({"loss": torch.ones(2), "near": torch.tensor(1.0)}, "metric 'near' is a single number"),
    ],
)
def test_what_evaluate_step_returns_is_checked(
    returned: Any, told: str, new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bare, "returned", returned)
    with pytest.raises(ConfigError, match=told):
        fit(new_run(), config(task=f"{__name__}:Bare"))


class Twice(OnePass):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {}


def test_evaluate_step_with_metrics_is_refused_and_the_values_of_loss_are_known(new_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match="defines evaluate_step and metrics, but evaluate_step replaces metrics"):
        fit(new_run(), config(task=f"{__name__}:Twice"))
    with pytest.raises(ConfigError, match="there is no metric 'train/epoch_hlaf': did you mean train/epoch_half"):
        fit(new_run(), config(task=f"{__name__}:OnePass", early_stop={"criteria": [{"metric": "train/epoch_hlaf"}]}))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"early_stop": {}}, r"early_stop.criteria\[0\].metric: there is no metric 'val/loss': did you mean val/"),
        ({"early_stop": {"criteria": [{"metric": "train/epoch_hlaf"}]}}, "did you mean train/epoch_half"),
        ({"checkpoint": {"keep": {"metric": "val/fwe/loss"}}}, "did you mean val/few/loss"),
    ],
)
def test_a_metric_of_no_set_is_refused(sections: dict[str, Any], told: str, new_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match=told):
        fit(new_run(), config(task=f"{__name__}:Beside", **sections))


def test_the_best_of_several_sets_has_to_be_named(new_run: Callable[..., Run], caplog: Any) -> None:
    assert fit(new_run(), config(task=f"{__name__}:Beside"))["best"] is None
    assert "no checkpoint is kept as the best. Name one of val/all/loss, val/few/loss" in caplog.text


class Wrong(Line):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return chosen[0](super().loss(model, batch))

    def callbacks(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda loss: (loss, loss), "returned a tuple of Tensor, Tensor: return the loss, or `loss, {"),
        (lambda loss: (loss, {"loss": loss}), "returned a value 'loss' beside the loss: give it another name"),
        (lambda loss: (loss, {"all": torch.zeros(3)}), r"'all' beside the loss, a tensor of shape \[3\]: give"),
        (lambda loss: (loss, {"name": "x"}), r"returned 'name' beside the loss, a str: give a single number"),
    ],
)  # fmt: skip
def test_values_that_are_none_are_refused(given: Any, told: str, new_run: Callable[..., Run]) -> None:
    chosen[:] = [given]
    with pytest.raises(ConfigError, match=told):
        fit(new_run(), config(task=f"{__name__}:Wrong"))


class NoNames(Line):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return torch.zeros(3)


class NoModel(Wrong):
    def model(self) -> Any:
        return chosen[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [(None, "got None"), ({"a": nn.Linear}, "got the class Linear, not an object of it"), ((1, 2), "got a tuple")],
)
def test_what_is_no_model_is_refused(given: Any, told: str, new_run: Callable[..., Run]) -> None:
    chosen[:] = [given]
    with pytest.raises(ConfigError, match=rf"NoModel.model\(\) must return a torch.nn.Module, or a mapping .* {told}"):
        fit(new_run(), config(task=f"{__name__}:NoModel"))


def test_metrics_without_names_are_refused(new_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match=r"NoNames.metrics\(\) returned a tensor of shape \[3\]: return metrics by"):
        fit(new_run(), config(task=f"{__name__}:NoNames"))


class OneCycle(Line):
    every: Any = "1 step"

    def scheduler(self, optimizer: Any, total_steps: int) -> Any:
        calls.append(total_steps)
        made = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total_steps)
        return lockstep.Schedule(made, every=self.every)


def rates(run: Run) -> list[float]:
    return [row["lr"] for row in rows(run) if "examples_per_second" in row]


def test_a_tasks_scheduler_is_told_the_steps_of_the_run_and_moves_with_each(new_run: Callable[..., Run]) -> None:
    run = new_run()
    fit(run, config(task=f"{__name__}:OneCycle", train={"epochs": 2, "batch_size": 3}))
    assert calls == [8]
    assert len(set(rates(run))) == 8 and max(rates(run)) == pytest.approx(1.0, rel=0.2)


def test_a_run_that_is_made_longer_than_its_schedule_is_refused(new_run: Callable[..., Run], caplog: Any) -> None:
    def settings(epochs: int) -> RunConfig:
        return config(task=f"{__name__}:OneCycle", train={"epochs": epochs, "batch_size": 2})

    fit(new_run(), settings(2))
    with pytest.raises(
        ConfigError, match="schedule was made for 10 steps, and this run is to have 15: it would be over"
    ):
        fit(new_run(), settings(3))
    fit(new_run(), settings(1))
    assert "made for 10 steps, and continues as if the run still had so many; it has 5 now" in caplog.text


@pytest.mark.parametrize(("every", "times"), [("1 step", 10), ("2 steps", 5), ("1 epoch", 2)])
def test_auto_stands_for_how_often_the_scheduler_is_stepped(
    every: str, times: int, new_run: Callable[..., Run]
) -> None:
    schedule = {"type": "torch.optim.lr_scheduler.LinearLR", "start_factor": 1.0, "end_factor": 0.1,
                "total_iters": "auto", "every": every}  # fmt: skip
    run = new_run()
    here = config(scheduler=schedule, train={"epochs": 2, "batch_size": 2})
    check_parts(here)
    fit(run, here)
    assert run.optimizer is not None
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert run._engine.checkpointer.registered._parts["run length"][0].state_dict() == {"steps of the scheduler": times}


def test_a_total_that_nobody_knows_is_refused() -> None:
    from lockstep.tasks.schedules import run_length

    unknown = run_length(config(train={"epochs": 1}), None)
    with pytest.raises(
        ConfigError, match=r"OneCycle.scheduler takes total_steps, but how many steps .* Set train.steps"
    ):
        unknown.of_task(OneCycle(), object())
    schedule = {"type": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": "auto"}
    with pytest.raises(ConfigError, match=r"scheduler.T_max: auto, but how many steps .* Set train.steps"):
        unknown.arguments(config(scheduler=schedule).scheduler)  # type: ignore[arg-type]
    timed = config(scheduler={**schedule, "every": "10 minutes"}).scheduler
    with pytest.raises(ConfigError, match=r"with scheduler.every: 600 seconds nobody knows how often"):
        run_length(config(), 100).arguments(timed)  # type: ignore[arg-type]
    known = run_length(config(train={"steps": 40}), None)
    assert known.arguments(config(scheduler={**schedule, "every": "1 step"}).scheduler)["T_max"] == 40  # type: ignore


@pytest.mark.parametrize("every", ["now and then", "1.5 steps", 7])
def test_an_interval_that_is_none_is_refused(every: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"lockstep.Schedule: every="):
        lockstep.Schedule(torch.optim.lr_scheduler.StepLR(optimizer, 1), every=every)


def test_what_is_no_scheduler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lockstep.Schedule: the scheduler is a dict, which has no step\(\)"):
        lockstep.Schedule({})


def test_names_of_datasets_are_text(new_run: Callable[..., Run]) -> None:
    class Slashed(Line):
        def val_data(self) -> Any:
            return {"a/b": self.train_data()}

    sys.modules[__name__].Slashed = Slashed  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"val_data\(\) has a dataset under 'a/b': a name is text without a slash"):
        fit(new_run(), config(task=f"{__name__}:Slashed"))
