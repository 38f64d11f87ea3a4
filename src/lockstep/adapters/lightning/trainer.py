"""What a LightningModule finds as `self.trainer`: the members of Lightning's Trainer that modules and callbacks use."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.adapters.lightning.refused import Added, NotSupported, kind_of, of_lightning, overrides, package_of
from lockstep.config.schema import RunConfig
from lockstep.engine.run import Run
from lockstep.engine.stepper import needs_closure
from lockstep.errors import ConfigError
from lockstep.evaluation.means import evaluating

# The hooks in which Lightning takes a logged value for one of a step; in others it is one of an epoch.
_OF_STEPS = {
    "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_before_zero_grad", "optimizer_step", "configure_gradient_clipping",
    "optimizer_zero_grad", "on_after_batch_transfer",
}  # fmt: skip


_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


# Members of Lightning's Trainer that are computed when they are asked for.
_ASKED: dict[str, Callable[[Any], Any]] = {
    "training": lambda self: not (self.validating or self.testing or self.predicting or self.sanity_checking),
    "current_epoch": lambda self: self.run.progress.epoch + self.has_cut_epoch,
    "max_epochs": lambda self: self.config.train.epoch_limit or -1,
    "max_steps": lambda self: self.config.train.steps or -1,
    "is_global_zero": lambda self: self.run.is_main,
    "global_rank": lambda self: self.run.rank,
    "local_rank": lambda self: self.run._engine.topology.place.local_rank,
    "world_size": lambda self: self.run.world_size,
    "num_devices": lambda self: self.run.world_size,
    "accumulate_grad_batches": lambda self: self.config.train.accumulate,
    "train_dataloader": lambda self: self.loader("train_dataloader"),
    "precision": lambda self: self.config.train.precision,
    "check_val_every_n_epoch": lambda self: self._every("epoch", None),
    "val_check_interval": lambda self: self._every("step", 1.0),
    "log_dir": lambda self: str(self.run.folder),
    "default_root_dir": lambda self: str(self.run.folder),
}


@dataclass(frozen=True)
class Logged:
    """A value that a module logged: of the batch, or of a whole epoch."""

    value: Any
    on_step: bool
    on_epoch: bool
    batch_size: int | None
    sync_dist: bool
    add_dataloader_idx: bool


class Trainer:
    """Stands in for Lightning's Trainer. The run is `trainer.run`; what is not here is refused by name."""

    def __init__(self, module: Any, datamodule: Any, callbacks: Sequence[Any], run: Run, config: RunConfig) -> None:
        package = package_of(module)
        self.run, self.config, self.entry = run, config, ""
        self.lightning_module = self.model = module
        self.datamodule, self.callbacks = datamodule, list(callbacks)
        self.strategy = self.precision_plugin = _Strategy(self)
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[Any] = []
        self.gradient_clip_val: float | None = config.train.clip_norm
        self.gradient_clip_algorithm: str | None = None
        self.callback_metrics: dict[str, Tensor] = {}
        self.logged_metrics = self.progress_bar_metrics = self.callback_metrics
        self.logger, self.loggers = None, list[Any]()
        self.should_stop = self.sanity_checking = self.validating = self.testing = self.predicting = False
        states = of_lightning(package, "trainer.states")
        self.state = types.SimpleNamespace(fn=states.TrainerFn.FITTING, stage=states.RunningStage.TRAINING)
        self.fast_dev_run = self.barebones = False
        self.progress_bar_callback = self.ckpt_path = self.min_epochs = None
        self.num_val_batches, self.num_test_batches = list[int | float](), list[int | float]()
        self.estimated_stepping_batches = self.num_training_batches = float("inf")
        self.loads: Any = None  # what has train_dataloader
        self.loader: Any = None  # returns what it and others return
        self.val_dataloaders: Any = None
        self.global_step = 0  # optimizer steps, as Lightning counts them
        self.values: dict[str, Logged] = {}  # logged in the current hook, or batch
        self.hooks: Any = None  # what computes a batch
        self._hook: str | None = None
        self.has_cut_epoch = False  # training has ended within an epoch
        self.stages: list[str] = []  # that setup was called for
        module.trainer = self
        if datamodule is not None:
            datamodule.trainer = self
        module.log = self.log

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _ASKED:
            return _ASKED[name](self)
        there = sorted(each for each in {*vars(self), *dir(type(self)), *_ASKED} if not each.startswith("_"))
        raise NotSupported(f"self.trainer.{name} is not supported. There are {', '.join(there)}")

    def _every(self, unit: str, otherwise: Any) -> Any:
        every = self.config.validation.every
        return every.count if every.unit == unit else otherwise

    # Hooks

    @contextlib.contextmanager
    def within(self, hook: str) -> Iterator[None]:
        before, self._hook = self._hook, hook
        try:
            yield
        finally:
            self._hook = before

    def call(self, hook: str, *arguments: Any, monitoring: bool | None = None) -> Any:
        """Calls a hook of the callbacks, then that of the module; returns what the module's returned. `monitoring`:
        calls only the callbacks that compare metrics, or leaves those out."""
        with self.within(hook):
            for each in self.callbacks:
                if monitoring is None or monitoring == (kind_of(each) == "EarlyStopping"):
                    getattr(each, hook, nothing)(self, self.lightning_module, *arguments)
            return None if monitoring else getattr(self.lightning_module, hook, nothing)(*arguments)

    def call_evaluating(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of validation or test: in evaluation mode, without gradients."""
        with torch.no_grad(), evaluating([self.lightning_module]):
            self.call(hook, *arguments)

    def overridden(self, hook: str) -> bool:
        return any(overrides(each, hook) for each in (self.lightning_module, *self.callbacks))

    def call_step(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> Any:
        """Calls a step of the module with those of the arguments that it takes."""
        placed = name == "training_step" and self.lightning_module.automatic_optimization
        module = self.run.models[self.entry] if placed else self.lightning_module
        parameters = list(inspect.signature(getattr(self.lightning_module, name)).parameters.values())
        takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        given = [batch, batch_idx, *([] if dataloader_idx is None else [dataloader_idx])]
        count = len(given) if takes_any else sum(each.kind is not each.VAR_KEYWORD for each in parameters)
        with self.within(name), self.run.autocast(self.entry):
            return getattr(module, name)(*given[:count])

    # Logging

    def log(
        self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None,
        on_epoch: bool | None = None, reduce_fx: Any = "mean", enable_graph: bool = False, sync_dist: bool = False,
        sync_dist_group: Any = None, add_dataloader_idx: bool = True, batch_size: int | None = None,
        metric_attribute: str | None = None, rank_zero_only: bool = False,
    ) -> None:  # fmt: skip
        """Logs as LightningModule.log does. All is written to metrics.jsonl, and means are over all ranks."""
        if self._hook is None or self._hook == "predict_step":
            raise ConfigError(f"self.log({name!r}) was called in {self._hook or 'no hook of the training'}")
        options = {"reduce_fx": None if reduce_fx in ("mean", torch.mean) else reduce_fx, "enable_graph": enable_graph,
                   "sync_dist_group": sync_dist_group, "rank_zero_only": rank_zero_only}  # fmt: skip
        for option, given in options.items():
            if given:
                raise ConfigError(
                    f"self.log({name!r}, {option}={given!r}) is not supported: values are means over the examples of "
                    "all ranks. Compute anything else in a torchmetrics.Metric and log that"
                )
        by_epoch = self._hook not in _OF_STEPS
        is_metric = not isinstance(value, (Tensor, int, float)) and hasattr(value, "compute")
        if is_metric and not by_epoch:
            if on_epoch or on_step is False:
                raise ConfigError(
                    f"self.log({name!r}) of a {type(value).__name__} with on_epoch is for validation_step and "
                    "test_step: in training_step, log it with on_step, or log value.compute() in on_train_epoch_end"
                )
            value = value._forward_cache
        if not is_metric or not by_epoch:
            value = torch.as_tensor(value).detach()
            if value.numel() != 1:
                raise ConfigError(f"self.log({name!r}): a value is a single number, got shape {list(value.shape)}")
            value = value.reshape(())
        step, epoch = not by_epoch if on_step is None else on_step, by_epoch if on_epoch is None else on_epoch
        if step and not by_epoch:
            for each in [name, f"{name}_step"][: 1 + epoch]:
                self.note(each, value)
        self.values[name] = Logged(value, step, epoch, batch_size, sync_dist, add_dataloader_idx)

    def take(self) -> dict[str, Logged]:
        """Returns what was logged since it was asked last."""
        values, self.values = self.values, {}
        return values

    def note(self, name: str, value: Any) -> None:
        """Shows a metric to callbacks and schedulers."""
        self.callback_metrics[name] = value if isinstance(value, Tensor) else torch.tensor(float(value))

    # Optimizers and schedulers

    def configure(self) -> list[Optimizer]:
        """Calls configure_optimizers and takes what it returned, in any of the documented shapes."""
        module, name = self.lightning_module, type(self.lightning_module).__name__
        shapes = of_lightning(package_of(module), "core.optimizer")
        with self.within("configure_optimizers"):
            returned = module.configure_optimizers()
        if returned is None:
            raise ConfigError(f"task.module: {name}.configure_optimizers returned None: return an optimizer")
        self.optimizers, schedulers, monitor = shapes._configure_optimizers(returned)
        automatic = module.automatic_optimization
        self.lr_scheduler_configs = (
            shapes._configure_schedulers_automatic_opt(schedulers, monitor)
            if automatic else shapes._configure_schedulers_manual_opt(schedulers)
        )  # fmt: skip
        shapes._validate_multiple_optimizers_support(self.optimizers, module)
        shapes._validate_optimizers_attached(self.optimizers, self.lr_scheduler_configs)
        shapes._validate_scheduler_api(self.lr_scheduler_configs, module)
        wrong = [each for each in self.lr_scheduler_configs if each.reduce_on_plateau and each.interval == "step"]
        if wrong and automatic:
            raise ConfigError(
                f"task.module: {name}.configure_optimizers: interval: step with a scheduler that monitors "
                f"{wrong[0].monitor!r} is not supported: use interval: epoch"
            )
        return self.optimizers

    def let_hooks_be(self) -> None:
        """Where a strategy has every method gather parameters (fsdp), leaves that to the steps: not all ranks call the
        same hooks at once."""
        module = self.lightning_module
        for name in [each for each in vars(module) if inspect.isfunction(getattr(type(module), each, None))]:
            if name not in _STEPS:
                del vars(module)[name]
        module.log = self.log

    def start(self) -> None:
        """Training begins: the model is set up, a resumed run is restored."""
        self.let_hooks_be()
        self._wrap_optimizers()
        self.call("on_fit_start")

    def _wrap_optimizers(self) -> None:
        module, run = self.lightning_module, self.run
        wrapper = of_lightning(package_of(module), "core.optimizer").LightningOptimizer
        self.strategy._lightning_optimizers = [wrapper(each) for each in self.optimizers]
        for wrapped, optimizer in zip(self.strategy._lightning_optimizers, self.optimizers, strict=True):
            wrapped._strategy, wrapped.zero_grad = self.strategy, optimizer.zero_grad
        if not module.automatic_optimization:
            run._engine.strategy.compute_on_bare_module(run.models[self.entry])
        hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
        if self.gradient_clip_algorithm == "value" or any(map(self.overridden, hooks)):
            run._engine.stepper.before_step = self._before_step

    def _before_step(self, optimizer: Optimizer) -> None:
        """Gradients are those of the whole batch, and not clipped yet."""
        self.call("on_before_optimizer_step", optimizer)
        clips = overrides(self.lightning_module, "configure_gradient_clipping")
        if self.lightning_module.automatic_optimization and (clips or self.gradient_clip_algorithm == "value"):
            with self.within("configure_gradient_clipping"):
                self.lightning_module.configure_gradient_clipping(
                    optimizer, self.gradient_clip_val, self.gradient_clip_algorithm
                )

    def step_schedulers(self, interval: str, on_plateau: bool, batch_idx: int) -> None:
        """Steps the schedulers whose turn it is, as Lightning counts."""
        if not self.lightning_module.automatic_optimization:
            return
        count = (batch_idx if interval == "step" else self.current_epoch) + 1
        for each in self.lr_scheduler_configs:
            if each.interval != interval or each.reduce_on_plateau != on_plateau or count % each.frequency:
                continue
            value = None
            if on_plateau:
                value = self.callback_metrics.get(each.monitor)
                if value is None and each.strict:
                    there = ", ".join(sorted(self.callback_metrics)) or "none"
                    raise ConfigError(
                        f"configure_optimizers: monitor: there is no metric {each.monitor!r}. Logged are {there}"
                    )
                if value is None:
                    continue
            with self.within("lr_scheduler_step"):
                self.lightning_module.lr_scheduler_step(each.scheduler, value)

    def agreed(self, name: str, logged: Logged, alone: bool = False) -> float:
        """Returns the value of a hook that is called once on every rank: the same everywhere, or with sync_dist the
        mean over ranks. `alone`, this rank decides."""
        value = logged.value.compute() if hasattr(logged.value, "compute") else logged.value
        mine = float(value), logged.sync_dist
        return alike(name, [mine] if alone else self.run.gather(mine, f"the logged {name}"))

    # State

    def state_dict(self) -> dict[str, Any]:
        checkpoint, callbacks = Added(epoch=self.current_epoch, global_step=self.global_step), dict[str, Any]()
        for each in self.callbacks:
            saved: Any = getattr(each, "state_dict", dict)()
            if saved and callbacks.setdefault(each.state_key, saved) is not saved:
                raise ConfigError(f"callbacks: two have the state_key {each.state_key!r}: give each its own")
        self.call("on_save_checkpoint", checkpoint)
        checkpoint.check()
        return {
            "global_step": self.global_step,
            "should_stop": self.should_stop,
            "metrics": {name: each.item() for name, each in self.callback_metrics.items()},
            "schedulers": [each.scheduler.state_dict() for each in self.lr_scheduler_configs],
            "callbacks": callbacks,
            "checkpoint": dict(checkpoint),
            "datamodule": getattr(self.datamodule, "state_dict", dict)(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.global_step, self.should_stop = state["global_step"], state["should_stop"]
        for name, value in state["metrics"].items():
            self.note(name, value)
        for each, saved in zip(self.lr_scheduler_configs, state["schedulers"], strict=True):
            each.scheduler.load_state_dict(saved)
        self.call("on_load_checkpoint", Added(state["checkpoint"]))
        for each in self.callbacks:
            if (saved := state["callbacks"].get(getattr(each, "state_key", None))) is not None:
                each.load_state_dict(saved)
        if state["datamodule"]:
            self.datamodule.load_state_dict(state["datamodule"])


class _Strategy:
    """Stands in for Lightning's strategy, to which modules and callbacks turn for what ranks do together."""

    handles_gradient_accumulation = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._lightning_optimizers: list[Any] = []

    @property
    def lightning_module(self) -> Any:
        return self._trainer.lightning_module

    @property
    def root_device(self) -> torch.device:
        return self._trainer.run.device

    def backward(self, loss: Tensor, optimizer: Any, *arguments: Any, **options: Any) -> None:
        if arguments or options:
            given = ", ".join([*map(repr, arguments), *(f"{name}={value}" for name, value in options.items())])
            raise ConfigError(
                f"self.manual_backward(loss, {given}): Lockstep weighs the loss for the global batch, and takes no "
                "further arguments: add the losses up and call it once"
            )
        self._trainer.call("on_before_backward", loss)
        self._trainer.run.backward(loss)
        self._trainer.call("on_after_backward")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **options: Any) -> Any:
        if options:
            raise ConfigError(f"optimizer.step({', '.join(options)}=...) is not supported: give it the closure alone")
        run, returned = self._trainer.run, None
        if needs_closure(optimizer):
            stepped = run.step(optimizer, closure)
        else:
            returned = closure()
            stepped = run.step(optimizer)
        if not self.lightning_module.automatic_optimization:
            self._trainer.global_step += stepped
        return returned

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        run = self._trainer.run
        return not run.any(not decision) if all else run.any(bool(decision))

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self._trainer.run.gather(value, "a broadcast")[src]

    def barrier(self, name: str | None = None) -> None:
        self._trainer.run.barrier(name or "a barrier of the module")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        trainer = self._trainer
        if trainer.world_size == 1:
            return tensor
        if trainer._hook in ("validation_step", "test_step"):
            raise ConfigError(
                f"self.all_gather in {trainer._hook}: ranks may have different numbers of batches to measure. Keep "
                "what you need, and gather in on_validation_epoch_end or on_test_epoch_end"
            )
        found = trainer.run.all_gather(tensor[None])
        return found if sync_grads else found.detach()

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clips the gradients of the whole batch."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if not clip_val:
            return
        self._trainer.run.gradients(optimizer)
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            self._trainer.run._engine.strategy.clip_gradients(parameters, clip_val)


def alike(name: str, found: Sequence[tuple[float, bool]]) -> float:
    """Returns what all ranks logged under a name; refused where they differ, and no mean over ranks was asked for."""
    values = [value for value, _ in found]
    if any(abs(each - values[0]) > 1e-6 * max(1.0, abs(values[0])) for each in values) and not found[0][1]:
        raise ConfigError(
            f"self.log({name!r}) at the end of an epoch has different values on different ranks ({values[0]:.6g}, "
            f"{next(each for each in values if each != values[0]):.6g}): each rank has seen a part of the data. Log a "
            "torchmetrics.Metric in the step, gather with self.all_gather first, or log with sync_dist=True for the "
            "mean over ranks"
        )
    return sum(values) / len(values)


def short_name(name: str, kind: str) -> str:
    """Returns what a logged value is called in Lockstep, after the kind of data: `val_loss` is val/loss."""
    starts = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}[kind]
    found = next((name[len(each) + 1 :] for each in starts if name.startswith((f"{each}_", f"{each}/"))), name)
    return found or name


def transferred(trainer: Trainer, batch: Any, dataloader_idx: int = 0) -> Any:
    """Calls on_after_batch_transfer of the data, or else of the module."""
    hook, data = "on_after_batch_transfer", trainer.datamodule
    owner = data if data is not None and overrides(data, hook) else trainer.lightning_module
    with trainer.within(hook):
        return owner.on_after_batch_transfer(batch, dataloader_idx)


def nothing(*arguments: Any) -> None:
    return None
