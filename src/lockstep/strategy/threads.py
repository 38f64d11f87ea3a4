"""One process, several XLA devices: a replica and a thread for each of them.

Threads that call an XLA collective abort each other on PJRT CPU: each compiles its own program, and the devices look
for each other under different names. So nothing here is a collective. The main thread traces what every device is to
do; a thread per device compiles it, runs it and fetches the gradients; they are added up on the host in the order of
the devices, stepped once, and the parameters are copied out again. All replicas are therefore equal bit for bit, also
where devices share one generator.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.runtime.moving import moved, tensors_of
from lockstep.runtime.xla import XlaRuntime
from lockstep.strategy.base import Strategy
from lockstep.strategy.collectives import cannot_gather
from lockstep.strategy.parameters import Modules, Parameters, to_device

logger = logging.getLogger(__name__)


class Replicas(nn.Module):
    """Calls the replica of the device that its inputs are on. The first one is the model itself."""

    def __init__(self, module: nn.Module, others: list[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.each = [module, *others]  # a plain list: the others are no part of the model's state

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self._replica_of(inputs, keywords)(*inputs, **keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
        if not inspect.ismethod(found) or hasattr(nn.Module, name):
            return found
        return lambda *inputs, **keywords: getattr(self._replica_of(inputs, keywords), name)(*inputs, **keywords)

    def _replica_of(self, inputs: Any, keywords: Any) -> nn.Module:
        tensor = next((each for _, each in tensors_of((inputs, keywords))), None)
        return self.each[0 if tensor is None or tensor.device.type != "xla" else tensor.device.index or 0]

    def requires_grad_(self, requires_grad: bool = True) -> Replicas:
        for each in self.each:
            each.requires_grad_(requires_grad)
        return self

    def train(self, mode: bool = True) -> Replicas:
        for each in self.each:
            each.train(mode)
        return super().train(mode)


class ThreadsStrategy(Strategy):
    name = "threads"
    reduces_in_step: ClassVar[bool] = True

    def __init__(self, runtime: XlaRuntime) -> None:
        super().__init__(runtime)
        self._devices = runtime.addressable_devices
        self.micro_batches = len(self._devices)
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"xla:{index}") for index in range(len(self._devices))
        ]
        self._placed: list[list[nn.Module]] = []  # the replicas of every model, one per device
        self._at_work = 0  # the device of the current micro-batch
        self._written_down: set[int] = set()  # devices with something to do that no thread has been given yet
        self._under_way: dict[int, Future[None]] = {}

    def place(self, model: nn.Module) -> nn.Module:
        try:
            copies = [copy.deepcopy(model) for _ in self._devices[1:]]
        except Exception as error:
            raise ConfigError(
                f"strategy: threads keeps a copy of the model on every device, but it cannot be copied: {error}"
            ) from None
        model = to_device(model, self._devices[0])
        others = [to_device(each, device) for each, device in zip(copies, self._devices[1:], strict=True)]
        self._placed.append([model, *others])
        for device in self._devices:
            self.runtime.end_of_program(device)
        logger.info(
            "one replica and one thread on each of %d devices; gradients are added up on the host", len(self._devices)
        )
        return Replicas(model, others)

    def copies_of(self, model: nn.Module) -> list[nn.Module]:
        return model.each if isinstance(model, Replicas) else [model]

    def move(self, batch: Any, number: int = 0) -> Any:
        self._start()  # the device of the micro-batch before is at work while this one's is written down
        self._at_work = number % len(self._devices)
        self._wait_for(self._at_work)  # which may be still at work, where it has more than one micro-batch
        return moved(batch, self._devices[self._at_work])

    def computed(self, last: bool) -> None:
        # Not started yet: the loop may go on with what it computed (a second loss, a value to log), and nobody may
        # touch the tensors of a device while its thread is at work.
        self._written_down.add(self._at_work)

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise cannot_gather(self.name)

    def reduce_gradients(self, parameters: Parameters, counts: int = 0) -> int:
        self._wait_for_all()
        wanted = {id(each) for each in parameters}
        for replicas in self._placed:
            positions = [index for index, each in enumerate(replicas[0].parameters()) if id(each) in wanted]
            if positions:
                self._reduce(replicas, positions)
        return counts

    def _reduce(self, replicas: list[nn.Module], positions: list[int]) -> None:
        """Adds up the gradients of some parameters over all replicas, into the first; the others' are cleared."""
        mine = list(replicas[0].parameters())
        fetched = [
            thread.submit(self._gradients, [list(each.parameters())[index] for index in positions])
            for thread, each in zip(self._threads, replicas, strict=True)
        ]
        found = [future.result() for future in fetched]
        for place, index in enumerate(positions):
            known = [part for part in (gradients[place] for gradients in found) if part is not None]
            if known:
                total = known[0]
                for part in known[1:]:
                    total = total + part
                mine[index].grad = total.to(self._devices[0])
        for replica in replicas[1:]:
            theirs = list(replica.parameters())
            for index in positions:
                theirs[index].grad = None

    def total_count(self, counts: Sequence[Tensor | float]) -> Tensor:
        self._wait_for_all()
        tensors = [each for each in counts if isinstance(each, Tensor)]
        # One by one: they are on different devices, which no single program spans.
        known = math.fsum(float(self.runtime.to_host([each])[0]) for each in tensors)
        known += math.fsum(float(each) for each in counts if not isinstance(each, Tensor))
        return torch.tensor(known, dtype=self.runtime.count_dtype).to(self._devices[0])

    def stepped(self) -> None:
        self.runtime.end_of_program(self._devices[0])
        for replicas in self._placed:
            self._hand_out(replicas, [each.detach() for each in replicas[0].parameters()], "parameters")

    def equalize_buffers(self, modules: Modules) -> None:
        for replicas in self._placed:
            self._hand_out(replicas, list(replicas[0].buffers()), "buffers")

    def restored(self, modules: Modules, optimizers: Sequence[Optimizer]) -> None:
        self.stepped()
        self.equalize_buffers(modules)

    def _hand_out(self, replicas: list[nn.Module], tensors: list[Tensor], kind: str) -> None:
        """Gives the other replicas what the first one has."""
        on_host = self.runtime.to_host(tensors)

        def receive(index: int) -> None:
            with torch.no_grad():
                theirs = getattr(replicas[index], kind)()
                for target, value in zip(theirs, on_host, strict=True):
                    target.data.copy_(value)
            self.runtime.end_of_program(self._devices[index])

        for each in [self._threads[index].submit(receive, index) for index in range(1, len(self._devices))]:
            each.result()

    def _gradients(self, parameters: Parameters) -> list[Tensor | None]:
        """Returns gradients on the host; none for parameters that took no part."""
        gradients = [each.grad for each in parameters]
        fetched = iter(self.runtime.to_host([each for each in gradients if each is not None]))
        return [None if each is None else next(fetched) for each in gradients]

    def _start(self) -> None:
        """Lets the threads compile and run what is traced for their devices."""
        for index in sorted(self._written_down):
            self._wait_for(index)
            self._under_way[index] = self._threads[index].submit(self.runtime.end_of_program, self._devices[index])
        self._written_down.clear()

    def _wait_for_all(self) -> None:
        self._start()
        for index in list(self._under_way):
            self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        future = self._under_way.pop(index, None)
        if future is not None:
            future.result()
