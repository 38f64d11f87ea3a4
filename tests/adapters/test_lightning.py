"""LightningModules: the losses of Lightning's own Trainer, on one rank and on two, ended and resumed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import lit_modules
import pytest
import torch
import yaml
from click.testing import CliRunner
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lit_modules import SHAPES, AutoEncoder, Classifier, Digits, Gan, Recorded, Transformer
from torch.utils.data import DataLoader

import lockstep
from conftest import Project
from lockstep.adapters.lightning import fit
from lockstep.adapters.lightning.trainer import alike
from lockstep.cli import main
from lockstep.config.load import load
from lockstep.errors import ConfigError
from lockstep.launchers.ssh.code import Code

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def by_lightning(module: Recorded, epochs: int = 3, **options: Any) -> tuple[Any, dict[str, float]]:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, Digits(10))
    return trainer, {name: float(value) for name, value in trainer.callback_metrics.items()}


def fitted(module: Any, out: Path, processes: int = 1, epochs: int = 3, **options: Any) -> dict[str, Any]:
    every = {"log": {"every": "1 step"}, **options}
    return fit(module, Digits(10), max_epochs=epochs, processes=processes, runtime="cpu", out=out, **every)


def logged(folder: Any) -> dict[tuple[int, str], float]:
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], name): value for row in rows for name, value in row.items()
        if name.startswith(("train/", "val/", "test/"))
    }  # fmt: skip


@each_shape
def test_one_rank_has_the_numbers_of_lightning(shape: Callable[[], Recorded], tmp_path: Path) -> None:
    options = SHAPES[shape]  # type: ignore[index]
    theirs, ours = shape(), shape()
    trainer, metrics = by_lightning(theirs, **options)
    outcome = fitted(ours, tmp_path, **options)
    assert len(ours.losses) == 18
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-6)
    assert ours.trainer.global_step == trainer.global_step
    measured = {name: value for name, value in metrics.items() if name.startswith("val_") and "epoch" not in name}
    assert {name: outcome["metrics"][f"val/{name[4:]}"] for name in measured} == pytest.approx(measured, rel=1e-6)
    if isinstance(ours, Classifier):
        assert (ours.rates, ours.seen) == (theirs.rates, theirs.seen) and ours.rates[-1] < 0.5
        assert outcome["metrics"]["train/epoch_loss"] == pytest.approx(metrics["train_loss_epoch"], rel=1e-6)
    if isinstance(ours, Transformer):
        assert ours.hooks == theirs.hooks
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours)).state_dict(), ours.state_dict())


@pytest.mark.parametrize(
    ("shape", "epochs", "most"),
    [(AutoEncoder, 3, 7), (AutoEncoder, 1, 7), (AutoEncoder, None, 7), (Gan, 3, 14), (Gan, None, 14), (Gan, None, 13)],
)
def test_training_ends_with_the_first_of_max_epochs_and_max_steps(
    shape: Callable[[], Recorded], epochs: Any, most: int, tmp_path: Path
) -> None:
    theirs, ours = shape(), shape()
    trainer, _ = by_lightning(theirs, epochs, max_steps=most)
    outcome = fitted(ours, tmp_path, epochs=epochs, max_steps=most)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert ours.trainer.global_step == trainer.global_step
    assert (ours.trainer.max_epochs or -1, ours.trainer.max_steps) == (trainer.max_epochs, trainer.max_steps)
    resumed = fit(ours, Digits(10), max_epochs=epochs, max_steps=most, processes=1, folder=outcome["folder"])
    assert resumed["step"] == outcome["step"]


def test_two_ranks_resume_what_one_began_with_the_numbers_of_one(tmp_path: Path, project: Project) -> None:
    found, metrics = {}, {}
    for shape, options in SHAPES.items():
        whole = fitted(shape(), tmp_path / "whole", **options)
        found[shape.__name__], metrics[shape.__name__] = logged(whole["folder"]), whole["metrics"]
        module = shape()
        module.die_at = 8 // options.get("accumulate_grad_batches", 1)
        with pytest.raises(SystemExit) as ended:
            fitted(module, tmp_path, folder=tmp_path / "one" / shape.__name__, **options)
        assert ended.value.code == 75
        shutil.copytree(tmp_path / "one" / shape.__name__, tmp_path / "two" / shape.__name__)
        fitted(shape(), tmp_path, folder=tmp_path / "one" / shape.__name__, **options)
        assert logged(tmp_path / "one" / shape.__name__) == found[shape.__name__]  # to the bit
    ended = on_two_ranks(project, tmp_path / "two", "ddp")
    assert ended.code == 0, ended.text
    for name, values in found.items():
        assert logged(tmp_path / "two" / name) == pytest.approx(values, rel=1e-5, abs=1e-5)
        assert json.loads((tmp_path / "two" / f"{name}.json").read_text()) == pytest.approx(metrics[name], rel=1e-5)


def on_two_ranks(project: Project, folder: Path, strategy: str) -> Any:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d",
                "--rdzv-endpoint=localhost:0"]  # fmt: skip
    return project.start_python(*torchrun, Path(__file__).with_name("lit_ranks.py"), folder, strategy).wait()


def test_two_ranks_under_fsdp_have_the_numbers_of_one_and_leave_whole_modules(tmp_path: Path, project: Project) -> None:
    ended = on_two_ranks(project, tmp_path, "fsdp")
    assert ended.code == 0, ended.text
    for shape in (AutoEncoder, Classifier, Transformer):
        one, name = shape(), shape.__name__
        whole = fitted(one, tmp_path / "one", **SHAPES[shape])
        assert logged(tmp_path / name) == pytest.approx(logged(whole["folder"]), rel=1e-5, abs=1e-5)
        for rank in (0, 1):
            trained = pickle.loads((tmp_path / f"{name}-{rank}.pickle").read_bytes())
            assert type(trained) is shape and {type(each) for each in trained.parameters()} == {torch.nn.Parameter}
            atol = 1e-3 if shape is Transformer else 1e-5  # the gradient of biases of keys is rounding
            torch.testing.assert_close(trained.state_dict(), one.state_dict(), rtol=1e-5, atol=atol)


class MadeLater(AutoEncoder):
    def configure_model(self) -> None:
        if not isinstance(self.decoder, torch.nn.Sequential):
            self.decoder = torch.nn.Sequential(self.decoder, torch.nn.Linear(6, 6))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_fit_gives_the_caller_what_ranks_have_trained_under_fsdp(processes: int, tmp_path: Path) -> None:
    one, module = MadeLater(), MadeLater()
    fitted(one, tmp_path / "one")
    fitted(module, tmp_path / "split", processes, strategy="fsdp")
    assert type(module) is MadeLater
    for found in (module, pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(found.state_dict(), one.state_dict(), rtol=1e-5, atol=1e-5)
    module(torch.randn(2, 6)).sum().backward()


class Kills(Callback):
    def __init__(self, step: int) -> None:
        self.step, self.steps = step, 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]

    def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
        self.steps += 1
        if self.steps == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_killed_and_resumed(tmp_path: Path) -> None:
    whole = fitted(Classifier(), tmp_path)
    with pytest.raises(lockstep.WorkerFailed, match="SIGKILL"):
        fitted(Classifier(), tmp_path, 2, folder=tmp_path / "parts", callbacks=Kills(8))
    callback = Kills(100)
    outcome = fitted(Classifier(), tmp_path, 1, folder=tmp_path / "parts", callbacks=[callback])
    assert callback.steps == 18  # its state came back
    assert outcome["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)


def test_callbacks_stop_and_keep_as_under_lightning(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [EarlyStopping("val_loss", patience=2, min_delta=0.3), LearningRateMonitor(),
                ModelCheckpoint(monitor="val_loss", save_top_k=1)]  # fmt: skip

    theirs, ours = Classifier(), Classifier()
    stopping = callbacks()[:1]
    by_lightning(theirs, epochs=20, callbacks=stopping)
    given = callbacks()
    outcome = fitted(ours, tmp_path, epochs=20, callbacks=given)
    assert outcome["status"] == "stopped early" and len(ours.losses) == len(theirs.losses) < 120
    assert given[0].best_score == pytest.approx(stopping[0].best_score)
    assert outcome["best"]["metric"] == "val/loss" and Path(given[2].best_model_path).is_dir()


@pytest.mark.parametrize(
    "shape",
    [
        lambda one, plan: one, lambda one, plan: [one], lambda one, plan: ([one], [plan(one)]),
        lambda one, plan: {"optimizer": one, "lr_scheduler": plan(one)},
        lambda one, plan: [{"optimizer": one, "lr_scheduler": {"scheduler": plan(one), "interval": "step"}}],
        lambda one, plan: ([one], [{"scheduler": plan(one), "interval": "step", "frequency": 4}, plan(one)]),
        lambda one, plan: {"optimizer": one, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0,
                           threshold=9.0), "monitor": "train_loss"},
    ],
)  # fmt: skip
def test_every_shape_of_configure_optimizers(shape: Any, tmp_path: Path) -> None:
    class Shaped(AutoEncoder):
        def configure_optimizers(self) -> Any:
            one = torch.optim.SGD(self.parameters(), lr=0.5)
            return shape(one, lambda each: torch.optim.lr_scheduler.ExponentialLR(each, 0.8))

    theirs, ours = Shaped(), Shaped()
    by_lightning(theirs)
    fitted(ours, tmp_path)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)


class Skips(AutoEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Backward(AutoEncoder):
    def backward(self, loss: Any) -> None:
        loss.backward()


class Sums(AutoEncoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("n", 1.0, reduce_fx="sum")


class Asks(AutoEncoder):
    def on_fit_start(self) -> None:
        self.trainer.predict_loop.run()


class Two(AutoEncoder):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.encoder.parameters(), 0.1), torch.optim.SGD(self.decoder.parameters(), 0.1)]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Skips, {}, "training_step returned None.*no batch can be skipped"),
        (Backward, {}, "Backward.backward is not supported"),
        (Sums, {}, r"self.log\('n', reduce_fx='sum'\) is not supported"),
        (Asks, {}, "self.trainer.predict_loop is not supported. There are .*callback_metrics"),
        (AutoEncoder, {"callbacks": StochasticWeightAveraging(0.1)}, "StochasticWeightAveraging is not supported"),
        (AutoEncoder, {"callbacks": ModelCheckpoint(dirpath="x")}, r"ModelCheckpoint\(dirpath\) is not supported"),
        (AutoEncoder, {"limit_val_batches": 2}, "limit_val_batches is not supported"),
        (AutoEncoder, {"precision": "64-true"}, "precision='64-true'"),
        (AutoEncoder, {"epochs": None}, "Give max_epochs or max_steps"),
        (Gan, {"accumulate_grad_batches": 2}, "train.accumulate: with manual optimization"),
        (Gan, {"gradient_clip_val": 1.0}, "call self.clip_gradients"),
        (Gan, {"strategy": "fsdp"}, "strategy: fsdp cannot be used with manual optimization"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    module: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(module(), tmp_path, **options)


def test_several_optimizers_without_manual_optimization_are_refused_by_lightning_itself(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        fitted(Two(), tmp_path)


def test_a_value_of_an_epoch_that_differs_by_rank_is_refused() -> None:
    assert alike("auc", [(0.5, False), (0.5, False)]) == 0.5
    assert alike("auc", [(0.5, True), (0.7, True)]) == pytest.approx(0.6)  # sync_dist
    with pytest.raises(ConfigError, match="different values on different ranks"):
        alike("auc", [(0.5, False), (0.7, False)])


def test_a_config_names_module_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(lit_modules.__file__, tmp_path / "lit_of_config.py")
    monkeypatch.chdir("/")  # files are named as seen from the config
    config = {
        "task": {
            "type": "lockstep.adapters.lightning:Module",
            "module": {"type": "lit_of_config.py:AutoEncoder", "width": 3},
            "data": {"type": "lit_of_config.py:Digits", "batch_size": 10},
        },
        "processes": 1, "runtime": "cpu", "train": {"epochs": 2, "batch_size": 10}, "log": {"every": "1 step"},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = lockstep.train(tmp_path / "config.yaml", out=tmp_path / "runs")
    direct = fitted(AutoEncoder(width=3), tmp_path / "direct", epochs=2)
    assert outcome["metrics"] == pytest.approx(direct["metrics"], rel=1e-5)
    assert list(outcome["folder"].glob("code/*/lit_of_config.py")), "the run keeps the module's code"
    with pytest.raises(ConfigError, match=r"lit_of_config.py:\w+ is an argument of lockstep.adapters.lightning"):
        Code.of(load(tmp_path / "config.yaml"))
    folder = str(outcome["folder"])
    result = CliRunner().invoke(main, ["evaluate", folder, "--data", "val", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["metrics"]
    assert found["val/loss"] == pytest.approx(outcome["metrics"]["val/loss"], rel=1e-5)
    out = str(tmp_path / "found.jsonl")
    result = CliRunner().invoke(main, ["predict", folder, "--input", "predict_dataloader", "--out", out])
    assert result.exit_code == 0, result.output
    assert len([json.loads(line)["prediction"] for line in Path(out).read_text().splitlines()]) == 7


def test_loaders_with_other_collate_functions_and_several_validation_sets(tmp_path: Path) -> None:
    data = Digits(10)
    data.setup("fit")

    def doubled(examples: list[Any]) -> list[torch.Tensor]:
        return [2 * torch.stack([x for x, _ in examples]), torch.tensor([int(y) for _, y in examples])]

    loaders = [DataLoader(data.val, 7), DataLoader(data.test, 4, collate_fn=doubled)]

    class Several(AutoEncoder):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    theirs, ours = Several(), Several()
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(theirs, data.train_dataloader(), loaders)
    outcome = fit(ours, data.train_dataloader(), loaders, max_epochs=1, processes=1, runtime="cpu", out=tmp_path)
    for index in (0, 1):
        expected = float(trainer.callback_metrics[f"val_loss/dataloader_idx_{index}"])
        assert outcome["metrics"][f"val/{index}/loss"] == pytest.approx(expected, rel=1e-6)
        assert float(ours.trainer.callback_metrics[f"val_loss/dataloader_idx_{index}"]) == pytest.approx(expected)
