"""`lockstep export`: writes a trained model as a file that other programs open.

One process makes it, of a checkpoint that any number of ranks wrote. The file is loaded back and compared with the
model before it gets its final name.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.checkpoint import reader, tensor_file
from lockstep.checkpoint.storage import CheckpointStorage, sync_folder
from lockstep.config.schema import RunConfig
from lockstep.data.loader import batch_fetcher
from lockstep.data.stream_reader import is_stream
from lockstep.distributed.group import Group
from lockstep.engine.models import DEFAULT, Entry, Models
from lockstep.engine.weights import Frozen, Pretrained, are_left_out, digest_of, is_of_peft, names_of
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime.base import seed_generators
from lockstep.runtime.cpu import CpuRuntime
from lockstep.runtime.moving import map_tensors
from lockstep.strategy.base import SingleStrategy
from lockstep.tasks.create import create_task
from lockstep.tasks.task import Task, defines
from lockstep.tasks.trainer import datasets_of

# Of a batch that is a mapping: what a model is trained with and not called with.
_TARGETS = ("labels", "label", "targets", "target")
_EXAMPLES = 2  # a batch of one would be taken for a size that never changes


class NotTheSame(LockstepError):
    """The export does not compute what the model computes."""

    exit_code = 5


@dataclass(frozen=True)
class Exported:
    """The file, and how far its outputs are from those of the model."""

    out: Path
    difference: float  # the largest, over all outputs of the example, relative to the largest output
    compared: str  # what was compared


def model_of(config: RunConfig, task: Task, folder: Path, step: int | None, averages: bool = False) -> nn.Module:
    """Returns the task's model on the host, with the weights of a checkpoint; without a step, its initial ones."""
    runtime = CpuRuntime()
    seed_generators(runtime, config.seed)
    made = task.model()
    if isinstance(made, Mapping):
        raise ConfigError(
            f"task: model() returned {len(made)} models ({', '.join(made)}): only a single one can be exported as a "
            "program; --to safetensors writes the weights of all"
        )
    group, strategy = Group(0, 1, timeout=0.0), SingleStrategy(runtime)
    strategy.fill(made, config.seed, task.init_weights if defines(task, "init_weights") else None)
    left_out = are_left_out(made, config.checkpoint.save)
    if config.init_from is not None and left_out:
        Pretrained(config.init_from, group, strategy).before_placing(made)
    if step is None:
        return made
    frozen = None
    if left_out:
        names = names_of(made)
        frozen = Frozen(frozenset(names), digest_of(made, names, group.activity))
    models = Models(strategy)
    models.add(Entry(DEFAULT, made, made, None, "float32", None, False, frozen=frozen))
    storage = CheckpointStorage(folder / "checkpoints")
    loaded = reader.restore(storage, group, step)
    assert loaded is not None
    state = {key: value for key, value in loaded.state.items() if key in ("model_extra", "models", "frozen")}
    models.load(loaded.model, state, str(storage.path(step)))
    if averages:
        with torch.no_grad():
            for name, average in _averages_in(loaded.state, storage.path(step)).items():
                made.get_parameter(name).copy_(average)
    return made.eval()


def _averages_in(state: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    """Returns averages by the names that the weights have in a checkpoint."""
    saved: Mapping[str, Any] = state.get("averages") or {}
    if not saved:
        raise ConfigError(f"--weights ema: {source} has no averages: the run was not trained with train.ema")
    single = len(state["models"]) == 1
    return {
        name if single else f"{model}.{name}": average
        for model, each in saved.items()
        for name, average in each["weights"].items()
    }


def example_of(task: Task, config: RunConfig, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments to call the model with: of the task, else of its first batch."""
    if defines(task, "example_inputs"):
        given = task.example_inputs()
        by_name = isinstance(given, Mapping)
        args = () if by_name else tuple(given) if isinstance(given, (tuple, list)) else (given,)
        named = dict(given) if by_name else {}
        _called(model, args, named)
        return args, named
    args, named = _from_batch(_first_batch(task, config), model)
    try:
        _called(model, args, named)
    except Exception as error:
        raise ConfigError(
            f"task: the model cannot be called with the inputs of a batch ({_first_line(error)}): "
            "define example_inputs(self), which returns a tuple of arguments or a mapping by name"
        ) from None
    return args, named


def to_torch_export(model: nn.Module, example: Any, out: Path, tolerance: float) -> Exported:
    args, named = example
    wanted = _called(model, args, named)
    program = _program(model, args, named)

    def write(place: Path) -> None:
        torch.export.save(program, str(place))

    def check(place: Path) -> tuple[float, str]:
        again = torch.export.load(str(place)).module()
        return _difference(wanted, _called(again, args, named)), "outputs of torch.export.load"

    return _published(out, write, check, tolerance)


def to_onnx(model: nn.Module, example: Any, out: Path, tolerance: float) -> Exported:
    onnx = _required("onnx", "onnx", "--to onnx")
    _required("onnxscript", "onnx", "--to onnx")
    args, named = example
    wanted = _called(model, args, named)
    program = _program(model, args, named)

    def write(place: Path) -> None:
        with _quietly():
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        assert made is not None
        made.save(str(place), external_data=False)

    def check(place: Path) -> tuple[float, str]:
        from onnx.reference import ReferenceEvaluator

        onnx.checker.check_model(str(place))
        session = ReferenceEvaluator(str(place))
        given = [each for each in _leaves((args, named)) if isinstance(each, Tensor)]
        feeds = {name: each.numpy() for name, each in zip(session.input_names, given, strict=True)}
        found = [torch.as_tensor(each) for each in session.run(None, feeds)]
        return _difference(wanted, found), "outputs of ONNX's reference evaluator"

    return _published(out, write, check, tolerance)


def to_hf(
    model: nn.Module, fresh: Callable[[], nn.Module], task: Task, example: Any, out: Path, tolerance: float
) -> Exported:
    """Calls the model's save_pretrained; of peft's models the adapter alone is saved."""
    adapter = is_of_peft(model)
    transformers = sys.modules.get("transformers")
    if not adapter and (transformers is None or not isinstance(model, transformers.PreTrainedModel)):
        raise ConfigError(
            f"--to hf: the task's model is a {type(model).__name__}, which is no model of transformers or peft: "
            "use --to safetensors for its weights, or --to torch-export or onnx for the whole program"
        )
    args, named = example
    wanted = _called(model, args, named)

    def write(place: Path) -> None:
        saving: Any = model
        saving.save_pretrained(str(place))
        tokenizer: Any = getattr(task, "tokenizer", None)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(place))

    def check(place: Path) -> tuple[float, str]:
        if adapter:
            peft = sys.modules["peft"]
            base: Any = fresh()
            again = peft.PeftModel.from_pretrained(base.unload(), str(place))
            what = "outputs of PeftModel.from_pretrained"
        else:
            again = type(model).from_pretrained(str(place))  # type: ignore[attr-defined]
            what = f"outputs of {type(model).__name__}.from_pretrained"
        return _difference(wanted, _called(again.eval(), args, named)), what

    return _published(out, write, check, tolerance)


def to_safetensors(folder: Path, step: int, out: Path, averages: bool = False) -> Exported:
    """Writes all weights to one file, and compares every byte with the checkpoint's."""
    from lockstep.checkpoint import manifest
    from lockstep.checkpoint.merge import merge
    from lockstep.checkpoint.sources import open_source

    storage = CheckpointStorage(folder / "checkpoints")
    group = Group(0, 1, timeout=0.0)
    problem = storage.problem(step)
    if problem is not None:
        raise ConfigError(f"{storage.path(step)} is damaged: {problem}. Name another step with --step")
    saved_as = manifest.read(storage.path(step))
    averaged: dict[str, Tensor] = {}
    if averages:
        loaded = reader.restore(storage, group, step)
        assert loaded is not None
        averaged = _averages_in(loaded.state, storage.path(step))

    def write(place: Path) -> None:
        merge(storage.path(step), saved_as, place, average=averages)

    def check(place: Path) -> tuple[float, str]:
        saved, again = open_source(str(storage.path(step)), group.activity), open_source(str(place), group.activity)
        try:
            same = all(
                tensor_file.memory(each.whole().contiguous())
                == tensor_file.memory(averaged[name] if name in averaged else saved.tensors[name].whole())
                for name, each in again.tensors.items()
            )
            count = len(again.tensors)
        finally:
            saved.close()
            again.close()
        return 0.0 if same else math.inf, f"all bytes of {count} weights"

    return _published(out, write, check, 0.0)


def _program(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> torch.export.ExportedProgram:
    """Exports a model with a batch dimension of any length, where the model allows it."""
    batch = {0: torch.export.Dim.AUTO}

    def shape(value: Any) -> Any:
        return map_tensors(lambda each: dict(batch) if each.dim() else {}, value, lambda other: None)  # type: ignore

    shapes = {**dict(zip(inspect.signature(model.forward).parameters, map(shape, args), strict=False)),
              **{name: shape(value) for name, value in named.items()}}  # fmt: skip
    try:
        return torch.export.export(model, args, named, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be exported as one program: {_first_line(error)}. torch.export needs a "
            "forward pass that does not branch on the values of tensors; --to safetensors writes the weights"
        ) from error


def _published(
    out: Path, write: Callable[[Path], None], check: Callable[[Path], tuple[float, str]], tolerance: float
) -> Exported:
    """Writes a file under a temporary name, and renames it once it is known to be right."""
    temporary = out.with_name(f".partial-{out.name}")
    _remove(temporary)
    try:
        write(temporary)
        difference, compared = check(temporary)
        if not difference <= tolerance:
            raise NotTheSame(
                f"--out {out}: not written: the {compared} differ from the model's by {difference:.3g} of the largest; "
                f"{tolerance:g} is allowed (--tolerance)"
            )
        temporary.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise NotTheSame(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        _remove(temporary)
    return Exported(out, difference, compared)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides what torch's exporter reports of packages and of future changes."""
    theirs = logging.getLogger("torch.onnx")
    before = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.setLevel(before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _called(model: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        return [each for each in _leaves(model(*args, **named)) if isinstance(each, Tensor)]


def _leaves(value: Any) -> list[Any]:
    return list(torch.utils._pytree.tree_leaves(value))


def _difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    """Returns the largest difference, relative to the largest value of its output; infinite for other shapes."""
    if len(wanted) != len(found):
        return math.inf
    worst = 0.0
    for one, other in zip(wanted, found, strict=True):
        if one.shape != other.shape:
            return math.inf
        if one.numel():
            scale = max(float(one.double().abs().max()), 1e-12)
            apart = float((one.double() - other.double()).abs().max()) / scale
            worst = math.inf if math.isnan(apart) else max(worst, apart)
    return worst


def _first_batch(task: Task, config: RunConfig) -> Any:
    data: Any = datasets_of(task, config)["train"]
    collate = getattr(task, "collate", None)
    if is_stream(data):
        return (collate or default_collate)(list(itertools.islice(iter(data), _EXAMPLES)))
    import numpy as np

    count = min(_EXAMPLES, len(data))
    return batch_fetcher(data, collate)(np.arange(count, dtype=np.int64))


def _from_batch(batch: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs of a batch: of a mapping what forward takes and is no target, of a sequence its first part."""
    if isinstance(batch, Mapping):
        takes = inspect.signature(model.forward).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        return (), {
            name: value
            for name, value in batch.items()
            if name not in _TARGETS and (name in takes or any_name) and isinstance(value, Tensor)
        }
    if isinstance(batch, (list, tuple)):
        return (batch[0],), {}
    return (batch,), {}


def _first_line(error: Exception) -> str:
    said = str(error).strip()
    return f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"


def _required(module: str, extra: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{what}: needs {module}: pip install 'lockstep-train[{extra}]'") from None


def export(
    config: RunConfig, folder: Path, step: int, to: str, out: Path, tolerance: float, averages: bool = False
) -> Exported:
    """Writes the model of a checkpoint in another form, and checks it."""
    if to == "safetensors":
        return to_safetensors(folder, step, out, averages)
    task = create_task(config.task)
    model = model_of(config, task, folder, step, averages)
    example = example_of(task, config, model)
    if to == "hf":
        return to_hf(model, lambda: model_of(config, task, folder, None), task, example, out, tolerance)
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # what is kept for the next token is no output of a program
    make = to_torch_export if to == "torch-export" else to_onnx
    return make(model, example, out, tolerance)
