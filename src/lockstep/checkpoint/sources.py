"""Opens weights that others have saved: a run, a checkpoint, a safetensors file, a folder of Hugging Face's.

Pickles are not read: they can run code, and no part of a tensor can be read by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from lockstep import run_files
from lockstep.checkpoint import manifest
from lockstep.checkpoint.manifest import INDEX_FILE, MANIFEST_FILE, MODEL_FILE, TREE_FILE, Damaged, Unreadable
from lockstep.checkpoint.retention import judged_by
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.tensor_file import WRONG_CONTENT, OpenFiles
from lockstep.config.plain import read_text
from lockstep.distributed.activity import Activity
from lockstep.errors import ConfigError

ADAPTER_FILE = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".tar")
_ADAPTER = "default"  # what peft calls an adapter that was given no name, in a model's state but not in a file


class Source(OpenFiles):
    """Weights by name, in files that are open until `close`."""

    def __init__(self, described: str, activity: Activity) -> None:
        super().__init__(activity)
        self.described = described
        # Whether weights that are frozen were left out of it when it was saved: then they are not missing.
        self.without_frozen = False

    def open(self, file: Path, only: Iterable[str] | None = None, depth: int = 0) -> None:
        """Adds the tensors of a safetensors file; `only` those of these names. `depth` as in run_files."""
        try:
            descriptor = run_files.open_descriptor(file, os.O_RDONLY, depth)
        except OSError as error:
            raise ConfigError(f"init_from: {file}: cannot be read: {error.strerror}") from None
        try:
            self.add(descriptor, file, only)
        except (OSError, *WRONG_CONTENT) as error:
            raise ConfigError(
                f"init_from: {file}: cannot be read as a safetensors file ({error}): it is damaged, cut short or of "
                "another kind"
            ) from None


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
    source = Source(str(path), activity)
    try:
        if folder:
            _open_folder(path, source)
        elif path.suffix.lower() in _PICKLES:
            raise _pickled(path)
        else:
            source.open(path)
            source.described = f"{path} (safetensors)"
    except BaseException:
        source.close()
        raise
    return source


def _open_folder(folder: Path, source: Source) -> None:
    if (folder / MANIFEST_FILE).exists():
        _open_checkpoint(folder.resolve(), source)  # the user may name it by the link `best`
    elif (folder / "checkpoints").is_dir():
        _open_run(folder, source)
    elif (folder / INDEX_FILE).exists():
        for name, names in _index(folder / INDEX_FILE).items():
            source.open(folder / name, names)
        source.described = f"{folder} (Hugging Face, several files)"
    elif (folder / MODEL_FILE).exists():
        source.open(folder / MODEL_FILE)
        source.described = f"{folder} (Hugging Face)"
    elif (folder / ADAPTER_FILE).exists():
        source.open(folder / ADAPTER_FILE)
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


def _open_run(folder: Path, source: Source) -> None:
    storage = CheckpointStorage(folder / "checkpoints")
    step, what = storage.best_good(judged_by(folder)[1]), "best"
    if step is None:
        step, what = storage.newest_good(), "newest"
    if step is None:
        raise ConfigError(f"init_from: {folder}: this run has no whole checkpoint in {storage.folder}")
    _open_checkpoint(storage.path(step), source, checked=True)
    source.described = f"{folder} (its {what} checkpoint, step {step})"


def _open_checkpoint(folder: Path, source: Source, checked: bool = False) -> None:
    try:
        if not checked:
            manifest.check(folder)
        meta = manifest.read(folder)
        tree = json.loads(manifest.read_small(folder, TREE_FILE, meta))
        shared, frozen = dict(tree["shared"]), bool(tree["state"].get("frozen"))
    except (Damaged, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"init_from: {folder} is damaged: {error}. Name another checkpoint, or the run") from None
    except Unreadable as error:
        raise ConfigError(f"init_from: {folder}: {error}: make it readable for this user") from None
    for name in manifest.tensor_files(meta, "model"):
        source.open(folder / name, depth=3)
    source.tensors |= {name: source.tensors[first] for name, first in shared.items() if first in source.tensors}
    source.without_frozen = frozen
    source.described = f"{folder} (a checkpoint, step {meta['step']})"


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
