"""Messages between the threads that write one checkpoint, through the store. Every wait has a limit."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lockstep.distributed.group import Group
from lockstep.distributed.topology import ranks_text
from lockstep.errors import CheckpointError

Value = TypeVar("Value")

# By how much another rank waits longer for rank 0 than rank 0 does for it.
LONGER_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1


class ShardReports:
    """The messages of one save, under keys that no other save has."""

    def __init__(self, group: Group, prefix: str, limit: float) -> None:
        self._group, self._prefix, self._limit = group, prefix, limit
        self._others = range(1, group.world_size)
        self._deadline = time.monotonic() + limit

    # Rank 0

    def ready(self, folder: str) -> None:
        self._leave("ready", folder)

    def give_turn(self, rank: int) -> None:
        self._leave(f"turn/{rank}", "")

    def collect(self, final: Path) -> dict[int, dict[str, str]]:
        """Waits for the digests of all other ranks. Raises what the first of them failed with."""
        found: dict[int, dict[str, str]] = {}

        def look() -> dict[int, dict[str, str]] | None:
            missing = [rank for rank in self._others if rank not in found]
            reports = self._group.published([self._key(f"report/{rank}") for rank in missing])
            for rank, report in zip(missing, reports, strict=True):
                if report is not None:
                    found[rank] = _digests(report)
            return found if len(found) == len(self._others) else None

        if self._until(look, self._deadline) is None:
            missing = ranks_text([rank for rank in self._others if rank not in found])
            raise CheckpointError(
                f"{final}: the checkpoint was not written: {missing} did not write the parts within {self._limit:g} s. "
                "Nothing of it was kept; earlier checkpoints are untouched. Look at the log of that rank, and at its "
                "disk or network file system; timeouts.checkpoint sets the limit"
            )
        return found

    def conclude(self, problem: str) -> None:
        """Reports how it ended: well, or with a problem."""
        self._leave("done", problem)

    def wait_until_heard(self, seconds: float) -> None:
        """Gives the others so long to hear how it ended; then the messages are deleted."""
        keys = [self._key(f"heard/{rank}") for rank in self._others]
        heard = self._until(lambda: None not in self._group.published(keys) or None, time.monotonic() + seconds)
        if heard:
            names = ("report", "turn", "heard")
            self._group.forget([self._key(f"{name}/{rank}") for name in names for rank in self._others])
            self._group.forget([self._key("ready"), self._key("done")])

    # Other ranks

    def wait_for_ready(self) -> str | None:
        """Returns the name of the folder to write to; None where rank 0 could not make it."""
        found = self._until(lambda: self._first("ready", "done"), self._deadline + LONGER_SECONDS)
        if found is None:
            raise CheckpointError(self._silent("made the files to write to"))
        return found[1] if found[0] == "ready" else None

    def wait_for_turn(self) -> bool:
        """Returns whether rank 0 receives what this rank has; not where it has failed before."""
        key = f"turn/{self._group.rank}"
        found = self._until(lambda: self._first(key, "done"), self._deadline + LONGER_SECONDS)
        if found is None:
            raise CheckpointError(self._silent("asked for what this rank has"))
        return found[0] == key

    def report(self, digests: Mapping[str, str]) -> None:
        self._leave(f"report/{self._group.rank}", json.dumps({"digests": digests}))

    def report_error(self, error: OSError) -> None:
        text = error.strerror or str(error)
        place = f", where it writes {Path(error.filename).name}" if error.filename else ""
        message = {
            "errno": error.errno or 0,
            "text": f"rank {self._group.rank} on {socket.gethostname()}: {text}{place}",
        }
        self._leave(f"report/{self._group.rank}", json.dumps(message))

    def concluded(self) -> bool:
        """Whether the save has ended, so that nobody needs what this rank still has to write."""
        return self._group.published([self._key("done")])[0] is not None

    def wait_for_conclusion(self) -> str:
        """Returns what the problem was; nothing where the checkpoint was written."""
        found = self._until(lambda: self._first("done"), self._deadline + LONGER_SECONDS)
        if found is None:
            raise CheckpointError(self._silent("said whether the checkpoint is whole"))
        self._leave(f"heard/{self._group.rank}", "")
        return found[1]

    # Inside

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _leave(self, name: str, text: str) -> None:
        self._group.publish(self._key(name), text)

    def _first(self, *names: str) -> tuple[str, str] | None:
        found = self._group.published([self._key(name) for name in names])
        return next(((name, text) for name, text in zip(names, found, strict=True) if text is not None), None)

    def _until(self, look: Callable[[], Value | None], deadline: float) -> Value | None:
        """Polls until the deadline. It does not wait in the store, which others use."""
        pause = _PAUSE_SECONDS
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return found

    def _silent(self, what: str) -> str:
        return (
            f"a checkpoint was not written: rank 0 has not {what} within {self._limit:g} s. Look at its log, and at "
            "its disk or network file system; timeouts.checkpoint sets the limit"
        )


def _digests(report: str) -> dict[str, str]:
    message = json.loads(report)
    if "errno" in message:
        raise OSError(message["errno"], message["text"])
    return dict(message["digests"])
