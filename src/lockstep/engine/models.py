"""The models of a run and their optimizers, in training and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.engine.ema import Average
from lockstep.engine.gradients import GradientTracker
from lockstep.engine.loop_checks import check_hooks
from lockstep.engine.weights import Frozen, refuse_other
from lockstep.errors import ConfigError
from lockstep.strategy.base import Strategy
from lockstep.strategy.fingerprint import fingerprint
from lockstep.strategy.optimizer_step import with_own_kernels
from lockstep.strategy.slices import read_like

DEFAULT = "model"


MATCH = "match"  # the key under which a group of an optimizer keeps the patterns that it was made by


@dataclass(frozen=True)
class Entry:
    """One model that went through setup."""

    name: str
    module: nn.Module  # bare: what is evaluated and saved
    model: nn.Module  # what to call in training
    optimizer: Optimizer | None
    precision: str
    clip_norm: float | None
    skip_nan: bool
    average: Average | None = None
    frozen: Frozen | None = None  # where its frozen weights are left out of checkpoints


# What an optimizer steps: its model, itself, and all of its parameters.
Stepped = tuple[Entry, Optimizer, list[nn.Parameter]]


class Models:
    """The models of a run by name, in the order of their setup."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.entries: dict[str, Entry] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.gradients = GradientTracker(by_leaf=strategy.leaves is not None)
        self._known: set[int] = set()  # the parameters of all modules, by identity
        # Of models whose frozen weights are left out: fingerprints of these, and which of them have changed since.
        self._as_placed: dict[str, list[int]] = {}
        self._moved: set[str] = set()
        # By optimizer: its model, its parameters, and in how many groups they were, all of them known.
        self._checked: dict[int, tuple[Entry, list[nn.Parameter], int]] = {}

    def add(self, entry: Entry) -> None:
        self.entries[entry.name] = entry
        for earlier in self.optimizers.values():  # which may step this model, too
            self._strategy.place_optimizer(earlier)
        if entry.optimizer is not None:
            self.optimizers[entry.name] = entry.optimizer
            self.gradients.watch(entry.name, entry.optimizer, self._strategy.drop_unreduced)
        self._known.update(id(each) for each in entry.module.parameters())
        if entry.frozen is not None:
            self._as_placed[entry.name] = self._fingerprint(entry)

    def free_name(self, name: str | None) -> str:
        """Returns the name for a model: as asked for, else `model`, `model2` and so on."""
        chosen = name or (DEFAULT if not self.entries else f"{DEFAULT}{len(self.entries) + 1}")
        if chosen in self.entries:
            raise ConfigError(
                f"run.setup: there is a model named {chosen!r} already: give each another name (name=...)"
            )
        if "." in chosen:
            raise ConfigError(f"run.setup: name={chosen!r} has a dot, which stands between a model and its parameters")
        return chosen

    def _fingerprint(self, entry: Entry) -> list[int]:
        """Returns numbers that change with this rank's part of the frozen weights."""
        frozen = entry.frozen.names if entry.frozen is not None else frozenset()
        checked = self._strategy.parameters_to_check({entry.name: entry.module})
        return fingerprint({name: each for name, each in checked.items() if name in frozen})

    def moved(self) -> list[str]:
        """Returns the models whose frozen weights are no longer what they were: a teacher that follows its student, a
        layer that is trained by now. Checkpoints have them whole from then on."""
        frozen = [each for each in self.entries.values() if each.frozen is not None and each.name not in self._moved]
        return [each.name for each in frozen if self._fingerprint(each) != self._as_placed[each.name]]

    def note_moved(self, names: Iterable[str]) -> None:
        """Takes what any of the ranks found."""
        self._moved.update(names)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name: each.module for name, each in self.entries.items()}

    @property
    def averages(self) -> list[Average]:
        return [each.average for each in self.entries.values() if each.average is not None]

    @property
    def averages_were_saved(self) -> bool:
        """Whether the weights that were loaded came with averages, of every model that has one."""
        return bool(self.averages) and all(each.was_saved for each in self.averages)

    def require_any(self) -> None:
        if not self.entries:
            raise ConfigError("this needs a model: call run.setup(model, optimizer) first")

    def require_own_weights(self) -> None:
        self.require_any()
        if any(each.is_in_place for each in self.averages):
            raise ConfigError(
                "run.checkpoint: comes inside of run.averaged_weights, where the model has averages for weights: a "
                "resumed run would train on from them. Call it after the block"
            )

    def only(self) -> Entry:
        self.require_any()
        trained = [each for each in self.entries.values() if each.optimizer is not None]
        if len(trained) == 1:
            return trained[0]
        if len(self.entries) > 1:
            raise ConfigError(
                f"this run trains several models ({', '.join(self.entries)}): name the one that is meant, as in "
                "run.models[name], run.modules[name] or run.step(optimizer)"
            )
        return next(iter(self.entries.values()))

    def gradients_of(self, stepped: Stepped) -> dict[str, Tensor]:
        entry, _, parameters = stepped
        names = self._parameter_names(entry.name)
        return {names[id(each)]: each.grad for each in parameters if each.grad is not None}

    def averages_of(self, stepped: Stepped) -> list[Average]:
        """Returns the averages that a step moves: of its model, and of models that only this optimizer steps."""
        entry, _, parameters = stepped
        if len(self.entries) == 1:
            return self.averages
        mine = set(map(id, parameters))
        return [
            each.average
            for each in self.entries.values()
            if each.average is not None
            and (each is entry or (each.optimizer is None and any(id(one) in mine for one in each.module.parameters())))
        ]

    def precision_of(self, name: str | None) -> str:
        """Returns the precision of a model, or of the first."""
        if name is not None and name not in self.entries:
            raise ConfigError(f"run.autocast: there is no model {name!r}, only {', '.join(self.entries) or 'none'}")
        chosen = self.entries[name] if name is not None else next(iter(self.entries.values()), None)
        return chosen.precision if chosen is not None else "float32"

    def stepped_by(self, optimizer: Optimizer | None) -> Stepped:
        """Returns what an optimizer steps; without one, that of the only model."""
        if optimizer is None:
            optimizer = self.only().optimizer
        if optimizer is None:
            raise ConfigError("run.step needs an optimizer: give run.setup(model, optimizer) both")
        known = self._checked.get(id(optimizer))
        if known is None or known[2] != len(optimizer.param_groups):
            known = self._checked[id(optimizer)] = self._check(optimizer)
        return known[0], optimizer, known[1]

    def _check(self, optimizer: Optimizer) -> tuple[Entry, list[nn.Parameter], int]:
        entry = self._of(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(each) not in self._known for each in parameters)
        if strange:
            raise ConfigError(
                f"run.step: {strange} of the {len(parameters)} parameters of this optimizer belong to no model "
                "that went through run.setup: replicas would drift apart, and nothing of them would be saved. "
                "Call run.setup for every model"
            )
        self._strategy.reshard()
        names = self._parameter_names(entry.name)
        is_split = self._strategy.keeps_slices
        if is_split:
            from torch.distributed.fsdp import FSDPModule

            is_split = any(isinstance(each, FSDPModule) for each in entry.module.modules())
        check_hooks({names[id(each)]: each for each in parameters}, self._strategy, is_split)
        return entry, parameters, len(optimizer.param_groups)

    def _of(self, optimizer: Optimizer) -> Entry:
        for entry in self.entries.values():
            if entry.optimizer is optimizer:
                return entry
        raise ConfigError(
            "run.step was given an optimizer that run.setup does not know: its model may differ from rank to rank, and "
            "nothing of it would be saved. Give run.setup(model, optimizer) both"
        )

    def hyperparameters(self) -> dict[str, Any]:
        """Returns what can be changed of the optimizers between two steps."""
        return {
            name: [{key: value for key, value in group.items() if key != "params"} for group in each.param_groups]
            for name, each in self.optimizers.items()
        }

    # What a checkpoint holds of them. One model is saved under the bare names of its parameters.

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the weights, and the rest of what a checkpoint holds of models."""
        self.require_any()
        states = {name: self._strategy.state_dict(each) for name, each in self.modules.items()}
        frozen = {
            name: each.frozen
            for name, each in self.entries.items()
            if each.frozen is not None and name not in self._moved
        }
        named = {
            self._saved_name(model, key): value
            for model, each in states.items()
            for key, value in each.items()
            if model not in frozen or key not in frozen[model].names
        }
        weights = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        optimizers = {name: self._optimizer_state(name, each) for name, each in self.optimizers.items()}
        for name, waiting in self.gradients.to_save().items():
            names = self._parameter_names(name)
            waiting["values"] = {
                names[id(each)]: each.grad
                for group in self.optimizers[name].param_groups
                for each in group["params"]
                if each.grad is not None and waiting["used"]
            }
            optimizers[name]["gradients"] = waiting
        averages = {name: each.average.state() for name, each in self.entries.items() if each.average is not None}
        return weights, {
            **({"averages": averages} if averages else {}),
            "model_extra": {key: value for key, value in named.items() if key not in weights},
            "models": list(self.entries),
            "optimizers": optimizers,
            **({"frozen": {name: each.digest for name, each in frozen.items()}} if frozen else {}),
        }

    def load(self, weights: Mapping[str, Any], state: Mapping[str, Any], source: str) -> None:
        saved = state["models"]
        if saved != list(self.entries):
            raise ConfigError(
                f"{source}: holds the models {', '.join(saved)}, but run.setup was called for "
                f"{', '.join(self.entries)}. Set up the same models under the same names, all of them before "
                "run.restore"
            )
        named = {**weights, **state["model_extra"]}
        without_frozen = state.get("frozen") or {}
        for name, module in self.modules.items():
            prefix = self._saved_name(name, "")
            mine = {key.removeprefix(prefix): each for key, each in named.items() if key.startswith(prefix)}
            if name in without_frozen:
                refuse_other(source, name, without_frozen[name], self.entries[name].frozen)
                self._require_trained(name, mine, source)
            try:
                self._strategy.load_state_dict(module, mine, strict=name not in without_frozen)
            except RuntimeError as error:
                raise ConfigError(
                    f"{source}: the saved weights do not fit this model: {error}. "
                    "Resume with the task that the run was started with, or start a new run"
                ) from None
        optimizers = state.get("optimizers", {})
        for name, optimizer in self.optimizers.items():
            if name in optimizers:
                self._load_optimizer(name, optimizer, optimizers[name], source)
                if "gradients" in optimizers[name]:
                    self._load_gradients(name, optimizer, optimizers[name]["gradients"])
        averages = state.get("averages", {})
        for name, entry in self.entries.items():
            if entry.average is not None:
                entry.average.load(averages.get(name), source)
        self._strategy.restored(self.modules, list(self.optimizers.values()))

    def _optimizer_state(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        state = by_name(self._strategy.optimizer_state_dict(optimizer), optimizer, self._parameter_names(name))
        inner = {key: self._optimizer_state(name, each) for key, each in _inner(optimizer).items()}
        return {**state, "class": type(optimizer).__name__, **({"inner": inner} if inner else {})}

    def _load_optimizer(self, name: str, optimizer: Optimizer, saved: Mapping[str, Any], source: str) -> None:
        if saved["class"] != type(optimizer).__name__:
            raise ConfigError(
                f"{source}: the saved state is that of {saved['class']}, and the optimizer of {name!r} is "
                f"{type(optimizer).__name__} now: resume with the same, or start a new run with init_from"
            )
        state = {key: each for key, each in saved.items() if key not in ("class", "inner", "gradients")}
        state = by_number(state, optimizer, self._parameter_names(name), source)
        inner = _inner(optimizer)
        sharing = [each for each in inner.values() if each.param_groups is optimizer.param_groups]
        self._strategy.load_optimizer_state_dict(optimizer, with_own_kernels(optimizer, state))
        for key, each in inner.items():
            self._load_optimizer(name, each, saved["inner"][key], source)
        for each in sharing:  # a schedule that changes the rate of one changes that of both
            each.param_groups = optimizer.param_groups

    def _require_trained(self, name: str, saved: Mapping[str, Any], source: str) -> None:
        frozen = self.entries[name].frozen
        trained = set(self._strategy.state_dict(self.modules[name])) - (frozen.names if frozen else set())
        if wrong := sorted(trained ^ set(saved)):
            raise ConfigError(
                f"{source}: the saved weights do not fit this model: {wrong[0]!r} is "
                f"{'not there' if wrong[0] in trained else 'not trained here'}"
                f"{f', nor are {len(wrong) - 1} others as they were' if len(wrong) > 1 else ''}. Resume with the task "
                "that the run was started with, or start a new run"
            )

    def _load_gradients(self, name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        names = self._parameter_names(name)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if names[id(parameter)] in saved["values"]:
                value = read_like(saved["values"][names[id(parameter)]], parameter)
                parameter.grad = value.to(parameter.device, parameter.dtype)
        self.gradients.restore(name, saved)

    def _parameter_names(self, model: str) -> dict[int, str]:
        """Returns names by identity; of other models, which its optimizer may step too, with the model's name."""
        others = {
            id(each): f"{name}: {key}"
            for name, module in self.modules.items()
            if name != model
            for key, each in module.named_parameters()
        }
        return others | {id(each): key for key, each in self.modules[model].named_parameters()}

    def _saved_name(self, model: str, key: str) -> str:
        return key if len(self.entries) == 1 else f"{model}.{key}"


def _inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Returns the optimizers that one keeps as attributes, with states that its own state_dict leaves out (SAM)."""
    if type(optimizer).state_dict is not Optimizer.state_dict:
        return {}
    kept = {key: each for key, each in vars(optimizer).items() if isinstance(each, Optimizer)}
    return {key: each for key, each in kept.items() if each.state is not optimizer.state}


Names = Mapping[int, str]  # by the identity of a parameter

_PARTS = {"state", "param_groups"}


def by_name(state: Mapping[str, Any], optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Returns what `optimizer.state_dict()` returned, with names in place of numbers."""
    if not state.keys() >= _PARTS:  # a class that keeps its state in its own way
        return dict(state)
    groups = [
        {**saved, "params": [names.get(id(each), f"parameter {number}") for number, each in
                             zip(saved["params"], group["params"], strict=True)]}
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]  # fmt: skip
    named = _numbers(state["param_groups"], groups)
    return {
        **state,
        "state": {named.get(number, number): each for number, each in state["state"].items()},
        "param_groups": groups,
    }


def by_number(state: Mapping[str, Any], optimizer: Optimizer, names: Names, source: str) -> dict[str, Any]:
    """Returns a saved state with the numbers that parameters have in this optimizer."""
    if not state.keys() >= _PARTS:
        return dict(state)
    groups = []
    own = by_name(optimizer.state_dict(), optimizer, names)["param_groups"]
    left = list(state["param_groups"])
    number = 0
    for group in own:
        saved = next((each for each in left if set(each["params"]) == set(group["params"])), None)
        if saved is None:
            raise _other_parameters(state["param_groups"], own, source)
        left.remove(saved)
        groups.append({**saved, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    if left:
        raise _other_parameters(state["param_groups"], own, source)
    numbers = {name: number for number, name in _numbers(groups, own).items()}
    return {
        **state,
        "state": {numbers.get(name, name): each for name, each in state["state"].items()},
        "param_groups": groups,
    }


def _numbers(numbered: list[dict[str, Any]], named: list[dict[str, Any]]) -> dict[int, str]:
    return {
        number: name
        for group, names in zip(numbered, named, strict=True)
        for number, name in zip(group["params"], names["params"], strict=True)
    }


def _other_parameters(saved: list[dict[str, Any]], own: list[dict[str, Any]], source: str) -> ConfigError:
    before = {name: index for index, group in enumerate(saved) for name in group["params"]}
    now = {name: index for index, group in enumerate(own) for name in group["params"]}
    missing, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
    if missing or gone:
        name = (missing or gone)[0]
        what = f"{name!r} is {'not in it' if missing else 'no longer trained'}"
    else:
        what = "the parameters are in other groups"
    return ConfigError(
        f"{source}: the saved state of the optimizer does not fit: {what}. Resume with the parameters and groups that "
        "the run was started with, or start a new run with init_from"
    )
