"""`lockstep train --sweep` on this machine: every trial is a run, as many at once as there is room for.

Each is started by `lockstep resume` in a process of its own, so that the same command continues what is unfinished.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import run_files
from lockstep.config.load import with_values
from lockstep.distributed.signals import Signals, die_with_parent
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, ConfigError
from lockstep.launchers.base import Say
from lockstep.launchers.plan import available_cores
from lockstep.record import folder_lock, run_folder, trials
from lockstep.record.trials import TO_THE_END, Trial, values_of

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.config.sweep import Sweep

_OUTPUT_FILE, _LONGEST_END = "output.log", 64 * 1024
_SECONDS = 0.1


def sweep_here(config: RunConfig, sweep: Sweep, out: Path, say: Say) -> int:
    """Runs all trials, continues a sweep that was left unfinished, shows a table; returns the exit code."""
    from lockstep.launchers.local import launcher

    if sweep.prune is not None:
        raise ConfigError(
            "prune: trials on this machine are trained to their end: leave prune out, add early_stop to the config, or "
            "set launch: ray"
        )
    config = launcher.resolved(config, say)
    rooms = _rooms(config, sweep)
    fixed: dict[str, Any] = {}
    if config.launch.threads is None and "OMP_NUM_THREADS" not in os.environ:
        fixed["launch.threads"] = max(1, available_cores() // (int(config.processes) * len(rooms)))
    configs = [with_values(config, {**values, **fixed}) for values in sweep.points()]  # refuses what does not fit
    folder = _unfinished(configs, sweep, out, fixed) or _new(configs, sweep, out)
    with folder_lock.locked(folder):
        known = trials.read_trials(folder, sweep.metric)
        waiting = [each for each in known if each.status not in TO_THE_END]
        say(f"{len(waiting)} of {len(known)} trials to run, {min(len(rooms), len(waiting))} at once; in {folder}")
        signals = Signals(save_on_request=False)
        with signals.listening():
            _run(waiting, folder, sweep, rooms, signals, say)
        if signals.count:
            trials.write_trials(folder, trials.read_trials(folder, sweep.metric))
            say(f"{signals.name}: trials were ended; the same command continues with what is unfinished")
            return PREEMPTED_EXIT_CODE if signals.count == 1 else INTERRUPTED_EXIT_CODE
        ended = trials.read_trials(folder, sweep.metric)
        for each in ended:
            if _lacks_metric(each, folder, sweep):
                there = ", ".join(_metrics(each, folder))
                raise ConfigError(f"sweep: metric: {sweep.metric!r} is not among what the trials measure: {there}")
        code = trials.conclude(ended, sweep, folder, say)
        _leave_report(folder, ended, say)
    return code


def _rooms(config: RunConfig, sweep: Sweep) -> list[str | None]:
    """Returns for each trial at a time which GPUs it may use; None: any."""
    processes, asked = int(config.processes), sweep.concurrency
    if config.launch.port is not None and asked != 1:
        raise ConfigError(f"launch.port: {config.launch.port}: trials at once cannot share a port: leave it out")
    if config.runtime == "cuda" and not config.launch.share_devices:
        from lockstep.runtime.gpus import gpu_count

        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu_count())))
        names = visible.split(",")
        rooms = [",".join(names[n : n + processes]) for n in range(0, len(names) - processes + 1, processes)]
        if asked is not None and asked > len(rooms):
            raise ConfigError(
                f"{asked} trials at once with {processes} GPUs each need {asked * processes}, but {len(names)} are "
                f"visible: lower it to {len(rooms)}, or set launch.share_devices"
            )
        return list(rooms[: asked or len(sweep.points())])
    if config.runtime == "xla" and (asked or 1) > 1:
        raise ConfigError(f"{asked} trials at once: with runtime: xla, one trial has all devices: leave it at 1")
    fitting = max(1, available_cores() // processes) if config.runtime == "cpu" else 1
    return [None] * min(asked or fitting, len(sweep.points()))


def _unfinished(configs: Sequence[RunConfig], sweep: Sweep, out: Path, but_for: Iterable[str]) -> Path | None:
    """Returns the newest folder of the very same sweep, if there is something left to do in it.

    Its trials have these configs, but for what follows from how many run at once.
    """

    def plain(config: RunConfig) -> dict[str, Any]:
        return with_values(config, dict.fromkeys(but_for)).plain()

    for folder in sorted(out.glob(f"{configs[0].name}-sweep-*"), reverse=True):
        with suppress(OSError, ConfigError):
            if run_files.read_text(folder / trials.DEFINITION_FILE) == trials.definition(sweep):
                known = trials.read_trials(folder, sweep.metric)
                saved = [plain(run_folder.read_config(folder / each.folder)) for each in known]
                if saved == [plain(each) for each in configs]:
                    return folder if any(each.status not in TO_THE_END for each in known) else None
    return None


def _new(configs: Sequence[RunConfig], sweep: Sweep, out: Path) -> Path:
    folder = run_folder.create(out, f"{configs[0].name}-sweep")
    for number, each in enumerate(configs):
        place = folder / trials.trial_folder(number)
        (place / "logs").mkdir(parents=True)
        run_folder.write_config(place, each)
    queued = [Trial(number, values, "queued", None, None) for number, values in enumerate(sweep.points())]
    trials.write_trials(folder, queued)
    trials.write_sweep(folder, sweep)  # last: a sweep with this file is whole
    return folder


def _run(waiting: list[Trial], folder: Path, sweep: Sweep, rooms: list[str | None], signals: Signals, say: Say) -> None:
    """Runs trials until all have ended, or those that were running when a signal came."""
    free, running, passed_on = list(rooms), dict[int, tuple[subprocess.Popen[bytes], Trial, str | None]](), 0
    waiting = list(waiting)
    while running or (waiting and not signals.count):
        while waiting and free and not signals.count:
            trial, room = waiting.pop(0), free.pop(0)
            running[trial.number] = (_start(folder / trial.folder, room), trial, room)
            say(f"trial {trial.number}: {values_of(trial)}")
        if signals.count > passed_on:
            passed_on = signals.count
            number = signal.SIGINT if passed_on > 1 else signal.Signals[signals.name]
            for process, _, _ in running.values():
                with suppress(ProcessLookupError):
                    process.send_signal(number)
        time.sleep(_SECONDS)
        for process, trial, room in list(running.values()):
            if process.poll() is not None:
                del running[trial.number]
                free.append(room)
                ended = _ended(trial, folder, process.returncode, sweep)
                value = f", {sweep.metric} {ended.metric:.4g}" if ended.metric is not None else ""
                cause = f": {ended.cause}; its output: {folder / trial.folder / _OUTPUT_FILE}" if ended.cause else ""
                say(f"trial {trial.number}: {ended.status}{value}{cause}")
                if _lacks_metric(ended, folder, sweep):
                    waiting.clear()  # nothing could be compared


def _start(run: Path, room: str | None) -> subprocess.Popen[bytes]:
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": room} if room is not None else {})}
    with os.fdopen(run_files.append(run / _OUTPUT_FILE), "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lockstep", "resume", str(run)], env=env, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip


def _ended(trial: Trial, folder: Path, code: int, sweep: Sweep) -> Trial:
    """Returns a trial as it ended; one that said nothing has failed with the last line of its output."""
    ended = trials.as_it_is(trial, folder, sweep.metric)
    if code in (0, PREEMPTED_EXIT_CODE, INTERRUPTED_EXIT_CODE) or ended.status == "failed":
        return ended
    said = b""
    with suppress(OSError):
        said = run_files.read_end(folder / trial.folder / _OUTPUT_FILE, _LONGEST_END)
    lines = said.decode(errors="replace").strip().splitlines() or [f"exit code {code}"]  # it may have printed anything
    run_folder.record(folder / trial.folder, "failed", lines[-1].removeprefix("lockstep: "))
    return trials.as_it_is(trial, folder, sweep.metric)


def _lacks_metric(trial: Trial, folder: Path, sweep: Sweep) -> bool:
    return trial.status in TO_THE_END and sweep.metric not in _metrics(trial, folder)


def _metrics(trial: Trial, folder: Path) -> dict[str, Any]:
    return run_folder.read_summary(folder / trial.folder).get("metrics") or {}


def _leave_report(folder: Path, ended: Sequence[Trial], say: Say) -> None:
    from lockstep.runs.report import REPORT_FILE, write_report

    try:
        write_report([folder / each.folder for each in ended], folder / REPORT_FILE)
    except (ConfigError, OSError) as error:
        say(f"no {REPORT_FILE}: {error}")
    else:
        say(f"all compared: {folder / REPORT_FILE}")
