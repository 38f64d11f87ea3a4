"""XLA devices through PJRT: operations are traced, and compiled and run as one program where a step ends."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist

from lockstep.config.plain import in_home
from lockstep.config.schema import RunSettings
from lockstep.errors import ConfigError
from lockstep.runtime import pjrt
from lockstep.runtime.base import Runtime
from lockstep.runtime.moving import tensors_of


class XlaRuntime(Runtime):
    name: ClassVar[str] = "xla"
    backend = "gloo"  # for what ranks exchange through their hosts
    fixed_shapes = True  # every new shape is a new program to compile
    compiles_everything = True
    count_dtype = torch.float32  # TPUs have no other; exact up to 16 million

    def __init__(self, local_rank: int, local_world_size: int, settings: RunSettings) -> None:
        self.family = pjrt.device_family(settings, os.environ)
        self.spmd = settings.strategy.has_mesh
        self._seeds: dict[str, int] = {}  # of the program under way, by device
        self._drawn_again: set[str] = set()  # devices that have drawn numbers a second time since it began
        with _logging_left_alone():
            _load(settings, local_rank, local_world_size, self.family, self.spmd)
            import torch_xla
            import torch_xla.runtime as xr

            self._xla, self._xr = torch_xla, xr
            try:
                super().__init__(self._chosen(local_rank, local_world_size))
            except (RuntimeError, IndexError) as error:
                raise ConfigError(
                    f"{pjrt.DEVICE}={self.family}: the device does not answer: {str(error).strip().splitlines()[0]}. "
                    "`lockstep doctor --runtime xla` looks closer"
                ) from None
        if self.family == "CPU":
            # XLA computes with threads of its own on the same cores. Torch's would take them away from it even while
            # they wait for work: with as many as cores, a step took twice as long (benchmarks/xla.py).
            torch.set_num_threads(settings.launch.threads or 1)
        if settings.xla.cache and self.family != "CPU":  # PJRT CPU writes such a cache, but cannot read it back
            try:
                xr.initialize_cache(in_home(settings.xla.cache), readonly=local_rank != 0)
            except ValueError as error:
                raise ConfigError(f"xla.cache: {settings.xla.cache}: {error}") from None

    def _chosen(self, local_rank: int, local_world_size: int) -> torch.device:
        """Returns the device of the local rank. A process that sees only one device uses that one."""
        if local_world_size == 1 or self.spmd or local_rank >= self._xr.addressable_device_count():
            return cast(torch.device, self._xla.device())
        device = torch.device("xla", local_rank)
        self._xla._XLAC._xla_set_default_device(str(device))  # what torch_xla means where it is told none
        return device

    @property
    def addressable_devices(self) -> list[torch.device]:
        """The devices of this process; under SPMD one stands for all."""
        return [torch.device("xla", index) for index in range(self._xr.addressable_device_count())]

    def addressable_device_count(self) -> int:
        return int(self._xr.addressable_runtime_device_count())

    def global_device_count(self) -> int:
        return int(self._xr.global_runtime_device_count())

    def seed(self, seed: int) -> None:
        super().seed(seed)
        for device in self.addressable_devices:
            self._xla.manual_seed(seed, device)
            self._seeds[str(device)] = seed

    def rng_state(self) -> dict[str, torch.Tensor]:
        import torch_xla.core.xla_model as xm

        number = int(xm.get_rng_state(str(self.device))) % 2**64
        state = torch.tensor([number - 2**64 if number >= 2**63 else number], dtype=torch.int64)
        return {**super().rng_state(), "xla": state.view(torch.uint8)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        super().set_rng_state(state)
        if "xla" in state:  # absent where the checkpoint was written on another device family
            seed = int(state["xla"].view(torch.int64)[0]) % 2**64
            self._xla.manual_seed(seed, self.device)
            self._seeds[str(self.device)] = seed

    def recomputed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        # Without an argument of its own: torch would ask a tensor's device for a generator, and finds none here.
        return super().recomputed(_Repeatable(function, inputs, self._drawn_again))

    def synchronize(self) -> None:
        import torch_xla.core.xla_model as xm

        self._xla.sync()
        xm.wait_device_ops()

    def end_of_program(self, device: torch.device | None = None) -> None:
        import torch_xla.core.xla_model as xm

        name = str(device or self.device)
        # The seed of the next program is made of this one's. Where something was recomputed, the generator was set to
        # other places meanwhile: the next program would draw other numbers than without it.
        if name in self._drawn_again:
            self._drawn_again.remove(name)
            xm.set_rng_state(self._seeds[name], name)
        self._xla._XLAC._xla_step_marker(name, [], wait=False)
        self._seeds[name] = int(xm.get_rng_state(name))

    def compilations(self) -> int | None:
        import torch_xla.debug.metrics as metrics

        data = metrics.metric_data("CompileTime")
        return int(data[0]) if data else 0

    def program_text(self, tensor: torch.Tensor) -> str:
        self._xla._XLAC._set_ir_debug(True)
        return str(self._xla._XLAC._get_xla_tensors_text([tensor]))

    def to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        here = [each for each in tensors if each.device.type == "xla"]
        # In one program and one wait, where `.cpu()` would be one of each per tensor.
        fetched = iter(self._xla._XLAC._xla_get_cpu_tensors([each.detach() for each in here]) if here else [])
        return [next(fetched) if each.device.type == "xla" else each for each in tensors]

    def fetch(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.to_host(tensors)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        if self.spans_processes:
            import torch_xla.core.xla_model as xm

            tensor.copy_(xm.all_reduce(xm.REDUCE_SUM, tensor))
            self.end_of_program()
            return None
        (on_host,) = self.to_host([tensor])
        dist.all_reduce(on_host)
        tensor.copy_(on_host)
        return None

    @property
    def spans_processes(self) -> bool:
        """Whether the device's collectives reach other processes. On PJRT CPU each process is separate."""
        return not self.spmd and self.family != "CPU" and int(self._xr.world_size()) > 1

    def world_size(self) -> int | None:
        if self.family == "CPU":
            return None  # knows nothing of other processes, and is not asked to reduce over them
        return int(self._xr.process_count() if self.spmd else self._xr.world_size())

    def identity(self) -> str:
        host = socket.gethostname()
        if self.family == "CPU":
            return f"{host}/pjrt-cpu/pid-{os.getpid()}"
        import torch_xla.core.xla_model as xm

        attributes = self._xr.runtime_device_attributes(str(self.device))
        where = "".join(f" {key} {attributes[key]}" for key in ("coords", "core_on_chip") if key in attributes)
        return f"{host}/{xm.xla_real_devices([self.device])[0]}{where}"

    def memory(self) -> dict[str, int]:
        import torch_xla.core.xla_model as xm

        try:
            found = xm.get_memory_info(self.device)
        except RuntimeError:  # PJRT CPU does not say
            return {}
        return {"allocated": int(found["bytes_used"]), "peak": int(found.get("peak_bytes_used", 0))}


class _Repeatable:
    """A computation that is repeated in the backward pass with the same random numbers and precision.

    torch_xla's checkpoint restores neither.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], drawn_again: set[str]) -> None:
        self._function, self._inputs, self._drawn_again = function, inputs, drawn_again
        self._tensors = [each for _, each in tensors_of(inputs) if each.device.type == "xla"]
        self._device = str(self._tensors[0].device) if self._tensors else None
        self._first: tuple[Any, bool, torch.dtype] | None = None  # the generator and the precision of the first time

    def __call__(self) -> Any:
        import torch_xla.core.xla_model as xm

        state = xm.get_rng_state(self._device)  # known to the host: no program runs for it
        if self._first is None:
            self._first = (state, torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla"))
            return self._function(*self._inputs)
        first, enabled, dtype = self._first
        # Else XLA sees that the same is computed twice, computes it once, and keeps it.
        xm.optimization_barrier_(self._tensors)
        xm.set_rng_state(first, self._device)
        self._drawn_again.add(str(self._device))
        try:
            with torch.autocast("xla", dtype=dtype, enabled=enabled):
                return self._function(*self._inputs)
        finally:
            xm.set_rng_state(state, self._device)


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Removes the handlers that torch_xla adds to the root logger."""
    before = list(logging.getLogger().handlers)
    try:
        yield
    finally:
        for handler in [each for each in logging.getLogger().handlers if each not in before]:
            logging.getLogger().removeHandler(handler)


def _load(settings: RunSettings, local_rank: int, local_world_size: int, family: str, spmd: bool) -> None:
    """Imports torch_xla with everything set that it reads once."""
    pjrt.check(settings, os.environ, local_world_size)
    wanted = pjrt.variables(settings, os.environ)
    os.environ.update(wanted)
    try:
        import torch_xla
    except ImportError as error:
        raise ConfigError(
            f"runtime: xla: torch_xla does not load with torch {torch.__version__}: {str(error).splitlines()[0]}. "
            "torch_xla needs the very torch that it was built for: pip install 'lockstep-train[xla]'"
        ) from None
    ours, theirs = torch.__version__.split("+")[0], torch_xla.__version__.split("+")[0]
    if ours.split(".")[:2] != theirs.split(".")[:2]:
        raise ConfigError(
            f"runtime: xla: torch is {ours} but torch_xla is {theirs}, and they must be of one version: "
            "pip install 'lockstep-train[xla]'"
        )
    import torch_xla.runtime as xr

    if family == "CUDA":
        pjrt.register_cuda_plugin()
    touched = torch_xla._XLAC._xla_runtime_is_initialized()
    if touched and spmd and not xr.is_spmd():
        raise ConfigError(
            f"strategy: {settings.strategy.type} must be switched on before any XLA device is used, but something in "
            "this process has used one already: move what does so (a tensor on 'xla', torch_xla.device()) out of the "
            "task file's import and into the task's methods"
        )
    if spmd:
        xr.use_spmd()
    if family == "TPU" and local_world_size > 1:
        from torch_xla._internal import tpu

        tpu.configure_topology(local_rank, local_world_size)
