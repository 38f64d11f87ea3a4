"""One process of a parity check: takes the steps of a program and compares its parts with the reference."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lockstep.distributed.watch.heartbeat import user_line
from lockstep.errors import ConfigError, RankMissing, RankStalled
from lockstep.strategy.slices import is_spread, slice_of
from lockstep.verify.parity_findings import AXES, PHASES, Difference, RankFound, losses_agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.verify.parity import ParityCase

_SEED = 20
# Relative to the largest value of a tensor. Rounding of a small model is far below, faults are far above.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A gradient that is zero but for rounding is compared with the largest of all gradients.
_SMALLEST = 1e-6
# Names that wrappers (DDP, torch.compile, activation checkpointing) put into those of modules.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
_EXPLAINED = 32  # tensors that are summed over axes, to see which reduction is missing
_DATA_AXES = re.compile(r"data|replica|batch|fsdp|dp.*")
_TIMED_OUT = ("timed out", "timeout")


def compute_reference(cases: Sequence[ParityCase], folder: Path, limit: float) -> None:
    """Takes the steps of every program in this process alone, and writes what it computed into the folder."""
    for number, case in enumerate(cases):
        with _limited(limit, f"the reference of {case.name}"), _precision(case.dtype):
            run = _Steps(case, None)
            torch.save(run.state(), folder / f"{number}-0.pt")
            for step in range(1, case.steps + 1):
                batch = run.batch(step)
                parts = run.losses_of_parts(batch, _Grid(case.mesh, 0).dp_size)
                found = run.step(batch)
                if not math.isfinite(found["loss"]):
                    raise ConfigError(f"{case.name}: the loss of the reference is {found['loss']} at step {step}")
                torch.save({**found, "parts": parts, "random": run.draws}, folder / f"{number}-{step}.pt")


def compare_with_reference(
    cases: Mapping[int, ParityCase], folder: Path, limit: float, collective: float
) -> list[RankFound]:
    """Takes the same steps on this rank, up to the first that differs anywhere."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=collective))
    found = []
    for number, case in cases.items():
        with _limited(limit, f"rank {rank}"), _precision(case.dtype), _naming_waits(rank, collective):
            found.append(_Comparison(case, folder, number, rank).run())
    dist.destroy_process_group()
    return found


class _Steps:
    """A program and its model: plain without a mesh, else as its `parallelize` makes it."""

    def __init__(self, case: ParityCase, mesh: DeviceMesh | None) -> None:
        self.case, self.mesh, self.program = case, mesh, case.functions()
        self._dtype = getattr(torch, case.dtype)
        torch.manual_seed(_SEED)
        model = self.program["model"]()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{case.name}: model() returned a {type(model).__name__}, not a torch.nn.Module")
        self.model = model._apply(lambda each: each.to(self._dtype) if each.is_floating_point() else each)
        if mesh is not None:
            placed = self.program["parallelize"](self.model, mesh)
            if placed is not None and not isinstance(placed, nn.Module):
                raise ConfigError(
                    f"{case.name}: parallelize() returned a {type(placed).__name__}: return the model, or nothing "
                    "where it was changed in place"
                )
            self.model = self.model if placed is None else placed
        self.outputs = _Outputs(self.model)
        make = self.program.get("optimizer", partial(_sgd))
        self.optimizer = make(self.model)
        self.draws = False  # whether a step moved torch's generator (dropout)

    def batch(self, step: int) -> Any:
        torch.manual_seed(_SEED + step)  # a batch of random numbers is the same on all ranks
        batch = self.program["batch"](step)
        return pytree.tree_map_only(Tensor, lambda each: each.to(self._dtype) if each.is_floating_point() else each, batch)

    def step(self, batch: Any) -> dict[str, Any]:
        before = torch.get_rng_state()
        with self.outputs.recorded():
            loss = self.loss(batch)
        self.draws = self.draws or not torch.equal(before, torch.get_rng_state())
        loss.backward()
        if "after_backward" in self.program:
            self.program["after_backward"](self.model, self.mesh)
        gradients = {name: each.grad for name, each in self._parameters()}
        gradients = {name: None if each is None else each.detach().clone() for name, each in gradients.items()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.full_tensor() if is_spread(loss) else loss
        return {"loss": float(value.detach()), "outputs": self.outputs.seen, "gradients": gradients, **self.state()}

    def loss(self, batch: Any) -> Tensor:
        loss = self.program["loss"](self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"{self.case.name}: loss() returned {what}, not one number in a tensor")
        return loss

    def losses_of_parts(self, batch: Any, count: int) -> list[float]:
        """Returns what this model computes from each data rank's rows alone, to tell how the loss is a mean."""
        if count == 1 or "shard_batch" in self.program:
            return []
        buffers = [each.clone() for each in self.model.buffers()]
        with torch.no_grad():
            losses = [float(self.loss(rows_of(batch, count, index))) for index in range(count)]
            for each, value in zip(self.model.buffers(), buffers, strict=True):
                each.copy_(value)
        return losses

    def state(self) -> dict[str, Any]:
        for each in self.model.modules():
            if hasattr(each, "reshard") and hasattr(each, "unshard"):
                each.reshard()  # fully_shard: what is gathered now has neither gradients nor new weights
        weights = {name: each.detach().clone() for name, each in self._parameters()}
        buffers = {_clean(name): each.detach().clone() for name, each in self.model.named_buffers()}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, each in self.model.named_parameters(remove_duplicate=False):
            tied[_clean(name)] = first.setdefault(id(each), _clean(name))
        return {"weights": weights, "buffers": buffers, "tied": {a: b for a, b in tied.items() if a != b}}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, each in self.model.named_parameters():
            if "_flat_param" in name:
                raise ConfigError(f"{self.case.name}: FullyShardedDataParallel flattens parameters: use fully_shard")
            yield _clean(name), each


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01, momentum=0.9)


class _Outputs:
    """What modules return in a forward pass, in the order in which they end; by name, call and position."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        self.places: dict[str, str] = {}  # the class and line of each module
        self._calls: dict[str, int] = {}
        self._active = False
        for name, module in model.named_modules():
            if not _WRAPPERS & module._modules.keys():
                self.places[_clean(name)] = f"{type(module).__name__}.forward ({_line_of(type(module).forward)})"
                module.register_forward_hook(partial(self._note, _clean(name)))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Not in the backward pass, where activation checkpointing calls modules again."""
        self.seen, self._calls, self._active = {}, {}, True
        yield
        self._active = False

    def _note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._active:
            return
        call = self._calls[name] = self._calls.get(name, 0) + 1
        for number, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.seen[f"{name}|{call}|{number}"] = leaf.detach().clone()


@dataclass
class _Comparison:
    case: ParityCase
    folder: Path
    number: int
    rank: int
    found: RankFound = field(init=False)

    def run(self) -> RankFound:
        from torch.distributed.device_mesh import init_device_mesh

        self.grid = grid = _Grid(self.case.mesh, self.rank)
        mesh = init_device_mesh("cpu", tuple(self.case.mesh.values()), mesh_dim_names=tuple(self.case.mesh))
        run, self.mesh = _Steps(self.case, mesh), mesh
        functions = [each for key in ("parallelize", "after_backward", "loss") if (each := run.program.get(key))]
        self.found = RankFound(self.rank, grid.dp_rank, run.outputs.places, [_source_of(each) for each in functions])
        before = torch.load(self.folder / f"{self.number}-0.pt")
        self.found.tied = before["tied"]
        if self._differs(0, before, run.state(), None):
            return self.found
        for step in range(1, self.case.steps + 1):
            batch = run.batch(step)
            own = run.program.get("shard_batch")
            batch = own(batch, mesh) if own else rows_of(batch, grid.dp_size, grid.dp_rank)
            expected = torch.load(self.folder / f"{self.number}-{step}.pt")
            self.found.draws = self.found.draws or expected["random"]
            if self._differs(step, expected, run.step(batch), expected["loss"]):
                break
        return self.found

    def _differs(self, step: int, expected: dict[str, Any], actual: dict[str, Any], loss: float | None) -> bool:
        """Compares everything of a step; returns whether anything differs on any rank."""
        found = self.found
        found.step, found.loss, found.reference_loss = step, actual.get("loss"), loss
        found.reference_parts = expected.get("parts", [])
        seen = {each.dtype for key in ("outputs",) for side in (expected, actual) for each in side.get(key, {}).values()}
        coarsest = max((_TOLERANCE.get(each, 1e-2) for each in seen), default=0.0)
        allowed = max(_TOLERANCE[getattr(torch, self.case.dtype)], coarsest)
        found.tolerance = self.case.tolerance or allowed
        parts: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for phase in PHASES:
            if phase in expected:
                found.differences += self._compare(phase, expected[phase], actual[phase], parts)
        everyone: list[Any] = [None] * self.grid.world_size
        shapes = {key: tuple(each.shape) for key, (each, _) in parts.items()}
        dist.all_gather_object(everyone, (shapes, found.loss, found.dp_rank))
        agrees = loss is None or losses_agree([(rank, value) for _, value, rank in everyone], loss, found.tolerance)
        self._explain(parts, [each for each, _, _ in everyone])
        return not agrees or any(each for each, _, _ in everyone)

    def _compare(
        self, phase: str, expected: Mapping[str, Any], actual: Mapping[str, Any], parts: dict[Any, Any]
    ) -> Iterator[Difference]:
        largest = max((float(each.abs().max()) for each in expected.values() if _has_values(each)), default=0.0)
        floor = largest * _SMALLEST if phase == "gradients" else 1e-12
        for name in {**expected, **(actual if phase != "outputs" else {})}:
            if name not in actual or name not in expected:
                if phase == "weights":
                    yield Difference(phase, name, "gone" if name not in actual else "new")
                continue
            whole, mine = expected[name], actual[name]
            if whole is None or (mine is None and not whole.any()):
                continue
            if mine is None:
                yield Difference(phase, name, "missing")
                continue
            scale = max(float(whole.abs().max()) if whole.numel() else 0.0, floor)
            pairs = list(self._pairs(phase, whole, mine))
            if not pairs:
                if phase != "outputs":
                    shape = f"{tuple(mine.shape)} in place of {tuple(whole.shape)}"
                    yield Difference(phase, name, "shape", text=shape)
                continue
            self.found.compared[phase] = self.found.compared.get(phase, 0) + 1
            local, reference = min(pairs, key=lambda pair: _apart(*pair, 1.0))
            apart = _apart(local, reference, scale)
            if apart > self.found.largest[0]:
                self.found.largest = (apart, phase, name)
            if not apart <= self.found.tolerance:
                parts[phase, name] = local, reference
                yield self._described(phase, name, apart, local, reference, scale)

    def _described(
        self, phase: str, name: str, apart: float, local: Tensor, reference: Tensor, scale: float
    ) -> Difference:
        factor, count = None, int((reference != 0).sum())
        if count > 1:
            value = float((local * reference).sum() / (reference * reference).sum())
            rest = _apart(local, value * reference, scale)
            factor = value if rest <= 10 * self.found.tolerance * max(abs(value), 1e-3) else None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        probe = torch.randn(local.shape, generator=generator, dtype=torch.float64)
        return Difference(
            phase, name, "zero" if not local.any() else "differs", apart, factor,
            probe=float((local * probe).sum()) / (scale * math.sqrt(local.numel())),
            part=(tuple(local.shape), float((reference * probe).sum())),
        )  # fmt: skip

    def _pairs(self, phase: str, whole: Tensor, mine: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's part of a tensor beside what it may be in the reference."""
        if not is_spread(mine):
            for part in _parts(whole, tuple(mine.shape), self.grid.factors):
                yield mine.double(), part.double()
            return
        from torch.distributed.tensor import Partial, Replicate

        if any(isinstance(each, Partial) for each in mine.placements):
            if phase == "outputs":
                return
            placements = [Replicate() if isinstance(each, Partial) else each for each in mine.placements]
            mine = mine.redistribute(placements=placements)
        cut = slice_of(mine)
        assert cut is not None
        index = tuple(slice(begin, begin + size) for begin, size in zip(cut.offset, cut.tensor.shape, strict=True))
        for part in _parts(whole, tuple(mine.shape), self.grid.factors[:1]):
            yield cut.tensor.double(), part[index].double()

    def _explain(self, parts: dict[tuple[str, str], tuple[Tensor, Tensor]], shapes: list[dict[Any, Any]]) -> None:
        """Finds the reduction over axes that would make a gradient that of the reference; all ranks take part."""
        keys = [key for key in dict.fromkeys(itertools.chain(*shapes)) if key[0] in ("gradients", "buffers")]
        keys = [key for key in keys if len({each.get(key) for each in shapes}) == 1][:_EXPLAINED]
        described = {(each.phase, each.name): each for each in self.found.differences}
        for key in keys:
            local, reference = parts[key]
            scale = float(reference.abs().max()) or 1.0
            allowed = 10 * self.found.tolerance
            # What the reference is, and what it becomes where ranks with different parts of it are averaged.
            wanted = {(): reference, **{axes: self._mean(reference, axes) for axes in _subsets(self.case.mesh)}}
            mixed = [each for each in wanted if not each or _apart(wanted[each], reference, scale) > allowed]
            for axes in wanted:
                mean = self._mean(local, axes)
                total = mean * math.prod(self.case.mesh[axis] for axis in axes)
                for how, value in (("mean", mean), ("sum", total)):
                    fitting = [each for each in mixed if _apart(value, wanted[each], scale) <= allowed]
                    described[key].reductions += [(how, axes, each) for each in fitting if axes or each]

    def _mean(self, tensor: Tensor, axes: AXES) -> Tensor:
        mean = tensor.clone()
        for axis in axes:
            dist.all_reduce(mean, group=self.mesh.get_group(axis))
            mean /= self.case.mesh[axis]
        return mean


class _Grid:
    """Where a rank is on the mesh. Batches are cut along data axes: data, replica, batch, fsdp, dp..."""

    def __init__(self, mesh: Mapping[str, int], rank: int) -> None:
        self.world_size = math.prod(mesh.values())
        here, rest = {}, rank
        for axis, size in reversed(mesh.items()):
            here[axis], rest = rest % size, rest // size
        data = [axis for axis in mesh if _DATA_AXES.fullmatch(axis)]
        self.dp_size, self.dp_rank = math.prod(mesh[axis] for axis in data), 0
        for axis in data:
            self.dp_rank = self.dp_rank * mesh[axis] + here[axis]
        others = [(size, here[axis]) for axis, size in mesh.items() if axis not in data]
        self.factors = [(self.dp_size, self.dp_rank), *others]


def rows_of(batch: Any, count: int, index: int) -> Any:
    """Returns the rows of one data rank; every tensor with as many rows as the first is cut."""
    tensors = [each for each in pytree.tree_leaves(batch) if isinstance(each, Tensor) and each.dim()]
    if count == 1 or not tensors:
        return batch
    rows = tensors[0].shape[0]
    if rows % count:
        raise ConfigError(
            f"batch(step) has {rows} rows, which {count} data-parallel ranks cannot have equal parts of: change the "
            "batch or the mesh, or define shard_batch(batch, mesh)"
        )
    begin, length = index * rows // count, rows // count
    cut = lambda each: each[begin : begin + length] if each.dim() and each.shape[0] == rows else each  # noqa: E731
    return pytree.tree_map_only(Tensor, cut, batch)


def _parts(whole: Tensor, shape: tuple[int, ...], factors: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yields parts of this shape: every axis of the mesh cuts one dimension, or none."""
    if tuple(whole.shape) == shape:
        yield whole
    if tuple(whole.shape) == shape or whole.dim() != len(shape):
        return
    for dimensions in itertools.product([None, *range(whole.dim())], repeat=len(factors)):
        part: Tensor | None = whole
        for dimension, (size, index) in zip(dimensions, factors, strict=True):
            if dimension is not None and part is not None:
                length, left = divmod(part.shape[dimension], size)
                part = None if left else part.narrow(dimension, index * length, length)
        if part is not None and tuple(part.shape) == shape:
            yield part


def _subsets(mesh: Mapping[str, int]) -> list[AXES]:
    axes = [axis for axis, size in mesh.items() if size > 1]
    return [each for count in range(1, len(axes) + 1) for each in itertools.combinations(axes, count)]


def _apart(one: Tensor, other: Tensor, scale: float) -> float:
    """Returns the largest difference, relative to a scale; infinite where one is not finite alone."""
    if not one.numel():
        return 0.0
    apart = float((one - other).abs().max())
    return math.inf if math.isnan(apart) else apart / (scale or 1.0)


def _has_values(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def _clean(name: str) -> str:
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _line_of(function: Callable[..., Any]) -> str:
    code = inspect.unwrap(function).__code__ if hasattr(inspect.unwrap(function), "__code__") else None
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else "built in"


def _source_of(function: Callable[..., Any]) -> tuple[str, int, list[str]]:
    """Returns file, first line and text of a function of the program."""
    try:
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
    except (OSError, TypeError):
        return "", 0, []
    return Path(inspect.getsourcefile(function) or "").name, first, lines


class _KeepFloat64(TorchFunctionMode):
    """Gives float64 to code that asks for float32 (`.float()` in a norm or a loss), which would round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64)
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with _KeepFloat64() if dtype == "float64" else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _limited(seconds: float, who: str) -> Iterator[None]:
    """Ends work that takes too long with the line of user code that it is at."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RankStalled(f"{who} did not end within {seconds:g} s (--limit); it was at {user_line(frame)}")

    before = signal.signal(signal.SIGALRM, stop)
    last = threading.Timer(seconds + 10, os._exit, (RankStalled.exit_code,))  # in code that no signal reaches
    last.daemon = True
    last.start()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        last.cancel()


@contextlib.contextmanager
def _naming_waits(rank: int, seconds: float) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error).lower() for sign in _TIMED_OUT) or time.monotonic() - began < seconds / 2:
            raise
        trace = sys.exc_info()[2]
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = user_line(trace.tb_frame if trace else None)
        raise RankMissing(
            f"rank {rank} waited {seconds:g} s for other ranks at {where}: they did not call the same collective"
        ) from None
