"""Computes the batches of a LightningModule, and calls the hooks of training in Lightning's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.adapters.lightning.refused import overrides
from lockstep.adapters.lightning.sets import Sets
from lockstep.adapters.lightning.trainer import Trainer, alike, nothing, short_name, transferred
from lockstep.checkpoint import codec
from lockstep.engine.run import Run
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean
from lockstep.record.meters import Totals
from lockstep.tasks.callbacks import Callback


class Monitored:
    """The metric that a ModelCheckpoint compares, by the name under which the module logs it."""

    def __init__(self, name: str, mode: str, trainer: Trainer, sets: Sets) -> None:
        self._name, self._sign, self._trainer, self._sets = name, 1 if mode == "min" else -1, trainer, sets
        self.best: dict[str, Any] | None = None

    def __call__(self, measured: bool) -> float | None:
        name, metrics, run = self._name, self._trainer.callback_metrics, self._trainer.run
        if name not in metrics and measured and run.progress.epochs_done:
            there = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(f"ModelCheckpoint(monitor={name!r}): there is no such metric. Logged are {there}")
        if name not in metrics or (name in self._sets.shown and not measured):
            return None
        value = run.agree(float(metrics[name]), f"the monitored {name}")
        if self.best is None or self._sign * value < self._sign * self.best["value"]:
            metric = self._sets.shown.get(name, name)
            self.best = {"metric": metric, "value": value, "step": run.progress.step}
        return value


class Hooks(Callback):
    """Calls the hooks of training, and computes a batch."""

    def __init__(self, trainer: Trainer, sets: Sets, monitored: Monitored | None) -> None:
        self._trainer, self._sets, self._monitored = trainer, sets, monitored
        self._micro = 0  # micro-batches of the current step so far
        self._is_within_epoch = False
        self._epoch_of: set[str] = set()  # names that were logged in training_step with on_epoch
        self._by_step: set[str] = set()
        self._since_epoch = trainer.run._engine.aggregator.since_epoch = Totals()
        trainer.hooks = self

    def before_training(self, run: Run) -> None:
        trainer = self._trainer
        codec.pack(self.state_dict())  # refuses what cannot be saved
        trainer.call("on_train_start")
        self._end_at_max_steps(run)

    def train(self, batch: Any) -> dict[str, Any]:
        """Computes a micro-batch, and steps where it completes the batch. Returns what was logged."""
        trainer, run = self._trainer, self._trainer.run
        batch_idx = run.progress.batch * trainer.accumulate_grad_batches + self._micro
        if batch_idx == 0:
            trainer.call("on_train_epoch_start")
        batch, complete = transferred(trainer, batch), run.completes_batch
        if trainer.call("on_train_batch_start", batch, batch_idx) == -1:
            raise ConfigError("on_train_batch_start returned -1, to skip the rest of an epoch: that is not supported")
        automatic = trainer.lightning_module.automatic_optimization
        if automatic:
            out = self._automatic(batch, batch_idx, complete)
        else:
            out = _detached(trainer.call_step("training_step", batch, batch_idx))
        self._micro = 0 if complete else self._micro + 1
        if complete:
            trainer.step_schedulers("step", False, batch_idx)
            if run.progress.epoch_ended:
                trainer.step_schedulers("epoch", False, batch_idx)
        self._is_within_epoch = not (complete and run.progress.epoch_ended)
        shown = {**out, "loss": out["loss"] / trainer.accumulate_grad_batches} if automatic else out  # as in Lightning
        trainer.call("on_train_batch_end", shown, batch, batch_idx)
        return self._logged(out if automatic else {})

    def _automatic(self, batch: Any, batch_idx: int, complete: bool) -> Any:
        trainer, optimizer = self._trainer, self._trainer.optimizers[0]
        module, found = trainer.lightning_module, list[Any]()

        def closure() -> Tensor:
            returned = trainer.call_step("training_step", batch, batch_idx)
            loss = returned.get("loss") if isinstance(returned, Mapping) else returned
            if not isinstance(loss, Tensor):
                raise ConfigError(
                    f"{type(module).__name__}.training_step returned {'None' if returned is None else repr(returned)}: "
                    "return the loss, or a mapping with 'loss'; no batch can be skipped"
                )
            if not self._micro:
                trainer.call("on_before_zero_grad", optimizer)
                if overrides(module, "optimizer_zero_grad"):
                    module.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
            trainer.strategy.backward(loss, optimizer)
            found.append(_detached(returned))
            return loss.detach()

        if complete:
            before = trainer.run.progress.step
            with trainer.within("optimizer_step"):
                wrapped = trainer.strategy._lightning_optimizers[0]
                module.optimizer_step(trainer.current_epoch, batch_idx, wrapped, closure)
            trainer.global_step += trainer.run.progress.step - before
        else:
            trainer.strategy.optimizer_step(optimizer, closure)
        if not found:
            raise ConfigError(
                f"{type(module).__name__}.optimizer_step did not call the closure, which computes the loss"
            )
        return found[-1] if isinstance(found[-1], Mapping) else {"loss": found[-1]}

    def _logged(self, out: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"train/loss": out["loss"]} if "loss" in out else {}
        trainer, whole = self._trainer, dict[str, str]()
        for name, logged in trainer.take().items():
            for names in [self._epoch_of] * logged.on_epoch + [self._by_step] * logged.on_step:
                names.add(name)
            short = short_name(name, "train")
            if whole.setdefault(short, name) != name:
                raise ConfigError(f"self.log: {name!r} and {whole[short]!r} are both train/{short}: rename one of them")
            size = logged.batch_size
            found[f"train/{short}"] = logged.value if size is None else Mean(logged.value.double() * size, float(size))
        return found

    def after_validation(self, run: Run, metrics: dict[str, Any]) -> str | None:
        trainer = self._trainer
        self._sets.show(metrics)
        if any(each.startswith("val/") for each in metrics):
            trainer.validating = True
            trainer.call_evaluating("on_validation_end")
            trainer.validating = False
        return self._stop()

    def after_epoch(self, run: Run) -> str | None:
        trainer = self._trainer
        for each in sorted(self._by_step):  # of the last batch: the same on all ranks
            name = f"{each}_step" if each in self._epoch_of else each
            given = run.gather((float(trainer.callback_metrics[name]), True), f"the logged {name}")
            if run.world_size > 1:
                trainer.note(name, alike(name, given))
        run._engine.aggregator.bring_together(run.progress)
        means = self._since_epoch.take()
        for name in sorted(self._epoch_of):
            if (value := means.get(f"train/{short_name(name, 'train')}")) is not None:
                for each in [name, f"{name}_epoch"][: 1 + (name in self._by_step)]:
                    trainer.note(each, value)
        trainer.call("on_train_epoch_end", monitoring=False)
        logged = {name: trainer.agreed(name, each) for name, each in trainer.take().items()}
        for name, value in logged.items():
            trainer.note(name, value)
        if logged:
            run.log(**{f"train/{short_name(name, 'train')}": value for name, value in logged.items()})
        trainer.call("on_train_epoch_end", monitoring=True)
        if not self._is_within_epoch:
            trainer.step_schedulers("epoch", True, 0)
        return self._stop()

    def leave_epoch(self, run: Run) -> None:
        """Ends the epoch within which training has ended, as Lightning does."""
        if self._is_within_epoch:
            self.after_epoch(run)
            self._trainer.has_cut_epoch = True

    def _stop(self) -> str | None:
        return "self.trainer.should_stop was set" if self._trainer.should_stop else None

    def after_step(self, run: Run) -> None:
        if self._trainer.should_stop:
            run.stop("self.trainer.should_stop was set")
        self._end_at_max_steps(run)

    def _end_at_max_steps(self, run: Run) -> None:
        """Ends training where as many steps are done as Lightning counts, those of all optimizers: on every rank."""
        most = vars(self._trainer).get("max_steps", -1)
        if 0 < most <= self._trainer.global_step and not self._trainer.config.train.is_done(run.progress.step, 0):
            run._engine.stopped = run._engine.stopped or f"max_steps={most}"

    def after_training(self, run: Run, metrics: dict[str, Any]) -> None:
        for hook in ("on_train_end", "on_fit_end"):
            self._trainer.call(hook)
        for stage in self._trainer.stages:
            getattr(self._trainer.datamodule, "teardown", nothing)(stage)
            self._trainer.call("teardown", stage)

    def after_exception(self, run: Run, error: Exception) -> None:
        self._trainer.call("on_exception", error)

    def state_dict(self) -> dict[str, Any]:
        names = {"epoch_of": sorted(self._epoch_of), "by_step": sorted(self._by_step)}
        best = self._monitored.best if self._monitored is not None else None
        return {**self._trainer.state_dict(), "names": names, "since_epoch": self._since_epoch.sums, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.load_state_dict(state)
        self._epoch_of, self._by_step = set(state["names"]["epoch_of"]), set(state["names"]["by_step"])
        self._since_epoch.sums = state["since_epoch"]
        if self._monitored is not None:
            self._monitored.best = state["best"]


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return {name: _detached(each) for name, each in value.items()} if isinstance(value, Mapping) else value
