"""What LightningModules, their data and callbacks find in their trainer: stages, states, metrics and lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import lit_modules
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torchmetrics
import yaml
from click.testing import CliRunner
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lit_modules import AutoEncoder, Digits
from test_lightning import by_lightning, fitted, quiet  # noqa: F401
from torch.utils.data import DataLoader, IterableDataset

import lockstep
from conftest import Project
from lockstep.adapters.lightning import Module, fit
from lockstep.cli import main
from lockstep.errors import ConfigError

STAGED = '''
class Staged(Digits):
    """Has the data of the stages that it was set up for, and no others."""

    def setup(self, stage):
        inputs = TensorDataset(torch.randn(40, 6), torch.zeros(40).long())
        parts = random_split(inputs, [30, 10])
        if stage == "fit":
            self.train, self.val = parts
        with open("STAGES", "a") as file:
            print(stage, file=file)
        if stage in ("test", "predict"):
            setattr(self, stage, parts[1])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.predict, 4)
'''


def test_data_is_set_up_for_the_stage_that_is_about_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = Path(lit_modules.__file__).read_text() + "\n\nfrom torch.utils.data import random_split\n" + STAGED
    stages = tmp_path / "stages"
    (tmp_path / "lit_staged.py").write_text(code.replace("STAGES", str(stages)))
    monkeypatch.chdir("/")
    config = {
        "task": {"type": "lockstep.adapters.lightning:Module", "module": "lit_staged.py:AutoEncoder",
                 "data": {"type": "lit_staged.py:Staged", "batch_size": 10}},
        "processes": 1, "runtime": "cpu", "train": {"epochs": 1, "batch_size": 10},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = lockstep.train(tmp_path / "config.yaml", out=tmp_path / "runs")
    tested = outcome["metrics"]["test/loss"]
    assert tested == pytest.approx(outcome["metrics"]["val/loss"]), "the same random parts"
    folder = str(outcome["folder"])
    assert stages.read_text().split() == ["fit", "test"]
    for data, asked in (("test", ["test"]), ("val", ["fit", "validate"])):
        stages.unlink()
        result = CliRunner().invoke(main, ["evaluate", folder, "--data", data, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["metrics"][f"{data}/loss"] == pytest.approx(tested)
        assert stages.read_text().split() == asked
    stages.unlink()
    found = str(tmp_path / "found.jsonl")
    result = CliRunner().invoke(main, ["predict", folder, "--input", "predict_dataloader", "--out", found])
    assert result.exit_code == 0, result.output
    assert len(Path(found).read_text().splitlines()) == 10 and stages.read_text().split() == ["predict"]


def test_stages_are_those_of_lightning(tmp_path: Path) -> None:
    stages: list[Any] = []

    class Noted(AutoEncoder):
        def setup(self, stage: str) -> None:
            stages.append(stage)

        def teardown(self, stage: str) -> None:
            stages.append(f"no {getattr(stage, 'value', stage)}")

    trainer, _ = by_lightning(Noted(), 1)
    trainer.test(Noted(), Digits(10), verbose=False)
    theirs = sorted(stages)
    stages.clear()
    fitted(Noted(), tmp_path, epochs=1)
    assert sorted(stages) == theirs and stages[:2] == ["fit", "test"]


class Lengths(AutoEncoder):
    """Asks for lengths where schedulers are made, as OneCycleLR does."""

    def configure_optimizers(self) -> Any:
        self.lengths = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("accumulate", "config", "lengths"),
    [
        (1, {}, (18, 6)), (2, {}, (9, 6)), (1, {"train": {"overfit": 25}}, (9, 3)),
        (1, {"max_epochs": None, "max_steps": 7}, (7, 6)), (2, {"train": {"limit": 25}}, (6, 4)),
    ],
)  # fmt: skip
def test_lengths_are_those_of_the_steps_that_run(
    accumulate: int, config: Any, lengths: tuple[int, int], tmp_path: Path
) -> None:
    class Plain(Digits):
        def train_dataloader(self) -> Any:
            return DataLoader(self.train, self.batch_size, shuffle=True)

    module, options = Lengths(), {"max_epochs": 3, "accumulate_grad_batches": accumulate, **config}
    fit(module, Plain(10), **options, processes=1, runtime="cpu", out=tmp_path)
    assert module.lengths == lengths and module.trainer.global_step == lengths[0]


class Keeps(Callback):
    """Keeps state in each of the two ways that Lightning has."""

    def __init__(self, name: str = "one") -> None:
        self.name, self.own, self.whole = name, 0, 0

    @property
    def state_key(self) -> str:
        return self.name

    def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
        self.own, self.whole = self.own + 1, self.whole + 1

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[f"whole of {self.name}"] = torch.tensor(self.whole)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.whole = int(checkpoint[f"whole of {self.name}"])


class Remembers(AutoEncoder):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["steps"]


def test_what_module_and_callbacks_save_comes_back(tmp_path: Path) -> None:
    for epochs in (1, 3):
        module, callbacks = Remembers(), [Keeps("one"), Keeps("two")][:: 1 if epochs == 1 else -1]
        fitted(module, tmp_path, epochs=epochs, folder=tmp_path / "run", callbacks=callbacks)
    assert [module.steps, *((each.own, each.whole) for each in callbacks)] == [18, (18, 18), (18, 18)]


def test_what_cannot_be_saved_is_named_before_the_first_step(tmp_path: Path) -> None:
    class Weights(Remembers):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].pop("encoder.0.weight")

    class Replaces(Remembers):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {}

    class Thing(Remembers):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["thing"] = torch.nn.Linear(1, 1)

    weights, thing = r"checkpoint\['state_dict'\].*saves weights", "Linear"
    for shape, message in {Weights: weights, Replaces: weights, Thing: thing}.items():
        module = shape()
        with pytest.raises(lockstep.LockstepError, match=message):
            fitted(module, tmp_path)
        assert module.steps == 0
    with pytest.raises(ConfigError, match="callbacks: two have the state_key 'one'"):
        fitted(AutoEncoder(), tmp_path, callbacks=[Keeps(), Keeps()])


class Looks(AutoEncoder):
    """Logs in every way, and looks at callback_metrics in every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, int], dict[str, float]] = {}
        self.tried: list[str] = []  # in the sanity check
        self.mean = torchmetrics.MeanMetric()

    def look(self, hook: str) -> None:
        if not self.trainer.sanity_checking:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            self.found[hook, self.trainer.current_epoch] = metrics
        else:
            assert "epoch_end" not in hook or "val_loss" in self.trainer.callback_metrics
            self.tried.append(hook)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[0])
        for name, on_step, on_epoch in (("step", None, None), ("epoch", False, True), ("both", True, True)):
            self.log(f"train_{name}", loss, on_step=on_step, on_epoch=on_epoch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.mean.update(loss, weight=len(batch[0]))
        self.log("val_mean", self.mean)
        for name, on_step in (("loss", None), ("both", True)):
            self.log(f"val_{name}", loss, on_step=on_step)

    def on_validation_epoch_end(self) -> None:
        self.look("on_validation_epoch_end")
        self.log("val_late", 3.0)

    def on_validation_end(self) -> None:
        self.look("on_validation_end")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 5:
            self.look("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.look("on_train_epoch_end")
        self.log("train_late", 4.0)

    def on_train_epoch_start(self) -> None:
        self.look("on_train_epoch_start")


@pytest.mark.parametrize("every", [1, 2])
def test_hooks_find_the_metrics_of_lightning(every: int, tmp_path: Path) -> None:
    theirs, ours, resumed = Looks(), Looks(), Looks()
    by_lightning(theirs, 2, check_val_every_n_epoch=every)
    options = {"epochs": 2, "check_val_every_n_epoch": every, "folder": tmp_path / "run"}
    ours.die_at = 9
    with pytest.raises(SystemExit):
        fitted(ours, tmp_path, **options)
    fitted(resumed, tmp_path, **options)
    assert ours.found | resumed.found == {
        where: pytest.approx(found, rel=1e-5) for where, found in theirs.found.items()
    }
    assert ours.tried == theirs.tried == ["on_validation_epoch_end", "on_validation_end"]
    assert len(theirs.found) == 8 + (0 if every == 2 else 2)


@pytest.mark.long
def test_two_ranks_find_the_metrics_of_one(tmp_path: Path, project: Project) -> None:
    theirs = Looks()
    by_lightning(theirs, 2)
    (tmp_path / "ranks.py").write_text(f"""
import json, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from lit_modules import Digits
from lockstep.adapters.lightning import Module, fit
from test_lightning_trainer import Looks

class Noted(Looks):
    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        if self.current_epoch:
            found = [[*where, metrics] for where, metrics in self.found.items()]
            Path(f"{tmp_path}/{{self.trainer.global_rank}}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    fit(Noted(), Digits(10), max_epochs=2, processes=2, runtime="cpu", out="{tmp_path}")
""")
    ended = project.start_python(tmp_path / "ranks.py").wait()
    assert ended.code == 0, ended.text
    for rank in (0, 1):
        for hook, epoch, metrics in json.loads((tmp_path / f"{rank}.json").read_text()):
            found = {name: each for name, each in metrics.items() if "late" in name or "batch" not in hook}
            of_all = {name for name in found if name.startswith("val") or "epoch" in name}
            expected = theirs.found[hook, epoch]
            assert {name: found[name] for name in of_all} == pytest.approx({name: expected[name] for name in of_all})
            assert set(expected) == set(metrics)


class Measures(AutoEncoder):
    """Logs under names whose kind is not in them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("error", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log("val_loss", loss, on_step=True, on_epoch=True)
        self.log(f"valid_{dataloader_idx}", loss, add_dataloader_idx=False)

    def on_train_epoch_end(self) -> None:
        self.log("val_late", 5.0 - self.current_epoch)


class TwoSets(Digits):
    def val_dataloader(self) -> Any:
        return [DataLoader(self.val, 7), DataLoader(self.train, 7)]


@pytest.mark.parametrize(
    ("monitor", "sets"),
    [("error", 1), ("train_loss", 1), ("val_loss", 1), ("val_loss_epoch", 1), ("val_late", 1), ("valid_1", 2),
     ("val_loss/dataloader_idx_1", 2)],
)  # fmt: skip
def test_checkpoints_are_judged_by_the_very_metric(monitor: str, sets: int, tmp_path: Path) -> None:
    data, found = Digits if sets == 1 else TwoSets, []
    for trained in (Measures(), Measures()):
        keeps = ModelCheckpoint(tmp_path / "theirs" if not found else None, monitor=monitor, save_top_k=2)
        if not found:
            lightning.Trainer(
                accelerator="cpu", max_epochs=3, callbacks=[keeps], logger=False, enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(trained, data(10))  # fmt: skip
        else:
            outcome = fit(trained, data(10), max_epochs=3, callbacks=keeps, processes=1, runtime="cpu", out=tmp_path)
        found.append((keeps.best_model_score, int(keeps.best_model_path.partition("step")[2][1:].partition(".")[0])))
    assert found[1] == (pytest.approx(float(found[0][0]), rel=1e-5), found[0][1])
    assert float(found[1][0]) == pytest.approx(outcome["best"]["value"]) and Path(keeps.best_model_path).is_dir()


def test_without_a_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    keeps = ModelCheckpoint()
    outcome = fitted(AutoEncoder(), tmp_path, callbacks=keeps)
    assert keeps.best_model_path == f"{outcome['folder']}/checkpoints/step-00000018" and keeps.best_model_score is None
    assert Path(keeps.best_model_path).is_dir()


@pytest.mark.parametrize("callback", [ModelCheckpoint, EarlyStopping])
@pytest.mark.parametrize("monitor", ["loss", "valid_loss", "val_los"])
def test_a_monitor_that_does_not_exist_is_named_with_what_there_is(callback: Any, monitor: str, tmp_path: Path) -> None:
    with pytest.raises(lockstep.LockstepError, match=f"{monitor}.*train_loss.*val_loss"):
        fitted(AutoEncoder(), tmp_path, callbacks=callback(monitor=monitor))


def test_validation_loaders_may_have_names(tmp_path: Path) -> None:
    class Named(TwoSets):
        def val_dataloader(self) -> Any:
            return dict(zip("ab", super().val_dataloader(), strict=True))

    found = []
    for data in (TwoSets, Named):
        module = Measures()
        fit(module, data(10), max_epochs=1, processes=1, runtime="cpu", out=tmp_path)
        found.append({name: float(value) for name, value in module.trainer.callback_metrics.items()})
    assert found[0] == found[1] and {"val_loss/dataloader_idx_1", "val_loss_epoch/dataloader_idx_0"} < set(found[0])


class Events(AutoEncoder):
    """Notes what its hooks see: steps, rates, metrics, modes and batches."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.measured = 0

    def note(self, hook: str, *more: Any) -> None:
        if not self.trainer.sanity_checking:
            metrics = {
                name: round(float(each), 5) for name, each in self.trainer.callback_metrics.items()
                if not name.startswith("test")  # which is measured at the end of training
            }  # fmt: skip
            rate = round(self.optimizers().param_groups[0]["lr"], 8)
            states = self.training, torch.is_grad_enabled(), self.trainer.global_step, self.current_epoch
            self.events.append((hook, rate, *states, metrics, *more))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[0])
        self.log("loss/train", loss, on_step=False, on_epoch=True)
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        self.note("optimizer_step")

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, *number: int) -> None:
        self.note("on_validation_batch_end", batch_idx, *number)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measured += len(batch[0])
        if batch_idx == 1:
            self.log("val_second", F.mse_loss(self(batch[0]), batch[0]), add_dataloader_idx=True)

    def on_validation_epoch_end(self) -> None:
        self.note("on_validation_epoch_end", self.measured)
        self.measured = 0

    def on_train_epoch_end(self) -> None:
        self.note("on_train_epoch_end")
        self.log("at_end", 1.0 + self.current_epoch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * (3 + dataloader_idx), *batch[1:]]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


for _hook in ("on_fit_start", "on_train_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
              "on_validation_epoch_start", "on_train_end"):  # fmt: skip
    setattr(Events, _hook, lambda self, *arguments, hook=_hook: self.note(hook))


class Moved(TwoSets):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / (2 + dataloader_idx), *batch[1:]]


@pytest.mark.parametrize(
    ("data", "options", "monitor"),
    [(Digits, {}, "at_end"), (Moved, {"val_check_interval": 2, "max_steps": 8}, "loss/train")],
    ids=["one set", "two sets, and training ends within an epoch"],
)
def test_hooks_see_what_they_see_under_lightning(data: Any, options: Any, monitor: str, tmp_path: Path) -> None:
    theirs, ours = Events(), Events()
    stops = [EarlyStopping(monitor, patience=2, check_on_train_epoch_end=True) for _ in range(2)]
    lightning.Trainer(
        accelerator="cpu", max_epochs=5, callbacks=stops[0], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    ).fit(theirs, data(10))  # fmt: skip
    fit(ours, data(10), max_epochs=5, callbacks=stops[1], processes=1, runtime="cpu", out=tmp_path, **options)
    assert ours.events == theirs.events
    assert (stops[1].wait_count, stops[1].stopped_epoch) == (stops[0].wait_count, stops[0].stopped_epoch)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda loader: [loader, loader], "returned a list: return one DataLoader"),
        (lambda loader: {"a": loader}, "returned a dict: return one DataLoader"),
        (lambda loader: DataLoader(loader.dataset, batch_size=None), "DataLoader with batch_size=None"),
    ],
)
def test_other_loaders_to_train_on_are_refused_by_name(made: Any, message: str, tmp_path: Path) -> None:
    class Other(Digits):
        def train_dataloader(self) -> Any:
            return made(super().train_dataloader())

    for data in (Other(), made(DataLoader(torch.randn(8, 6), 4))):
        with pytest.raises(ConfigError, match=message):
            fit(AutoEncoder(), data, max_epochs=1, processes=1, runtime="cpu", out=tmp_path)


class When(AutoEncoder):
    """Notes after how many batches it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking and len(self.losses) not in self.at:
            self.at.append(len(self.losses))


@pytest.mark.parametrize(
    "options",
    [{"val_check_interval": 3}, {"val_check_interval": 1}, {"val_check_interval": 0.5}, {"val_check_interval": 1.0},
     {"val_check_interval": 4, "check_val_every_n_epoch": None}, {"check_val_every_n_epoch": 2},
     {"val_check_interval": 2, "accumulate_grad_batches": 2}],
    ids=str,
)  # fmt: skip
def test_validation_comes_after_the_batches_of_lightning(options: Any, tmp_path: Path) -> None:
    theirs, ours, checks = When(), When(), [EarlyStopping("val_loss"), EarlyStopping("val_loss")]
    by_lightning(theirs, 2, callbacks=checks[0], **options)
    fitted(ours, tmp_path, epochs=2, callbacks=checks[1], **options)
    assert ours.at == theirs.at and checks[0]._check_on_train_epoch_end == checks[1]._check_on_train_epoch_end


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 4}, "=4: an epoch has 6 batches, and each begins to count anew"),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "no whole number of steps"),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None, "accumulate_grad_batches": 4}, "fewer than 4"),
        ({"val_check_interval": 3, "check_val_every_n_epoch": 2}, "use 1 or None"),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "give a number of batches"),
    ],
)
def test_other_intervals_are_refused_by_name(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(AutoEncoder(), tmp_path, **options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(5)
        return iter([(torch.randn(6, generator=generator), torch.tensor(0)) for _ in range(35)])


@pytest.mark.parametrize("options", [{}, {"val_check_interval": 2}], ids=str)
def test_a_stream_is_trained_on(options: Any, tmp_path: Path) -> None:
    theirs, ours = When(), When()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(theirs, DataLoader(Stream(), 10), DataLoader(Stream(), 7))
    fit(ours, DataLoader(Stream(), 10), DataLoader(Stream(), 7), max_epochs=2, processes=1, runtime="cpu",
        out=tmp_path, **options)  # fmt: skip
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.at == theirs.at


def test_commands_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither be planned nor exported as a program: write a Task"):
        Module(AutoEncoder(), Digits()).train_data()
    module = AutoEncoder()
    folder = fitted(module, tmp_path, epochs=1)["folder"]
    result = CliRunner().invoke(main, ["evaluate", folder])
    assert result.exit_code == 2 and "lockstep export RUN --to safetensors" in result.output, result.output
    weights = str(tmp_path / "weights.safetensors")
    result = CliRunner().invoke(main, ["export", folder, "--to", "safetensors", "--out", weights])
    assert result.exit_code == 0, result.output
    AutoEncoder().load_state_dict(safetensors.torch.load_file(weights))
