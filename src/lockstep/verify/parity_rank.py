"""One process of a parity check: takes the steps of a program and compares its parts with the reference."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.distributed.watch.heartbeat import user_line
from lockstep.errors import ConfigError, RankMissing, RankStalled
from lockstep.strategy.slices import is_spread, local_part, slice_of
from lockstep.verify.parity_findings import AXES, DATA_AXES, PHASES, Difference, RankFound, losses_agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.verify.parity import ParityCase

_SEED = 20
# Relative to the largest value of a tensor: rounding is far below, faults are far above.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# A gradient that is zero but for rounding is compared with the largest of all gradients.
_SMALLEST = 1e-6
# What DDP, torch.compile and activation checkpointing put into the names of modules.
_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
_EXPLAINED = 32  # gradients that are reduced over axes, to see which reduction is missing


def compute_reference(cases: Sequence[ParityCase], folder: Path, limit: float) -> None:
    """Takes the steps of every program in this process alone, and writes what it computed into the folder."""
    for number, case in enumerate(cases):
        with _limited(limit, f"the reference of {case.name}"), _precision(case.dtype):
            run = _Training(case, None)
            torch.save(run.state(), folder / f"{number}-0.pt")
            for step in range(1, case.steps + 1):
                found = run.step(run.batch(step))
                if not math.isfinite(found["loss"]):
                    raise ConfigError(f"{case.name}: the loss of the reference is {found['loss']} at step {step}")
                torch.save(found, folder / f"{number}-{step}.pt")


def compare_with_reference(cases: Mapping[int, ParityCase], folder: Path, limit: float, wait: float) -> list[RankFound]:
    """Takes the same steps on this rank, up to the first that differs on any."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        warnings.simplefilter("ignore")  # rank 0 shows them
    store = torch._C._distributed_c10d.FileStore(str(folder / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=wait))
    found = []
    for number, case in cases.items():
        with _limited(limit, f"rank {rank}", wait), _precision(case.dtype):
            found.append(_Comparison(case, rank).run(folder, number))
    dist.destroy_process_group()
    return found


class _Training:
    """A program and its model: plain without a mesh, else as its `parallelize` makes it."""

    def __init__(self, case: ParityCase, mesh: DeviceMesh | None) -> None:
        self._case, self._mesh, self.program = case, mesh, case.functions()
        self._dtype = getattr(torch, case.dtype)
        torch.manual_seed(_SEED)
        model = self._checked("model", self.program["model"]())
        self.model = model._apply(self._cast)  # type: ignore[no-untyped-call]
        if mesh is not None:
            placed = self.program["parallelize"](model, mesh)
            self.model = model if placed is None else self._checked("parallelize", placed)
        self.outputs = _Outputs(self.model)
        self._optimizer = self.program.get("optimizer", _sgd)(self.model)

    def _checked(self, function: str, model: Any) -> nn.Module:
        if isinstance(model, nn.Module) and not any("_flat_param" in name for name, _ in model.named_parameters()):
            return model
        what = "FullyShardedDataParallel (use fully_shard)" if isinstance(model, nn.Module) else type(model).__name__
        raise ConfigError(f"{self._case.name}: {function}() must return a torch.nn.Module, and returned a {what}")

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def batch(self, step: int) -> Any:
        torch.manual_seed(_SEED + step)  # a batch of random numbers is the same on all ranks
        return tree_map_only(Tensor, self._cast, self.program["batch"](step))

    def step(self, batch: Any) -> dict[str, Any]:
        before = torch.get_rng_state()
        with self.outputs.recorded():
            loss = self.loss(batch)
        draws = not torch.equal(before, torch.get_rng_state())
        loss.backward()  # type: ignore[no-untyped-call]
        if "after_backward" in self.program:
            self.program["after_backward"](self.model, self._mesh)
        gradients = {_clean(name): each.grad for name, each in self.model.named_parameters()}
        gradients = {name: None if each is None else each.detach().clone() for name, each in gradients.items()}
        self._optimizer.step()
        self._optimizer.zero_grad()
        value = float((loss.full_tensor() if is_spread(loss) else loss).detach())
        return {"loss": value, "draws": draws, "outputs": self.outputs.seen, "gradients": gradients, **self.state()}

    def loss(self, batch: Any) -> Tensor:
        loss = self.program["loss"](self.model, batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        what = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{self._case.name}: loss() must return one number in a tensor, and returned a {what}")

    def state(self) -> dict[str, Any]:
        for each in self.model.modules():
            if hasattr(each, "unshard"):  # fully_shard: gathered parameters are not those that were trained
                each.reshard()
        first: dict[int, str] = {}
        every = [(_clean(name), each) for name, each in self.model.named_parameters(remove_duplicate=False)]
        return {
            "weights": {_clean(name): each.detach().clone() for name, each in self.model.named_parameters()},
            "buffers": {_clean(name): each.detach().clone() for name, each in self.model.named_buffers()},
            "tied": {name: first[id(each)] for name, each in every if first.setdefault(id(each), name) != name},
        }


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01, momentum=0.9)


class _Outputs:
    """What modules return in a forward pass, in the order in which they end: by name, call and position."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        self.places: dict[str, str] = {}  # the class and line of every module
        self._calls: dict[str, int] | None = None
        for name, module in model.named_modules():
            if not _WRAPPERS & module._modules.keys():
                file, line, _ = _source_of(type(module).forward)
                self.places[_clean(name)] = f"{type(module).__name__}.forward ({file}:{line})"
                module.register_forward_hook(partial(self._note, _clean(name)))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records no backward pass, where activation checkpointing calls modules again."""
        self.seen, self._calls = {}, {}
        yield
        self._calls = None

    def _note(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._calls is None:
            return
        call = self._calls[name] = self._calls.get(name, 0) + 1
        for number, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.seen[f"{name}|{call}|{number}"] = leaf.detach().clone()


class _Comparison:
    def __init__(self, case: ParityCase, rank: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._case, self._grid = case, _Grid(case.mesh, rank)
        self._mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        self._run = run = _Training(case, self._mesh)
        functions = [run.program.get(name) for name in ("loss", "parallelize", "after_backward")]
        sources = [_source_of(each) for each in functions if each is not None]
        self._found = RankFound(rank, self._grid.dp_rank, run.outputs.places, sources, {})
        self._parts: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}  # what differs: here, in the reference
        self._buffers: Mapping[str, Tensor] = {}  # before the step

    def run(self, folder: Path, number: int) -> RankFound:
        expected = torch.load(folder / f"{number}-0.pt", weights_only=True)
        self._found.tied = expected["tied"]
        if self._differs(0, expected, self._run.state()):
            return self._found
        for step in range(1, self._case.steps + 1):
            batch = self._run.batch(step)
            if "shard_batch" in self._run.program:
                batch = self._run.program["shard_batch"](batch, self._mesh)
            else:
                batch = rows_of(batch, self._grid.dp_size, self._grid.dp_rank)
            if self._differs(
                step, torch.load(folder / f"{number}-{step}.pt", weights_only=True), self._run.step(batch)
            ):
                break
        return self._found

    def _differs(self, step: int, expected: dict[str, Any], actual: dict[str, Any]) -> bool:
        """Compares everything of a step; returns whether anything is wrong on any rank."""
        found, reference = self._found, expected.get("loss")
        found.step, found.loss, found.reference_loss = step, actual.get("loss"), reference
        found.draws = found.draws or expected.get("draws", False)
        seen = {each.dtype for side in (expected, actual) for each in side.get("outputs", {}).values()}
        allowed = max(_TOLERANCE.get(each, 1e-9) for each in (*seen, getattr(torch, self._case.dtype)))
        found.tolerance, found.compared, self._parts = self._case.tolerance or allowed, {}, {}
        found.differences = []
        known = (
            PHASES if "shard_batch" not in self._run.program else list(PHASES)[1:]
        )  # rows may be anywhere in outputs
        for phase in (each for each in known if each in expected):
            found.differences += self._compare(phase, expected[phase], actual[phase])
        self._buffers = actual["buffers"]
        shapes = self._gather([[*key, list(each.shape)] for key, (each, _) in self._parts.items()])
        self._explain([{(phase, name): tuple(shape) for phase, name, shape in each} for each in shapes])
        everyone = self._gather((found.has_fault, found.dp_rank, found.loss))
        agrees = reference is None or losses_agree([each[1:] for each in everyone], reference, found.tolerance)
        return not agrees or any(has_fault for has_fault, _, _ in everyone)

    def _gather(self, mine: Any) -> list[Any]:
        """Returns plain data of all ranks, as JSON: nothing that another process sends is unpickled."""
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        texts = [torch.zeros(int(max(lengths)), dtype=torch.uint8) for _ in lengths]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, len(texts[0]) - len(text))))
        return [json.loads(bytes(each[: int(length)].tolist())) for each, length in zip(texts, lengths, strict=True)]

    def _compare(self, phase: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Iterator[Difference]:
        values = {name: each for name, each in expected.items() if each is not None and each.numel()}
        floor = _SMALLEST * max(map(_largest, values.values()), default=0.0) if phase == "gradients" else 0.0
        if phase == "weights":
            yield from (Difference(phase, name, "gone") for name in expected if name not in actual)
            yield from (Difference(phase, name, "new") for name in actual if name not in expected)
        for name, whole in ((name, whole) for name, whole in values.items() if name in actual):
            mine, scale = actual[name], max(_largest(whole), floor) or 1.0
            pairs = [] if mine is None else list(self._pairs(phase, whole, mine))
            if not pairs:
                if phase != "outputs" and (mine is not None or whole.any()):
                    yield Difference(phase, name, "missing" if mine is None else "shape")
                continue
            local, reference = next((pair for pair in pairs if _apart(*pair, scale) <= self._found.tolerance), pairs[0])
            apart = _apart(local, reference, scale)
            self._found.compared[phase] = self._found.compared.get(phase, 0) + 1
            if apart <= self._found.tolerance:
                self._found.largest = max(self._found.largest, apart)
            else:
                self._parts[phase, name] = local, reference
                before = self._buffers.get(name) if phase == "buffers" else None
                is_stale = before is not None and torch.equal(local_part(before), local_part(mine))
                kind = "stale" if is_stale else "differs" if local.any() else "zero"
                yield Difference(phase, name, kind, apart, self._factor(local, reference, scale))

    def _factor(self, local: Tensor, reference: Tensor, scale: float) -> float | None:
        if int((reference != 0).sum()) < 2:
            return None
        factor = float((local * reference).sum() / reference.square().sum())
        rest = _apart(local, factor * reference, scale)
        return factor if rest <= 10 * self._found.tolerance * max(abs(factor), 1e-3) else None

    def _pairs(self, phase: str, whole: Tensor, mine: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's part of a tensor beside what it may be a part of in the reference."""
        is_output = phase == "outputs"
        if not is_spread(mine):
            for part in _parts(whole, mine.shape, self._grid.factors, is_output):
                yield _real(mine), _real(part)
            return
        from torch.distributed.tensor import Partial, Replicate

        reduced = [Replicate() if isinstance(each, Partial) else each for each in mine.placements]
        if is_output and reduced != list(mine.placements):
            return
        mine = mine.redistribute(placements=reduced)
        cut = slice_of(mine)
        assert cut is not None
        index = tuple(slice(begin, begin + size) for begin, size in zip(cut.offset, cut.tensor.shape, strict=True))
        for part in _parts(whole, mine.shape, self._grid.factors[:1], is_output):
            yield _real(cut.tensor), _real(part[index])

    def _explain(self, shapes: list[dict[tuple[str, str], tuple[int, ...]]]) -> None:
        """Finds reductions over axes that make a tensor that of the reference; all ranks take part."""
        keys = [key for key in dict.fromkeys(itertools.chain(*shapes)) if len({each.get(key) for each in shapes}) == 1]
        others = [key for key in keys if key[0] in ("gradients", "buffers")][:_EXPLAINED]
        described = {(each.phase, each.name): each for each in self._found.differences}
        for key in (*(key for key in keys if key[0] == "outputs"), *others):
            local, reference = self._parts[key]
            scale, allowed = _largest(reference) or 1.0, 10 * self._found.tolerance
            subsets = self._grid.others if key[0] == "outputs" else self._grid.subsets
            # What the reference is, and what it becomes where ranks with different parts of it are averaged.
            wanted = {(): reference, **{axes: self._mean(reference, axes) for axes in subsets}}
            mixed = [each for each in wanted if not each or _apart(wanted[each], reference, scale) > allowed]
            for axes in wanted:
                mean = self._mean(local, axes)
                if axes not in mixed and _apart(mean, local, scale) > allowed:
                    described[key].unequal = axes
                for how, value in (("mean", mean), ("sum", mean * self._grid.size(axes))):
                    apart = {each: _apart(value, wanted[each], scale) for each in mixed if not set(each) & set(axes)}
                    fitting = [each for each in apart if apart[each] <= allowed and (axes or each)]
                    described[key].reductions += [(how, axes, each) for each in fitting]

    def _mean(self, tensor: Tensor, axes: AXES) -> Tensor:
        mean = tensor.clone()
        for axis in axes:
            dist.all_reduce(mean, group=self._mesh.get_group(axis))
        return mean / self._grid.size(axes)


class _Grid:
    """Where a rank is on the mesh. Batches are cut along data axes: data, replica, batch, fsdp, dp..."""

    def __init__(self, mesh: Mapping[str, int], rank: int) -> None:
        self._mesh, here, rest = mesh, {}, rank
        for axis, size in reversed(list(mesh.items())):
            here[axis], rest = rest % size, rest // size
        data = tuple(axis for axis in mesh if re.fullmatch(DATA_AXES, axis))
        self.dp_size, self.dp_rank = self.size(data), 0
        for axis in data:
            self.dp_rank = self.dp_rank * mesh[axis] + here[axis]
        self.others: list[AXES] = [(axis,) for axis in mesh if axis not in data]
        self.subsets: list[AXES] = [
            axes for count in range(1, len(mesh) + 1) for axes in itertools.combinations(mesh, count)
        ]
        # Into how many parts tensors may be cut, and which of them this rank has.
        self.factors = [(self.dp_size, self.dp_rank), *((mesh[axis], here[axis]) for (axis,) in self.others)]

    def size(self, axes: AXES) -> int:
        return math.prod(self._mesh[axis] for axis in axes)


def rows_of(batch: Any, count: int, index: int) -> Any:
    """Returns the rows of one data rank: every tensor of the batch is cut along its first dimension."""

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        length, left = divmod(tensor.shape[0], count)
        if left:
            raise ConfigError(
                f"batch(step) has a tensor of {tensor.shape[0]} rows, which {count} data-parallel ranks cannot have "
                "equal parts of: change the batch or the mesh, or define shard_batch(batch, mesh)"
            )
        return tensor.narrow(0, index * length, length)

    return batch if count == 1 else tree_map_only(Tensor, cut, batch)


def _parts(whole: Tensor, shape: Sequence[int], factors: Sequence[tuple[int, int]], rows: bool) -> Iterator[Tensor]:
    """Yields parts of this shape: every factor cuts one dimension, or none; with `rows`, the first cuts rows rather."""
    if whole.dim() != len(shape):
        return
    free: list[int | None] = [None, *range(whole.dim())]
    first = sorted(free, key=lambda each: each != 0) if rows else free
    for dimensions in itertools.product(first, *[free] * (len(factors) - 1)):
        part: Tensor | None = whole
        for dimension, (size, index) in zip(dimensions, factors, strict=True):
            if part is not None and dimension is not None and size > 1:
                length, left = divmod(part.shape[dimension], size)
                part = None if left else part.narrow(dimension, index * length, length)
        if part is not None and part.shape == shape:
            yield part
            if whole.shape == shape:
                return


def _apart(one: Tensor, other: Tensor, scale: float) -> float:
    """Returns the largest difference relative to a scale, infinite where it is not a number."""
    apart = float((one - other).abs().max()) if one.numel() else 0.0
    return apart / scale if math.isfinite(apart) else math.inf


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _clean(name: str) -> str:
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _source_of(function: Callable[..., Any]) -> tuple[str, int, list[str]]:
    """Returns file, first line and text of a function."""
    function = inspect.unwrap(function)
    try:
        lines, first = inspect.getsourcelines(function)
        return Path(inspect.getsourcefile(function) or "").name, first, lines
    except (OSError, TypeError):
        return getattr(function, "__module__", None) or "", 0, [getattr(function, "__name__", "")]


class _KeepFloat64(TorchFunctionMode):
    """Gives float64 to code that asks for float32, such as `.float()` in a norm or a loss: it would round."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64)
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    torch.set_default_dtype(getattr(torch, dtype))
    with _KeepFloat64() if dtype == "float64" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _limited(seconds: float, who: str, wait: float = 0.0) -> Iterator[None]:
    """Ends what takes too long, and names the line of user code where ranks wait for each other."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise RankStalled(f"{who} did not end within {seconds:g} s (--limit): it was at {user_line(frame)}")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        where = f"at {user_line(frame)}: they did not call the same collective"
        raise RankMissing(f"{who} waited {wait:g} s for other ranks {where}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
