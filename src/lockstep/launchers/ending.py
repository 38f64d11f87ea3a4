"""The end of a run that its launcher waited for: what happened, where the run is, and what to do next."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.distributed.failure import Result, how_to_plan
from lockstep.distributed.signals import handled, interactive, nothing
from lockstep.errors import INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, BucketBehind, WorkerFailed
from lockstep.record.run_folder import note_end
from lockstep.runs.report import closing_lines, leave_report

if TYPE_CHECKING:
    from lockstep.config.schema import RunConfig
    from lockstep.launchers.base import Say
    from lockstep.mirror.mirror import Mirror
    from lockstep.mirror.url import Url

# The limit of an upload where the user ended the run at once.
_AT_ONCE_SECONDS = 5.0
_WHILE_UPLOADING = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1)


def conclude(
    folder: Path,
    result: Result,
    config: RunConfig,
    say: Say,
    mirror: Mirror | None = None,
    url: Url | None = None,
    pod: tuple[str, str] | None = None,
) -> int:
    """Says how the run ended and returns the exit code.

    `mirror` keeps the folder in a bucket; with `url`, the run is there, and the folder only an outline of it. A run on
    the hosts of a `pod` is named by the pod and the host that has its folder.
    """
    if url is None:
        try:
            note_end(folder, result)
        except OSError as error:  # a full disk
            say(str(error))
        leave_report(folder, say)
    behind = _uploaded(result, config, mirror) if mirror is not None else None
    where = str(url or (mirror.url if mirror is not None and behind is None else folder))
    if pod is not None and where == str(folder):
        where = f"{pod[1]}:{folder}"
    code = _say_end(folder, result, config, say, where, url, pod[0] if pod is not None else None)
    if behind is not None:
        say(behind)
        code = BucketBehind.exit_code if code in (0, PREEMPTED_EXIT_CODE) else code
    return code


def require_done(result: Result, processes: int, config: str | None = None) -> None:
    """Raises what a caller in Python gets of a run that failed, or was asked to stop."""
    from lockstep.engine.stop_requests import Preempted

    if (failure := result.failure) is not None:
        hint = f"\n{how_to_plan(config, processes)}" if failure.memory and config else ""
        raise WorkerFailed(failure.rank, failure.host, failure.render(processes) + hint, failure.exit_code)
    if result.exit_code == INTERRUPTED_EXIT_CODE:
        raise KeyboardInterrupt if interactive() else SystemExit(INTERRUPTED_EXIT_CODE)
    if result.exit_code:
        raise Preempted("asked to stop")


def _uploaded(result: Result, config: RunConfig, mirror: Mirror) -> str | None:
    """Waits for pending uploads and returns an error message if any failed. Only Ctrl-C ends the wait."""
    limit = config.timeouts.checkpoint if result.exit_code == 0 else config.timeouts.stop
    if result.exit_code == INTERRUPTED_EXIT_CODE and not result.nothing_to_save:
        limit = min(limit, _AT_ONCE_SECONDS)
    with handled(dict.fromkeys(_WHILE_UPLOADING, nothing)):
        return mirror.finish(limit)


def _say_end(
    folder: Path, result: Result, config: RunConfig, say: Say, where: str, url: Url | None, pod: str | None
) -> int:
    """Returns the exit code: that of the run, and 75 only where there is a checkpoint to resume from."""
    saved = any((folder / "checkpoints").glob("step-*"))
    go_on = f"lockstep pod resume {pod}" if pod else f"lockstep resume {shlex.quote(where)}"
    if result.failure is not None:
        processes = int(config.processes)
        say(result.failure.render(processes))
        log = Path("logs", f"rank-{result.failure.rank}.log")
        if pod:
            say(f"logs: lockstep pod pull {pod}")
        elif (folder / log).exists():  # from the roll call on
            say(f"log: {url or folder}/{log}")
        if result.failure.memory and config.after is None:
            say(how_to_plan("CONFIG" if pod or url else str(folder / "config.yaml"), processes))
        if saved:
            say(f"go on from the last checkpoint with: {go_on}")
        return result.exit_code
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"saved and stopped; go on with: {go_on}")
        return result.exit_code
    if result.nothing_to_save:
        then = "nothing has changed since the last checkpoint" if saved else "there was nothing to save"
        say(f"stopped before the first step: {then}; go on with: {go_on}")
        return PREEMPTED_EXIT_CODE if saved else result.exit_code
    if result.exit_code:
        then = "go on from the last checkpoint" if saved else "nothing was saved; start over"
        say(f"ended at once; {then} with: {go_on}")
        return result.exit_code
    limit = next((name for name in ("steps", "tokens") if getattr(config.train, name) is not None), "epochs")
    for line in closing_lines(folder, where, f"{go_on} --set train.{limit}=N", here=pod is None and url is None):
        say(line)
    if pod:
        say(f"bring it here:  lockstep pod pull {pod}")
    return 0
