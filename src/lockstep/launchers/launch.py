"""`lockstep.launch(main, processes=2)`: calls a function on every rank, from a script, a notebook or under torchrun."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import runtime, worker
from lockstep.config.load import validate
from lockstep.config.schema import RunSettings
from lockstep.distributed.batch import batch_task
from lockstep.distributed.topology import Topology, has_rank, launched
from lockstep.distributed.watch.stall import Limits
from lockstep.engine.stop_requests import Preempted
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers import script
from lockstep.launchers.ending import require_done
from lockstep.launchers.local import supervisor
from lockstep.launchers.local.child import call_function
from lockstep.launchers.plan import local_plan
from lockstep.mirror import mark, url
from lockstep.mirror.mark import mirrored
from lockstep.mirror.url import Url
from lockstep.record import folder_lock, loggers, run_folder
from lockstep.runs.report import closing_lines, leave_report
from lockstep.terminal import say

_calls = itertools.count(1)


def launch(
    main: Callable[..., Any],
    processes: int | str = "auto",
    *,
    out: str | Path = "runs",
    folder: str | Path | None = None,
    **settings: Any,
) -> list[Any]:
    """Calls `main(run)` on every rank and returns what each of them returned, by rank.

    Further settings are those of the config: seed, runtime, strategy, data, checkpoint, log, launch. `folder` names the
    run's folder; one that exists is resumed by `run.restore()`. It and `out` may be URLs of object storage. Where
    a launcher such as torchrun has already given this process a rank, nothing is started: `main` is called here, and
    the list holds this rank's value alone. One process runs here as well, so that a debugger works. `lockstep resume
    FOLDER` starts the script that calls this once more, on the folder of the run.
    """
    if not callable(main):
        raise ConfigError(f"lockstep.launch: main must be a function, got {main!r}: do not call it yourself")
    checked = validate(RunSettings, {"processes": processes, **settings}, {}, "lockstep.launch")
    topology = Topology.from_env(os.environ) if launched(os.environ) else None
    if topology is not None and batch_task(os.environ) is not None and not has_rank(os.environ):
        topology.tell(os.environ)
    if topology is None:
        script.refuse_while_importing("lockstep.launch")
    name, call = str(getattr(main, "__name__", "run")).strip("<>"), next(_calls)
    resumed = script.folder_to_resume(call)
    place = _Folder(script.running(name, call, checked, topology), checked.name or name, out, resumed or folder)
    resumes = resumed is not None
    if topology is None:
        family, count = runtime.resolve(checked)
        loggers.check(checked.log)
        checked = checked.model_copy(update={"runtime": family, "processes": count})
    try:
        if topology is None and count > 1:
            script.require_guard("lockstep.launch")
            returned = _launch_processes(main, checked, place, resumes)
        else:
            here = replace(topology or Topology(), resumes=resumes)
            returned = [worker.call(main, checked, here, place.make, place.prepare)]
        place.say_how_it_ended()
        return returned
    except Preempted:
        place.say_how_to_resume()
        raise


def _launch_processes(main: Callable[..., Any], settings: RunSettings, place: _Folder, resumes: bool) -> list[Any]:
    count = int(settings.processes)
    limits = settings.launch
    plan = local_plan([sys.executable], count, threads=limits.threads, port=limits.port)
    sent = _pickled(partial(_rank_main, main, settings, resumes), main)  # before there is a folder
    folder = place.make()
    with folder_lock.locked(folder), mirrored(folder, settings, say):
        place.prepare(folder)
        result = supervisor.launch(
            plan, entry=call_function, argument=(sent, str(folder)), max_restarts=limits.max_restarts,
            grace=settings.timeouts.stop, watch=Limits.of(settings.timeouts, settings.runtime), folder=folder,
        )  # fmt: skip
        leave_report(folder, say)
        require_done(result, count)
        return [result.returned[rank] for rank in range(count)]


def _rank_main(main: Callable[..., Any], settings: RunSettings, resumes: bool, folder: str) -> Any:
    topology = replace(Topology.from_env(os.environ), resumes=resumes)
    return worker.call(main, settings, topology, lambda: Path(folder))


class _Folder:
    """The folder of a run, made once, by the launcher or rank 0."""

    def __init__(self, started: script.Script, name: str, out: str | Path, folder: str | Path | None) -> None:
        self._script, self._name, self._out, self._given = started, name, url.place(out, "out:"), folder
        self._made: Path | None = None

    def make(self) -> Path:
        if self._given is not None:
            self._made = _existing_or_new(self._given)
        elif isinstance(self._out, Url):
            from lockstep.mirror import staging

            self._made = staging.new(self._out, self._name, "out:")
        else:
            self._made = run_folder.create(self._out, self._name)
        return self._made

    def prepare(self, folder: Path) -> None:
        """Writes down what was started, once the folder is locked."""
        script.write(folder, self._script)
        made = mark.named(self._made or folder)  # as the user named it
        say(f"the run's folder is {made}; go on with: {self._script.how_to_go_on(made)}")

    def say_how_it_ended(self) -> None:
        if self._made is not None:
            where = mark.named(self._made)
            for line in closing_lines(self._made, where, self._script.how_to_go_on(where)):
                say(line)

    def say_how_to_resume(self) -> None:
        if self._made is not None:
            say(f"saved and stopped; go on with: {self._script.how_to_go_on(mark.named(self._made))}")


def _existing_or_new(named: str | Path) -> Path:
    folder = url.place(named, "folder:")
    if isinstance(folder, Url):
        from lockstep.mirror import staging

        return staging.existing_or_new(folder, "folder:")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder={str(folder)!r}: cannot be made: {error.strerror}") from None
    return folder


def _pickled(function: Callable[..., Any], main: Callable[..., Any]) -> bytes:
    """Pickles a function of a script by its name, and one that was typed into a notebook as a whole."""
    pickler: Any = pickle
    if not hasattr(sys.modules["__main__"], "__file__"):
        try:
            pickler = importlib.import_module("cloudpickle")
        except ImportError:
            raise LaunchError(
                "starting processes from a notebook needs cloudpickle: pip install 'lockstep-train[notebook]'"
            ) from None
    try:
        return bytes(pickler.dumps(function))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(_why_not_sent(main, error)) from None


def _why_not_sent(main: Any, error: Exception) -> str:
    inner = main.func if isinstance(main, partial) else main
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    by_name = "<" not in name  # neither a lambda nor in a function
    remedy = (
        "Make what it holds (an open file, a lock, a generator) inside of it, on every rank"
        if by_name
        else "Define it at the top level of the script, or of a module that ranks can import; functools.partial(main, "
        "lr=0.1) gives it values"
    )
    return f"lockstep.launch: {name} cannot be sent to its processes ({error}). {remedy}. One process calls it here"
