"""One process, several XLA devices: a replica and a thread for each of them.

Threads that call an XLA collective abort each other on PJRT CPU: each compiles its own program, and the devices look
for each other under different names. So nothing here is a collective. The main thread writes down what every device is
to do, which Python would not let several threads do at once anyway; a thread per device compiles it, runs it and
fetches the gradients; they are added up on the host in the order of the devices, stepped once, and the parameters are
copied out again. All replicas are therefore equal bit for bit, also where devices share one generator.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import ConfigError
from lockstep.runtime.base import map_tensors
from lockstep.runtime.xla import XlaRuntime
from lockstep.strategy.base import Strategy, to_device

logger = logging.getLogger(__name__)


class Replicas(nn.Module):
    """Calls the replica of the device that its inputs are on. The first one is the model itself."""

    def __init__(self, module: nn.Module, others: list[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.each = [module, *others]  # a plain list: the others are no part of the model's state

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        tensor = next(_tensors((inputs, keywords)), None)
        index = 0 if tensor is None or tensor.device.type != "xla" else tensor.device.index or 0
        return self.each[index](*inputs, **keywords)

    def train(self, mode: bool = True) -> Replicas:
        for each in self.each:
            each.train(mode)
        return super().train(mode)


class ThreadsStrategy(Strategy):
    name: ClassVar[str] = "threads"

    def __init__(self, runtime: XlaRuntime) -> None:
        super().__init__(runtime)
        self._devices = runtime.addressable_devices
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"xla:{index}") for index in range(len(self._devices))
        ]
        self._replicas: list[nn.Module] = []
        self._next = 0  # the device that gets the next part
        self._under_way: dict[int, Future[None]] = {}

    @property
    def parts(self) -> int:
        return len(self._devices)

    def place(self, model: nn.Module) -> nn.Module:
        try:
            copies = [copy.deepcopy(model) for _ in self._devices[1:]]
        except Exception as error:
            raise ConfigError(
                f"strategy: threads keeps a copy of the model on every device, but it cannot be copied: {error}"
            ) from None
        model = to_device(model, self._devices[0])
        others = [to_device(each, device) for each, device in zip(copies, self._devices[1:], strict=True)]
        self._replicas = [model, *others]
        for device in self._devices:
            self.runtime.end_of_program(device)
        logger.info("one replica and one thread on each of %d devices; gradients are added up on the host", self.parts)
        return Replicas(model, others)

    def move(self, batch: Any) -> Any:
        device = self._devices[self._next]
        return map_tensors(lambda tensor: tensor.to(device), batch)

    def sync_gradients(self, wanted: bool) -> None:
        pass  # devices exchange nothing before the batch is complete

    def computed(self, last: bool) -> None:
        index = self._next
        self._next = 0 if last else (index + 1) % self.parts
        # A device may have more than one part, so that its thread may still be at work on the one before.
        self._wait_for(index)
        self._under_way[index] = self._threads[index].submit(self.runtime.end_of_program, self._devices[index])

    def reduce_gradients(self, model: nn.Module) -> None:
        for index in list(self._under_way):
            self._wait_for(index)
        fetched = [
            thread.submit(self._gradients, each) for thread, each in zip(self._threads, self._replicas, strict=True)
        ]
        found = [future.result() for future in fetched]
        for position, parameter in enumerate(self._replicas[0].parameters()):
            parts = [gradients[position] for gradients in found]
            known = [part for part in parts if part is not None]
            if known:
                total = known[0]
                for part in known[1:]:
                    total = total + part
                parameter.grad = total.to(self._devices[0])
        for replica in self._replicas[1:]:
            replica.zero_grad(set_to_none=True)

    def stepped(self, model: nn.Module) -> None:
        self.runtime.end_of_program(self._devices[0])
        self._hand_out([each.detach() for each in self._replicas[0].parameters()], "parameters")

    def equalize_buffers(self, model: nn.Module) -> None:
        self._hand_out(list(self._replicas[0].buffers()), "buffers")

    def restored(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self.stepped(model)
        self.equalize_buffers(model)

    def _hand_out(self, tensors: list[Tensor], kind: str) -> None:
        """Give the other replicas what the first one has."""
        on_host = self.runtime.to_host(tensors)

        def receive(index: int) -> None:
            with torch.no_grad():
                theirs = getattr(self._replicas[index], kind)()
                for target, value in zip(theirs, on_host, strict=True):
                    target.data.copy_(value)
            self.runtime.end_of_program(self._devices[index])

        for each in [self._threads[index].submit(receive, index) for index in range(1, self.parts)]:
            each.result()

    def _gradients(self, replica: nn.Module) -> list[Tensor | None]:
        """A replica's gradients on the host; none for parameters that took no part."""
        gradients = [each.grad for each in replica.parameters()]
        fetched = iter(self.runtime.to_host([each for each in gradients if each is not None]))
        return [None if each is None else next(fetched) for each in gradients]

    def _wait_for(self, index: int) -> None:
        future = self._under_way.pop(index, None)
        if future is not None:
            future.result()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
