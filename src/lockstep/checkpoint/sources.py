"""Opens weights that others have saved: a run, a checkpoint, a safetensors file, a folder of Hugging Face's.

Pickles are not read: they can run code, and no part of a tensor can be read by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lockstep import run_files
from lockstep.checkpoint import manifest, ranges
from lockstep.checkpoint.header import Entry, read_header
from lockstep.checkpoint.manifest import INDEX_FILE, MANIFEST_FILE, MODEL_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.sharded_reader import StoredTensor, place
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.tensor_file import dtype_of
from lockstep.config.plain import read_text
from lockstep.config.yaml_text import parse_yaml
from lockstep.distributed.activity import Activity
from lockstep.errors import ConfigError
from lockstep.strategy.slices import Stored

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".tar")
_ADAPTER = "default"  # what peft calls an adapter that was given no name, in a model's state but not in a file


@dataclass
class Source:
    """Weights by name, and the files that they are in, open until `close`."""

    described: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    # Whether weights that are frozen were left out of it when it was saved: then they are not missing.
    without_frozen: bool = False
    _open: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self._open:
            os.close(self._open.pop())

    def add(self, file: Path, activity: Activity, only: Iterable[str] | None = None, depth: int = 0) -> None:
        """Adds the tensors of a safetensors file; `only` those of these names. `depth` as in run_files."""
        try:
            descriptor = run_files.open_descriptor(file, os.O_RDONLY, depth)
        except OSError as error:
            raise ConfigError(f"init_from: {file}: cannot be read: {error.strerror}") from None
        self._open.append(descriptor)
        found = {each.name: each for each in _entries(file, descriptor)}
        wanted = found if only is None else {name: found.get(name) for name in only}
        for name, entry in wanted.items():
            if entry is None:
                raise ConfigError(f"init_from: {file}: has no {name!r}, which {INDEX_FILE} says is in it")
            place(self.tensors, entry, StoredTensor(entry, descriptor, file, activity))


def open_source(given: str, activity: Activity) -> Source:
    """Opens what a path stands for; ConfigError where no weights can be read from it."""
    if "://" in given:
        raise ConfigError(f"init_from: {given}: weights are read from a disk: copy them to one that the ranks see")
    path = Path(given)
    try:
        there, folder = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_from: {given!r}: cannot be looked for: {error}") from None
    if not there:
        raise ConfigError(f"init_from: {path}: there is no such file or folder")
    source = Source(str(path))
    try:
        if folder:
            _open_folder(path, source, activity)
        elif path.suffix.lower() in _PICKLES:
            raise _pickled(path)
        else:
            source.add(path, activity)
            source.described = f"{path} (safetensors)"
    except BaseException:
        source.close()
        raise
    return source


def _open_folder(folder: Path, source: Source, activity: Activity) -> None:
    if (folder / MANIFEST_FILE).exists():
        _open_checkpoint(folder.resolve(), source, activity)  # the user may name it by the link `best`
    elif (folder / "checkpoints").is_dir():
        _open_run(folder, source, activity)
    elif (folder / INDEX_FILE).exists():
        for name, names in _index(folder / INDEX_FILE).items():
            source.add(folder / name, activity, names)
        source.described = f"{folder} (Hugging Face, several files)"
    elif (folder / MODEL_FILE).exists():
        source.add(folder / MODEL_FILE, activity)
        source.described = f"{folder} (Hugging Face)"
    elif (folder / ADAPTER_FILE).exists():
        source.add(folder / ADAPTER_FILE, activity)
        source.tensors = {_adapter_name(name): each for name, each in source.tensors.items()}
        source.described, source.without_frozen = f"{folder} (an adapter of peft)", True
    else:
        pickled = sorted(each for each in folder.iterdir() if each.suffix.lower() in _PICKLES)
        if pickled:
            raise _pickled(pickled[0])
        raise ConfigError(
            f"init_from: {folder}: holds no weights: looked for {MANIFEST_FILE} (a checkpoint), checkpoints/ (a run), "
            f"{INDEX_FILE} or {MODEL_FILE} (a Hugging Face folder), {ADAPTER_FILE} (an adapter)"
        )


def _open_run(folder: Path, source: Source, activity: Activity) -> None:
    storage = CheckpointStorage(folder / "checkpoints")
    step, what = storage.best_good(_mode_of(folder)), "best"
    if step is None:
        step, what = storage.newest_good(), "newest"
    if step is None:
        raise ConfigError(f"init_from: {folder}: this run has no whole checkpoint in {storage.folder}")
    _open_checkpoint(storage.path(step), source, activity, checked=True)
    source.described = f"{folder} (its {what} checkpoint, step {step})"


def _open_checkpoint(folder: Path, source: Source, activity: Activity, checked: bool = False) -> None:
    try:
        problem = None if checked else manifest.problem(folder)
        if problem is not None:
            raise Damaged(problem)
        meta = manifest.read(folder)
        tree = json.loads(manifest.read_small(folder, TREE_FILE, meta))
        shared, frozen = dict(tree["shared"]), bool(tree["state"].get("frozen"))
    except (Damaged, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"init_from: {folder} is damaged: {error}. Name another checkpoint, or the run") from None
    except Unreadable as error:
        raise ConfigError(f"init_from: {folder}: {error}: make it readable for this user") from None
    for name in manifest.tensor_files(meta, "model"):
        source.add(folder / name, activity, depth=3)
    source.tensors |= {name: source.tensors[first] for name, first in shared.items() if first in source.tensors}
    source.without_frozen = frozen
    source.described = f"{folder} (a checkpoint, step {meta['step']})"


def _mode_of(folder: Path) -> str:
    try:
        mode = parse_yaml(run_files.read_text(folder / "config.yaml"))["checkpoint"]["keep"]["mode"]
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError):
        return "min"
    return mode if mode in ("min", "max") else "min"


def _index(file: Path) -> dict[str, list[str]]:
    try:
        placed: dict[str, str] = json.loads(read_text(file, run_files.LONGEST_RECORD))["weight_map"]
        files: dict[str, list[str]] = {}
        for name, where in placed.items():
            if Path(where).name != where:
                raise ValueError(f"{where!r} is not the name of a file beside it")
            files.setdefault(where, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"init_from: {file}: cannot be read as an index of weights: {error}") from None
    return files


def _entries(file: Path, descriptor: int) -> list[Entry]:
    try:
        entries, _ = read_header(ranges.from_start(descriptor), os.fstat(descriptor).st_size)
        for each in entries:
            dtype_of(each)
        return entries
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"init_from: {file}: cannot be read as a safetensors file ({error}): it is damaged, cut short or of "
            "another kind"
        ) from None


def _adapter_name(name: str) -> str:
    """Returns the model's name for a weight in an adapter's file: `lora_A.weight` is `lora_A.default.weight`."""
    before, dot, last = name.rpartition(".")
    inner = before.rpartition(".")[2]
    if inner.startswith(("lora_", "ia3_", "vera_")):
        return f"{before}.{_ADAPTER}{dot}{last}"
    return f"{name}.{_ADAPTER}" if last.startswith(("lora_embedding_", "ia3_")) else name


def _pickled(file: Path) -> ConfigError:
    return ConfigError(
        f"init_from: {file}: a pickle, which can run any code when it is opened and cannot be read in parts. Turn one "
        'that you trust into a safetensors file: python -c "import sys, torch; from safetensors.torch import '
        "save_file; w = torch.load(sys.argv[1], weights_only=True, map_location='cpu'); save_file({k: "
        'v.clone() for k, v in w.items()}, sys.argv[2])" '
        f"{file.name} model.safetensors"
    )
