"""`lockstep export`: writes a trained model as a file that other programs open.

One process makes it, of a checkpoint that any number of ranks wrote.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lockstep.checkpoint import reader, tensor_file
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.config.schema import After, RunConfig
from lockstep.data.loader import BatchFetcher
from lockstep.data.stream_reader import is_stream
from lockstep.engine.run import Run
from lockstep.engine.weights import is_of_peft
from lockstep.errors import CheckpointError, ConfigError
from lockstep.record.writers import write_json
from lockstep.runtime.moving import map_tensors
from lockstep.tasks.create import create_task
from lockstep.tasks.evaluate import RESULT_FILE, bring_back, weights_asked_for
from lockstep.tasks.task import Task, defines
from lockstep.tasks.trainer import datasets_of

# Of a batch that is a mapping: what a model is trained with and not called with.
_TARGETS = ("labels", "label", "targets", "target")
_EXAMPLES = 2  # a batch of one would be taken for a size that never changes


def export(run: Run, config: RunConfig, after: After) -> dict[str, Any]:
    """Writes the model of a checkpoint in a form that needs the task: a program, or a folder of Hugging Face."""
    task = create_task(config.task)
    task.begin(run, config)
    bring_back(run, task, config, after, [])
    if len(run.modules) > 1:
        raise ConfigError(
            f"task: model() returned {len(run.modules)} models ({', '.join(run.modules)}): only a single one can be "
            "exported as a program; --to safetensors writes the weights of all"
        )
    model: Any = run.module.eval()
    write = _write_pretrained if after.to == "hf" else _write_program
    with weights_asked_for(run, after), _written(Path(str(after.out))) as temporary:
        if after.merge:
            if not is_of_peft(model):
                raise ConfigError(f"--merge: the task's model is a {type(model).__name__} without adapters of peft")
            model = model.merge_and_unload()
        write(model, task, config, str(after.to), temporary)
    write_json(run.folder / RESULT_FILE, {"out": str(after.out), "step": after.step})
    return {"status": "completed", "metrics": {}}


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Gives the name to write to; the file, or folder, gets its own name at the end of the block."""
    temporary = out.with_name(f".partial-{out.name}")
    _remove(temporary)
    try:
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        _remove(temporary)


def write_weights(folder: Path, step: int, out: Path, averages: bool) -> bool:
    """Writes one file of whole tensors, one after the other, whatever number of ranks wrote the checkpoint. Returns
    whether frozen weights are missing in it, as in the checkpoint."""
    storage = CheckpointStorage(folder / "checkpoints")
    loaded = reader.read(storage, step, slices=True)
    try:
        once: dict[int, tuple[str, Any]] = {}  # of tied weights the first
        for name, each in loaded.model.items():
            once.setdefault(id(each), (name, each))
        tensors = dict(once.values())
        if averages:
            tensors |= _averages(loaded, storage.path(step), tensors)
        with _written(out) as temporary, temporary.open("xb") as stream:
            tensor_file.write(stream.write, tensors, {"format": "pt"})
            stream.flush()
            os.fsync(stream.fileno())
        return bool(loaded.state.get("frozen"))
    finally:
        loaded.close()


def _averages(loaded: reader.Loaded, source: Path, weights: Mapping[str, Any]) -> dict[str, Any]:
    if not loaded.state.get("averages"):
        raise ConfigError(f"--weights ema: {source} has no averages: the run was not trained with train.ema")
    try:
        one = len(loaded.state["models"]) == 1
        return {
            name: each
            for model, average in loaded.state["averages"].items()
            for inner, each in average["weights"].items()
            if (name := inner if one else f"{model}.{inner}") in weights and each.shape == weights[name].shape
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{source} is damaged: its averages cannot be read: {error}") from None


def _write_pretrained(model: Any, task: Task, config: RunConfig, to: str, out: Path) -> None:
    """Calls save_pretrained of a model of transformers, or of peft, which saves the adapter alone."""
    if not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"--to hf: the task's model is a {type(model).__name__}, which is no model of transformers or peft: "
            "use --to safetensors for its weights, or --to torch-export or onnx for the whole program"
        )
    model.save_pretrained(str(out))
    tokenizer: Any = getattr(task, "tokenizer", None)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(out))


def _write_program(model: Any, task: Task, config: RunConfig, to: str, out: Path) -> None:
    if to == "onnx" and importlib.util.find_spec("onnxscript") is None:
        raise ConfigError("--to onnx: needs onnxscript: pip install 'lockstep-train[onnx]'")
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # what is kept for the next token is no output of a program
    args, named = _example(task, config, model)
    names = dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
    shapes = {name: _shape(value) for name, value in {**names, **named}.items()}
    try:
        program = torch.export.export(model, args, named, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be exported as one program: {_first_line(error)}. torch.export needs inputs that the "
            "model can be called with (Task.example_inputs) and a forward pass that does not branch on the values of "
            "tensors; --to safetensors writes the weights"
        ) from error
    if to == "torch-export":
        with out.open("xb") as stream:  # whatever its name: of a path, torch wants one with a suffix
            torch.export.save(program, stream)
        return
    made = torch.onnx.export(program, dynamo=True, verbose=False)
    assert made is not None
    made.save(str(out), external_data=False)


def _shape(value: Any) -> Any:
    """Returns a first dimension of any length for every tensor, where the model allows it."""
    batch = {0: torch.export.Dim.AUTO}
    return map_tensors(lambda each: dict(batch) if each.dim() else {}, value, lambda other: None)  # type: ignore


def _example(task: Task, config: RunConfig, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments to call the model with: of the task, else of its first batch.

    Of a batch that is a mapping, what forward takes and is no target; of a sequence its first part.
    """
    if defines(task, "example_inputs"):
        given = task.example_inputs()
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}
    data: Any = datasets_of(task, config)["train"]
    collate = getattr(task, "collate", None)
    if is_stream(data):
        batch = (collate or default_collate)(list(itertools.islice(iter(data), _EXAMPLES)))
    else:
        batch = BatchFetcher(data, collate)(np.arange(min(_EXAMPLES, len(data)), dtype=np.int64))
    if isinstance(batch, Mapping):
        takes = inspect.signature(model.forward).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        return (), {
            name: value
            for name, value in batch.items()
            if name not in _TARGETS and (name in takes or any_name) and isinstance(value, Tensor)
        }
    return (batch[0] if isinstance(batch, (list, tuple)) else batch,), {}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
