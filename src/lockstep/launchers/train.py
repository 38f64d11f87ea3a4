"""`lockstep.train(config)`: train a task from a program, a notebook or under torchrun, as `lockstep train` does."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import BucketBehind, ConfigError
from lockstep.launchers import script
from lockstep.launchers.base import DETACHED, Ended, Out, launcher_of, run_name, trains_here
from lockstep.mirror.url import Url, place
from lockstep.terminal import say

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.distributed.failure import Result

_CALLER = "lockstep.train"


def train(
    config: str | Path | Mapping[str, Any] | RunConfig | None = None, *, out: str | Path = "runs", **values: Any
) -> dict[str, Any]:
    """Trains what a config describes and returns how it went: what summary.json holds, and the run's `folder`.

    That folder is made in `out`: a folder, or a URL (s3://bucket/prefix) that the folder on this host stands for.

    The config is a file, plain data or a RunConfig; values replace what it says, by name: `processes=1`,
    `train={"epochs": 3}` (merged) or `**{"train.epochs": 3}`. `task` may be the class itself, if ranks can import it.

    One process trains in this process, so that a debugger works; several are started as by `lockstep train`. Where a
    launcher such as torchrun has already given this process a rank, nothing is started. A mistake or a failure is
    raised as a LockstepError, what the task itself raises in this process as it is. A run that was asked to stop has
    saved itself and raises SystemExit with code 75, as a script that does not go on should end.
    """
    script.refuse_while_importing(_CALLER)
    loaded = _loaded(config, values)
    out_place = Out(place(out, "out:"), "out:")
    launcher = launcher_of(loaded, os.environ)
    if not trains_here(loaded, os.environ):
        if loaded.launch.type in DETACHED:
            raise ConfigError(
                f"{_CALLER}: launch: {loaded.launch.type} starts a run that is detached from this process, and this "
                "function returns how a run ended: submit with `lockstep train`"
            )
        if loaded.launch.type == "local" and (trained := _in_this_process(loaded, out_place)) is not None:
            return trained
    with launcher.train(loaded, out_place, say) as ended:
        if ended.result is None:
            return _as_rank(ended)
        assert ended.folder is not None and ended.config is not None
        return _outcome(ended.folder, ended.result, int(ended.config.processes), ended.url)


def _in_this_process(config: RunConfig, out: Out) -> dict[str, Any] | None:
    """Trains here where the config has one process; else makes sure that ranks can import the task."""
    from lockstep import runtime
    from lockstep.launchers.local import launcher as local

    _, processes = runtime.resolve(config)
    if processes > 1:
        script.require_guard(_CALLER)
        if config.task.type.startswith("__main__:"):
            name = config.task.type.partition(":")[2]
            raise ConfigError(
                f"{_CALLER}: task {name} was typed into this session, where {processes} ranks cannot import it "
                f'from: write it to a file, and give task="file.py:{name}"; or set processes=1'
            )
        return None
    from lockstep.tasks.config_checks import CannotImport, check_made, check_parts

    out.check()
    config = local.resolved(config, say)
    check_parts(config, (CannotImport,))
    check_made(config)
    folder = out.new(config)
    return _train_here(config, folder)


def _loaded(config: str | Path | Mapping[str, Any] | RunConfig | None, values: Mapping[str, Any]) -> RunConfig:
    from lockstep.config.load import load_python
    from lockstep.config.schema import RunConfig

    if isinstance(config, (str, Path)):
        given: Path | Mapping[str, Any] = Path(config)
    elif isinstance(config, RunConfig):
        given = config.plain()
    elif config is None or isinstance(config, Mapping):
        given = _with_task_named(config or {})
    else:
        raise ConfigError(
            f"{_CALLER}: the config must be a file, a mapping or a RunConfig, got {type(config).__name__}; "
            "a task is given as task=MyTask"
        )
    loaded = load_python(given, _with_task_named(values), _CALLER)
    name = given.stem if isinstance(given, Path) else loaded.task.type.rpartition(":")[2].rpartition(".")[2]
    return loaded.model_copy(update={"name": loaded.name or run_name(name)})


def _with_task_named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces classes of tasks and callbacks by the import paths that ranks find them by."""
    named = dict(values)
    if named.get("task") is not None:
        named["task"] = _component(named["task"], "task")
    if isinstance(named.get("callbacks"), (list, tuple)):
        named["callbacks"] = [_component(each, "callbacks") for each in named["callbacks"]]
    return named


def _component(given: Any, name: str) -> Any:
    if isinstance(given, Mapping) and not isinstance(given.get("type", ""), str):
        return {**given, "type": _import_path(given["type"], name)}
    return given if isinstance(given, (str, Mapping)) else {"type": _import_path(given, name)}


def _import_path(given: Any, name: str) -> str:
    if not inspect.isclass(given):
        raise ConfigError(
            f"{_CALLER}: {name} is {given!r}, an object that only this process has: every rank makes its own. Give the "
            f'class and its arguments: {name}={{"type": {type(given).__name__}, "an_argument": 1}}'
        )
    task: type = given
    module = sys.modules.get(task.__module__)
    if "." in task.__qualname__ or getattr(module, task.__name__, None) is not task:
        raise ConfigError(
            f"{_CALLER}: {name} {task.__qualname__} is defined inside of something else, where ranks cannot import it "
            "from: define it at the top level of a file"
        )
    file = getattr(module, "__file__", None) or ""
    if "." in task.__module__ or (not file.endswith(".py") and task.__module__ != "__main__"):
        return f"{task.__module__}:{task.__name__}"  # inside of a package, which may import by its own name
    if not file.endswith(".py"):
        return f"__main__:{task.__name__}"  # typed into this session: for one process, which is this one
    return f"{Path(file).resolve()}:{task.__name__}"


def _train_here(config: RunConfig, folder: Path) -> dict[str, Any]:
    from lockstep import worker
    from lockstep.distributed.topology import Topology
    from lockstep.engine.stop_requests import Preempted
    from lockstep.record import run_folder

    try:
        code = worker.train(config, Topology(), lambda: folder)
    except BucketBehind:  # the run itself came to its end
        raise
    except Exception as error:
        run_folder.record(folder, "failed", f"{type(error).__name__}: {error}")
        raise
    if code:
        raise Preempted(str(run_folder.read_summary(folder).get("reason")))
    return {**run_folder.read_summary(folder), "folder": folder}


def _as_rank(ended: Ended) -> dict[str, Any]:
    """Returns what rank 0 wrote down, on every rank."""
    from lockstep.engine.stop_requests import Preempted

    assert ended.outcome is not None
    if ended.exit_code:
        raise Preempted(str(ended.outcome.get("reason")))
    return ended.outcome


def _outcome(folder: Path, result: Result, processes: int, url: Url | None) -> dict[str, Any]:
    from lockstep.launchers.ending import require_done
    from lockstep.record import run_folder
    from lockstep.runs.report import leave_report

    if url is None:
        if result.failure is not None:
            run_folder.record(folder, "failed", result.failure.cause)
        leave_report(folder, say)
    require_done(result, processes, str(folder / "config.yaml"))
    return {**run_folder.read_summary(folder), "folder": folder if url is None else str(url)}
