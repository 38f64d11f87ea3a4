"""What a job says at its end, in the console that is followed: how it went, where it is, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from lockstep.distributed.failure import Result, how_to_plan
from lockstep.errors import PREEMPTED_EXIT_CODE, BucketBehind
from lockstep.launchers.ssh.order import Order
from lockstep.mirror.mirror import Mirror
from lockstep.record.run_folder import note_end, read_summary
from lockstep.runs.report import leave_report
from lockstep.shown import shown
from lockstep.terminal import tell


def conclude(order: Order, result: Result, world_size: int, mirror: Mirror | None = None) -> tuple[int, str, str]:
    """Tell it; the exit code, the status and what was told. `mirror` gets the rest into its bucket first."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(shown(text))
        tell(text)

    try:
        note_end(Path(order.folder), result)
    except OSError as error:
        say(f"lockstep: {error}")
    leave_report(Path(order.folder), lambda text: tell(f"lockstep: {text}"))
    config = order.run_config()
    limit = config.timeouts.checkpoint if result.exit_code == 0 else config.timeouts.stop
    behind = mirror.finish(limit) if mirror is not None else None
    code, status = _tell(order, result, world_size, say)
    if behind is not None:
        say(f"lockstep: {behind}")
        code = BucketBehind.exit_code if code in (0, PREEMPTED_EXIT_CODE) else code
    return code, status, "\n".join(said)


def _tell(order: Order, result: Result, world_size: int, say: Callable[[str], None]) -> tuple[int, str]:
    """The exit code is 75 only where there is a checkpoint to go on from."""
    folder, pod = Path(order.folder), shlex.quote(order.pod)
    config = order.run_config()
    saved = any((folder / "checkpoints").glob("step-*"))
    go_on = f"lockstep pod resume {pod}"
    if result.failure is not None:
        failure = result.failure
        say(_lines(failure.render(world_size)))
        if failure.memory and config.after is None:
            say(f"lockstep: {how_to_plan('CONFIG', world_size)}")
        say(f"lockstep: logs: lockstep pod pull {pod}")
        if saved:
            say(f"lockstep: go on from the last checkpoint with: {go_on}")
        return result.exit_code, "failed"
    if result.exit_code == PREEMPTED_EXIT_CODE:
        say(f"lockstep: saved and stopped; go on with: {go_on}")
        return result.exit_code, "preempted"
    if result.nothing_to_save:
        say(f"lockstep: stopped before the first step; go on with: {go_on}")
        return (PREEMPTED_EXIT_CODE if saved else result.exit_code), "interrupted"
    if result.exit_code:
        then = f"go on from the last checkpoint with: {go_on}" if saved else "nothing was saved"
        say(f"lockstep: ended at once; {then}")
        return result.exit_code, "interrupted"
    summary = read_summary(folder)
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in (summary.get("metrics") or {}).items()
                        if isinstance(value, (int, float)))  # fmt: skip
    told = f"epoch {summary.get('epoch', '?')}, step {summary.get('step', '?')}"
    say(f"lockstep: {summary.get('status', 'ended')}: {told}  {metrics}".rstrip())
    say(f"lockstep: run folder: {order.url or f'{order.head.name}:{folder}'}")
    say(f"lockstep: bring it here: lockstep pod pull {pod}")
    return 0, str(summary.get("status", "completed"))


def _lines(text: str) -> str:
    return "\n".join(f"lockstep: {line}" if line else "" for line in text.split("\n"))
