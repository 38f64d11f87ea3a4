"""Models spread over ranks by torch's own fully_shard and tensor parallelism, saved and restored by their owners."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import lockstep
from lockstep.checkpoint import ranges, sharded_writer
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.schema import Checkpoint
from lockstep.engine.models import Entry, Models
from lockstep.errors import CheckpointError, ConfigError
from lockstep.strategy.base import Strategy
from lockstep.strategy.parameters import Modules
from lockstep.strategy.slices import load_module, load_optimizer, slice_of

Mesh = dict[str, int]


class KeepsSlices(Strategy):
    """No more than what checkpoints need of a strategy."""

    name: ClassVar[str] = "slices"
    keeps_slices: ClassVar[bool] = True

    def place(self, model: nn.Module) -> nn.Module:
        return model

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
        load_module(module, state, strict)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        load_optimizer(optimizer, state)

    def parameters_to_check(self, modules: Modules) -> dict[str, Tensor]:
        return {}


class Noted(nn.Module):
    """Has something to save that is no tensor, and a frozen parameter of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.zeros(6, 2, dtype=torch.bfloat16), requires_grad=False)
        self.note: Any = None

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Model(nn.Module):
    """Sizes that nothing divides, tied weights, buffers, a frozen parameter, more ranks than rows."""

    def __init__(self, width: int = 33) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 12)
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12, bias=False)
        self.odd = nn.Linear(65, width)
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(3, 5, 3)
        self.head = nn.Linear(12, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.noted = Noted()
        self.register_buffer("angles", torch.zeros(3, dtype=torch.complex128))


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A mesh of one needs torch's group, too; one process runs in the test's own."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(mesh: Mesh, width: int = 33) -> Model:
    """The model over a mesh: `replica` and `data` by fully_shard, `model` by tensor parallelism."""
    torch.manual_seed(0)
    model = Model(width)
    found = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "model" in mesh:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, found["model"], plan)
    over = tuple(name for name in ("replica", "data") if name in mesh)
    if over:
        data = found[over if len(over) > 1 else over[0]]
        # What is not tensor parallel is on a mesh of its own for each rank of `model`, and the same on all of these.
        for part in (model.up, model.down, model.odd, model.conv, model.noted, model):
            fully_shard(part, mesh=data)
    return model


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a tensor is filled with: other numbers for each name, and for each place in it."""
    count = int(torch.Size(shape).numel())
    numbers = torch.arange(count, dtype=torch.float64) * 0.37 + zlib.crc32(name.encode()) % 1000
    return numbers.reshape(shape).to(dtype)


def fill(tensor: Tensor, name: str) -> None:
    whole = value(name, tuple(tensor.shape), tensor.dtype)
    with torch.no_grad():
        if isinstance(tensor, DTensor):  # by torch's own way of dividing a tensor
            torch.nn.init.zeros_(tensor)
            placed = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(placed.to_local())
        else:
            tensor.copy_(whole)


def named(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All tensors of both; those of the optimizer by the name of their parameter. Tied weights by their first name."""
    found = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    found.pop("head.weight", None)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in (optimizer.state if optimizer else {}).items():
        found.update({f"{names[parameter]}/{key}": each for key, each in state.items() if isinstance(each, Tensor)})
    return found


def wrong(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """The tensors that are not what they were filled with, to the last bit. All ranks call it."""
    found = []
    for name, tensor in named(model, optimizer).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not torch.equal(whole.cpu(), value(name, tuple(tensor.shape), tensor.dtype)):
            found.append(name)
    return found


def adam(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Average:
    """Something attached that has spread tensors of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.count = state["count"]


class Setup:
    """A model, its optimizer and what saves them."""

    def __init__(self, run: lockstep.Run, folder: Path, mesh: Mesh | None, width: int = 33, **settings: Any) -> None:
        if mesh is None:
            torch.manual_seed(1)
            self.model, strategy = Model(width), Strategy(run._engine.runtime)
        else:
            self.model, strategy = sharded(mesh, width), KeepsSlices(run._engine.runtime, run.world_size)
        self.optimizer = adam(self.model)
        self.models = Models(strategy)
        self.models.add(Entry("model", self.model, self.model, self.optimizer, "float32", None, False))
        folder.mkdir(parents=True, exist_ok=True)
        limit = settings.pop("timeout", 60.0)
        checked = Checkpoint.model_validate({"keep": {"last": 100}, **settings})
        self.checkpointer = Checkpointer(
            run._engine.group, run._engine.runtime, strategy, checked, limit, folder, self.models, seed=0
        )
        self.average = Average(self.model)
        self.checkpointer.registered.register("average", self.average, "refuse")
        self._run = run

    def fill(self) -> None:
        for name, tensor in named(self.model, self.optimizer).items():
            fill(tensor, name)
        for name, tensor in self.average.weights.items():
            fill(tensor, name)
        self.average.count = 7
        self.model.noted.note = "kept"

    def save(self, step: int = 1) -> None:
        position = {"progress": {"epoch": 0, "step": step}, "cursors": {}}
        state = {"journal": {"array": torch.arange(3).numpy(), "seconds": 1.5}}
        self.checkpointer.save(step, position, state, {"epoch": 0, "world_size": self._run.world_size})

    def wrong(self) -> list[str]:
        found = wrong(self.model, self.optimizer)
        for name, tensor in self.average.weights.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(whole, value(name, tuple(tensor.shape), tensor.dtype)):
                found.append(f"average of {name}")
        if self.average.count != 7 or self.model.noted.note != "kept":
            found.append("what is no tensor")
        if self.model.head.weight is not self.model.embedding.weight:
            found.append("the tie")
        return found


def slices(run: lockstep.Run, mesh: Mesh) -> dict[str, Any]:
    """What slice_of says of every parameter, beside what torch itself makes of a tensor of its shape."""
    found: dict[str, Any] = {}
    for name, parameter in sharded(mesh).state_dict().items():
        if not isinstance(parameter, DTensor):
            assert not isinstance(parameter, Tensor) or slice_of(parameter) is None
            continue
        whole = torch.arange(parameter.numel()).reshape(parameter.shape)
        fill(parameter, name)
        part = slice_of(parameter)
        assert part is not None and part.shape == tuple(parameter.shape)
        assert part.tensor.data_ptr() == parameter.to_local().data_ptr() or not part.tensor.numel()
        cut = tuple(slice(at, at + n) for at, n in zip(part.offset, part.tensor.shape, strict=True))
        expected = value(name, tuple(parameter.shape), parameter.dtype)
        # Gathered by torch, so that the parts are in their places by its own account.
        assert torch.equal(parameter.full_tensor(), expected), name
        assert torch.equal(part.tensor, expected[cut]), name
        found[name] = {"numbers": whole[cut].flatten().tolist(), "holders": part.holders, "count": whole.numel()}
    return found


def bad_slices(run: lockstep.Run) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    from torch.distributed.tensor import Partial

    told = []
    for tensor in (
        DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False),
        DTensor.from_local(
            torch.ones(run.rank + 1), mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,)
        ),
    ):
        try:
            slice_of(tensor)
            told.append("")
        except ValueError as error:
            told.append(str(error))
    whole = slice_of(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
    assert whole is not None and whole.holders == (0, 1) and whole.offset == (0,)
    return told


@group_of_one()
def saves(run: lockstep.Run, mesh: Mesh | None, steps: int = 1, hosts: int = 1, **settings: Any) -> dict[str, Any]:
    """On so many hosts, as far as their names tell, that share a disk."""
    if hosts > 1:
        socket.gethostname = lambda: f"host-{run.rank * hosts // run.world_size}"
    setup = Setup(run, run.folder / "run", mesh, **settings)
    setup.checkpointer.restore()
    setup.fill()
    assert setup.wrong() == []
    buffers: list[int] = []
    for step in range(1, steps + 1):
        setup.save(step)
        writer = setup.checkpointer._writer
        buffers.append(sum(each.data_ptr() for each in writer._buffers.values()))
        # What is trained on meanwhile is not what is saved.
        with torch.no_grad():
            for parameter in setup.model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).fill_(-1)
        setup.checkpointer.finish()
        setup.fill()
    assert len(set(buffers)) == 1, "host memory is kept from save to save"
    held = sum(each.nbytes for each in setup.checkpointer._writer._buffers.values())
    mine = sum(
        (found.tensor if (found := slice_of(each)) else each).nbytes
        for each in [*named(setup.model, setup.optimizer).values(), *setup.average.weights.values()]
    )
    return {"held": held, "mine": mine}


@group_of_one()
def restores(run: lockstep.Run, mesh: Mesh | None) -> dict[str, Any]:
    return restored(run, mesh, run.folder / "run")


@group_of_one()
def restores_each(run: lockstep.Run, mesh: Mesh | None, folders: list[Path]) -> list[dict[str, Any]]:
    return [restored(run, mesh, folder) for folder in folders]


def restored(run: lockstep.Run, mesh: Mesh | None, folder: Path) -> dict[str, Any]:
    """What is not as it was saved, and how many bytes of tensor files this rank read."""
    setup = Setup(run, folder, mesh)
    warnings = logging.handlers.MemoryHandler(1000)
    logging.getLogger("lockstep.checkpoint").addHandler(warnings)
    read = [0]
    inner = ranges._read

    def counted(descriptor: int, memory: memoryview, position: int) -> None:
        read[0] += len(memory)
        inner(descriptor, memory, position)

    ranges._read = counted
    try:
        state = setup.checkpointer.restore()
    finally:
        ranges._read = inner
        logging.getLogger("lockstep.checkpoint").removeHandler(warnings)
    assert state is not None
    told = {"epoch": state["progress"]["epoch"], "array": state["journal"]["array"].tolist()}
    return {
        "wrong": setup.wrong(),
        "step": setup.checkpointer.last.step,  # type: ignore[union-attr]
        "read": read[0],
        "warnings": [each.getMessage() for each in warnings.buffer if each.levelno >= logging.WARNING],
        "open": _open_tensor_files(),
        **told,
    }


def _open_tensor_files() -> int:
    count = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "safetensors" in str(each.readlink())
    return count


def refuses(run: lockstep.Run, mesh: Mesh) -> str:
    """A model of another width."""
    setup = Setup(run, run.folder / "run", mesh, width=34)
    try:
        setup.checkpointer.restore()
    except ConfigError as error:
        return str(error)
    return "not refused"


# What can go wrong


def ends_while_saving(run: lockstep.Run, mesh: Mesh, rank: int, at: str) -> None:
    """The second checkpoint is never whole: a rank is killed while it writes, or rank 0 just before the renaming."""
    setup = Setup(run, run.folder / "run", mesh)
    setup.checkpointer.restore()
    setup.fill()
    setup.save(1)
    setup.checkpointer.finish()

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if run.rank == rank:
        if at == "writing":
            ranges._write = end
        elif at == "renaming":
            CheckpointStorage._publish = end  # type: ignore[method-assign]
    setup.save(2)
    setup.checkpointer.finish()


def fills_the_disk(run: lockstep.Run, mesh: Mesh, disk: Path, rank: int, blind: bool = False) -> dict[str, Any]:
    """Somebody takes the room that was there when rank 0 looked. Then there is room again. Where rank 1 is `blind`, it
    is on another host."""
    setup = Setup(run, run.folder / "other" if blind and run.rank == 1 else disk / "run", mesh, timeout=20)
    setup.checkpointer.restore()
    setup.fill()
    setup.save(1)
    setup.checkpointer.finish()
    inner = sharded_writer.ShardedWriter._write_blocks
    junk = disk / "junk"

    def filling(*arguments: Any) -> Any:
        if run.rank == rank and not junk.exists():
            with junk.open("wb", buffering=0) as stream:
                try:
                    while True:
                        stream.write(bytes(4096))
                except OSError:
                    pass
        return inner(*arguments)

    sharded_writer.ShardedWriter._write_blocks = filling  # type: ignore[method-assign]
    told = ""
    try:
        setup.save(2)
        setup.checkpointer.finish()
    except CheckpointError as error:
        told = str(error)
    sharded_writer.ShardedWriter._write_blocks = inner  # type: ignore[method-assign]
    run.barrier("all have heard of it")
    left = sorted(path.name for path in (disk / "run" / "checkpoints").glob("[!.]*"))
    if run.rank == 0:
        junk.unlink()
    run.barrier("there is room again")
    setup.save(3)
    setup.checkpointer.finish()
    return {"told": told, "left": left}


def writes_for_ever(run: lockstep.Run, mesh: Mesh) -> dict[str, Any]:
    """The disk of rank 1 does not answer; found out by whoever looks between two steps."""
    setup = Setup(run, run.folder / "run", mesh, timeout=1.5)
    setup.fill()
    if run.rank == 1:
        sharded_writer.ShardedWriter._write_blocks = lambda *_: time.sleep(600)  # type: ignore[method-assign,assign,misc]
    setup.save(1)
    began = time.monotonic()
    told = ""
    while time.monotonic() < began + 20 and not told:
        try:
            setup.checkpointer.check()
        except CheckpointError as error:
            told = str(error)
        time.sleep(0.05)
        if run.rank == 1 and time.monotonic() > began + 4:  # it is the one that is stuck
            break
    return {"told": told, "left": [path.name for path in (run.folder / "run" / "checkpoints").glob("[!.]*")]}


def saves_what_differs(run: lockstep.Run, mesh: Mesh) -> list[str]:
    """Other ranks have another model, a tensor more, or parts that overlap."""
    told = []
    for how in ("shape", "more"):
        setup = Setup(run, run.folder / how, mesh, width=34 if how == "shape" and run.rank == 1 else 33)
        if how == "more" and run.rank == 1:
            extra = setup.model.odd.weight.detach().clone()
            setup.average.weights["extra"] = extra
        try:
            setup.save(1)
            setup.checkpointer.finish()
            told.append("saved")
        except CheckpointError as error:
            told.append(str(error))
    return told


# Hosts with disks of their own


def apart(run: lockstep.Run, mesh: Mesh, blind: list[int], saving: bool) -> dict[str, Any]:
    """As if some ranks were on a host of their own, where the run's folder is another one."""
    host = "b" if run.rank in blind else "a"
    socket.gethostname = lambda: host
    setup = Setup(run, run.folder / host, mesh)
    if saving:
        setup.checkpointer.restore()
        setup.fill()
        for step in (1, 2):
            setup.save(step)
            setup.checkpointer.finish()
        there = run.folder / host / "checkpoints"
        return {"left": sorted(path.name for path in there.glob("[!.]*")) if there.exists() else []}
    there = run.folder / host / "checkpoints"
    killed = there / ".partial-step-00000001-fetched-4194305"  # a copy of a process that cannot be
    if run.rank == min(blind):
        killed.mkdir(parents=True)
    state = setup.checkpointer.restore()
    assert not killed.exists()
    return {
        "step": state and setup.checkpointer.last.step,  # type: ignore[union-attr]
        "wrong": setup.wrong(),
        "left": sorted(path.name for path in there.glob("[!.]*")) if there.exists() else [],
    }
