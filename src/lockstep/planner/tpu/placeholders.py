"""A run on placeholders: its runtime, its strategies and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import strategy as strategies
from lockstep.config.load import check_strategy
from lockstep.config.schema import RunConfig, RunSettings
from lockstep.config.strategy import Strategy as StrategySettings
from lockstep.distributed.group import Group
from lockstep.engine.run import Run
from lockstep.planner.ledger import NotTraced
from lockstep.planner.step import FakeGroup
from lockstep.planner.tpu.trace import REPLICATED, words
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import map_tensors
from lockstep.runtime.xla import XlaRuntime
from lockstep.strategy import mesh as meshing
from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Parameters
from lockstep.strategy.spmd import SpmdStrategy
from lockstep.strategy.xla_ddp import XlaDdpStrategy
from lockstep.tasks.loop import step_of


@dataclass
class Known:
    kind: str
    sharding: str
    shape: list[int]
    dtype: str
    number: int  # that torch_xla has for it


class Register:
    """Every placeholder, by torch_xla's number.

    A placeholder takes no memory; torch_xla records what is computed from it.
    """

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_builder as builder

        self._xla, self._builder = torch_xla._XLAC, builder
        self.known: dict[int, Known] = {}
        self.last = -1  # the number of the one that was made last

    def new(self, shape: Any, dtype: torch.dtype, kind: str, sharding: str = REPLICATED) -> Tensor:
        # A TPU has no integers of 64 bits, and libtpu 0.0.21 ends in a crash where an embedding is given such.
        narrow = torch.int32 if dtype == torch.int64 else torch.float32 if dtype == torch.float64 else dtype
        base: Tensor = self._builder.create_placeholder_tensor(list(shape), narrow)
        base.clone()  # from here on it is an argument, and all that is made of it has its number
        number = int(self._xla._xla_get_tensor_id(base))  # asked now: what is written to gets another
        self.known[number] = Known(kind, sharding, list(shape), str(narrow).removeprefix("torch."), number)
        self.last = number
        return base if base.dtype == dtype else base.to(dtype)


def swap(model: nn.Module, make: Any) -> list[tuple[Tensor, Tensor]]:
    """Replaces all parameters and buffers with placeholders, keeping shared ones shared. Returns the replaced pairs."""
    instead: dict[int, Tensor] = {}
    replaced: list[tuple[Tensor, Tensor]] = []
    for prefix, module in model.named_modules():
        for own, buffers in ((module._parameters, False), (module._buffers, True)):
            for name, value in list(own.items()):
                if value is None:
                    continue
                if id(value) not in instead:
                    made = make(f"{prefix}.{name}" if prefix else name, value)
                    if not buffers:
                        made = nn.Parameter(made, requires_grad=value.requires_grad)
                        replaced.append((value, made))
                    instead[id(value)] = made
                own[name] = instead[id(value)]
    return replaced


_TIMEOUT = 600.0


class PlaceholderRuntime(XlaRuntime):
    """PJRT's CPU with the device count of a slice. Nothing runs on it."""

    def __init__(self, settings: RunSettings, devices: int, register: Register) -> None:
        super().__init__(0, 1, settings)
        self._devices, self._register = devices, register
        self.at_end_of_program: Callable[[], None] = lambda: None
        if self.spmd:
            # xs.Mesh asserts that this process has every device of the mesh; what it notes does not need them.
            self._xr.global_runtime_device_count = lambda: devices

    def global_device_count(self) -> int:
        return self._devices

    @property
    def spans_processes(self) -> bool:
        return not self.spmd and self._devices > 1

    def end_of_program(self, device: torch.device | None = None) -> None:
        self.at_end_of_program()
        # Every exchange waits for the one before it, which here is that of another program.
        self._xla._XLAC._set_all_reduce_token(str(self.device), None)

    def move(self, batch: Any) -> Any:
        return map_tensors(self._sent, batch)

    def _sent(self, tensor: Tensor) -> Tensor:
        return self._register.new(tensor.shape, tensor.dtype, "batch")

    def broadcast(self, tensors: list[Tensor]) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> Any:
        import torch_xla.core.xla_model as xm

        tensor.copy_(xm.all_reduce(xm.REDUCE_SUM, tensor))

    def to_host(self, tensors: list[Tensor]) -> list[Tensor]:
        raise NotTraced("the step reads a value back from the device")

    def compilations(self) -> int | None:
        return None


class _PlaceholderStrategy(Strategy):
    """Makes a strategy build models without memory and place placeholders."""

    register: Register
    shardings: dict[int, str]  # by the identity of the parameter

    def build(self, make: Callable[[], Any]) -> Any:
        try:
            with torch.device("meta"):
                return make()
        except (RuntimeError, NotImplementedError):  # it reads a value on its way: then as a run would make it
            return make()

    def fill(self, model: nn.Module, seed: int, init_weights: Any) -> None:
        pass

    def place(self, model: nn.Module) -> nn.Module:
        found = self.split({name: tuple(each.shape) for name, each in model.named_parameters()})
        self.shardings = getattr(self, "shardings", {})

        def make(name: str, value: Tensor) -> Tensor:
            return self.register.new(value.shape, value.dtype, "weights", found.get(name, REPLICATED))

        names = {id(each): name for name, each in model.named_parameters()}
        replaced = swap(model, make)
        for before, after in replaced:
            self.shardings[id(after)] = found.get(names[id(before)], REPLICATED)
        self._replaced += replaced  # type: ignore[arg-type]
        return model

    def split(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        return {}

    def gradients_are_finite(self, parameters: Parameters) -> bool:
        return True


class PlaceholderSpmd(_PlaceholderStrategy, SpmdStrategy):
    def split(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        found = meshing.shardings(shapes, self._shapes, self._settings, self._rules)
        return {name: words(each.spec, self._shapes[each.mesh]) for name, each in found.items()}

    def _sent(self, tensor: Tensor) -> Tensor:
        main = self._shapes[meshing.MAIN]
        sharding = words(meshing.batch_spec(tensor.dim(), main), main) if tensor.dim() else REPLICATED
        return self.register.new(tensor.shape, tensor.dtype, "batch", sharding)

    @property
    def shape(self) -> dict[str, int]:
        return dict(self._shapes[meshing.MAIN])


class PlaceholderDdp(_PlaceholderStrategy, XlaDdpStrategy):
    pass


@contextlib.contextmanager
def world(size: int, register: Register) -> Iterator[FakeGroup]:
    really = strategies.create

    def create(
        settings: StrategySettings, runtime: Runtime, group: Group, leaves: int | None = None, seed: int = 0
    ) -> Strategy:
        assert isinstance(runtime, XlaRuntime)
        check_strategy(settings, runtime.name, group.world_size)
        made: _PlaceholderStrategy
        if settings.has_mesh:
            made = PlaceholderSpmd(runtime, settings, group.world_size)
        elif group.world_size > 1:
            made = PlaceholderDdp(runtime, settings, group.world_size)
        else:
            made = _PlaceholderStrategy(runtime)
        made.register = register
        return made

    strategies.create = create
    try:
        yield FakeGroup(0, size, _TIMEOUT)
    finally:
        strategies.create = really


class State:
    """The state that a run keeps from step to step, as placeholders at the beginning of a step."""

    def __init__(self, run: Run, register: Register) -> None:
        self._run, self._register = run, register
        self._held: list[tuple[Tensor, int, int]] = []  # with its version, and the number of its placeholder

    def parameters(self) -> dict[str, Tensor]:
        return {name: each for module in self._run.modules.values() for name, each in module.named_parameters()}

    def mesh(self) -> dict[str, int]:
        assert isinstance(self._run._engine.strategy, PlaceholderSpmd)
        return self._run._engine.strategy.shape

    def _sharding(self, parameter: Tensor) -> str:
        assert isinstance(self._run._engine.strategy, _PlaceholderStrategy)
        return self._run._engine.strategy.shardings.get(id(parameter), REPLICATED)

    def _new(self, like: Tensor, kind: str, sharding: str) -> Tensor:
        return self._register.new(like.shape, like.dtype, kind, sharding)

    def renew(self) -> None:
        """Replaces everything with placeholders, as if it came from an earlier step."""
        self._held.clear()
        with torch.no_grad():
            for module in self._run.modules.values():
                for parameter in module.parameters():
                    made = self._new(parameter, "weights", self._sharding(parameter))
                    parameter.data = made
                    self._hold(parameter)
                for owner in module.modules():
                    for name, buffer in list(owner._buffers.items()):
                        if buffer is not None and buffer.device.type == "xla":
                            owner._buffers[name] = self._new(buffer, "weights", REPLICATED)
                            self._hold(owner._buffers[name])
            for optimizer in self._run.optimizers.values():
                for owned, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, Tensor) and value.device.type == "xla":
                            sharding = self._sharding(owned) if value.shape == owned.shape else REPLICATED
                            state[key] = self._new(value, "optimizer", sharding)
                            self._hold(state[key])
            for entry in self._run._engine.models.entries.values():
                if entry.average is not None:
                    weights = entry.average.weights
                    for name, parameter in entry.module.named_parameters():
                        if name in weights:
                            weights[name] = self._new(weights[name], "averages", self._sharding(parameter))
                            self._hold(weights[name])

    def _hold(self, tensor: Tensor | None) -> None:
        assert tensor is not None
        self._held.append((tensor, tensor._version, self._register.last))

    def renew_gradients(self) -> None:
        """Gives the next micro-batch the gradients of this program."""
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad = self._new(parameter.grad, "gradients", self._sharding(parameter))

    def changed(self) -> list[tuple[Tensor, int]]:
        """Returns what the step has written to, with the number of its placeholder."""
        return [(tensor.detach(), number) for tensor, version, number in self._held if tensor._version != version]


def steps(run: Run, task: Any, config: RunConfig, data: Any, order: Any, state: State) -> None:
    """Runs two steps: the first creates the optimizer's state, the second is planned."""
    limits, step, done = config.train, step_of(task), 0
    for _ in run.epochs(None):
        batches = run.batches(
            data, limits.batch_size, order=order, drop_last=config.data.drop_last, accumulate=limits.accumulate,
            collate=getattr(task, "collate", None),
        )  # fmt: skip
        for batch in batches:
            complete = step(run, task, batch)
            if not complete:
                continue
            done += 1
            if done == 2:
                return
            state.renew()
    raise AssertionError("an endless number of epochs has ended")
