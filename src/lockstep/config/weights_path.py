"""Where the weights are that a run begins with: a path that means the same on every rank, and on a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.config.schema import RunConfig
from lockstep.config.task_file import KeyPath


def with_weights_located(config: RunConfig, folder: Path, places: Mapping[KeyPath, str]) -> RunConfig:
    """With `init_from.path` made absolute: relative to the config's folder, on the command line to where we are.

    Whether it is there is for whoever loads it to say: it may be on other hosts, and a resume does not need it.
    """
    init_from = config.init_from
    if init_from is None or "://" in init_from.path:
        return config
    place = places.get(("init_from", "path"), places.get(("init_from",), ""))
    base = Path.cwd() if place.startswith("--set") else folder
    path = base / Path(init_from.path).expanduser()
    return config.model_copy(update={"init_from": init_from.model_copy(update={"path": str(path.absolute())})})
