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

    def tell(self, name: str, text: str = "") -> None:
        self._group.publish(f"{self._prefix}/{name}", text)

    def first(self, *names: str) -> tuple[str, str] | None:
        """Returns the first of these messages that is there, with its name."""
        found = self._group.published([f"{self._prefix}/{name}" for name in names])
        return next(((name, text) for name, text in zip(names, found, strict=True) if text is not None), None)

    # Rank 0

    def collect(self, final: Path) -> dict[int, dict[str, str]]:
        """Waits for the digests of all other ranks. Raises what the first of them failed with."""
        found: dict[int, dict[str, str]] = {}

        def look() -> dict[int, dict[str, str]] | None:
            missing = [rank for rank in self._others if rank not in found]
            reports = self._group.published([f"{self._prefix}/report/{rank}" for rank in missing])
            for rank, report in zip(missing, reports, strict=True):
                message = json.loads(report) if report is not None else {}
                if "errno" in message:
                    raise OSError(message["errno"], message["text"])
                if message:
                    found[rank] = dict(message["digests"])
            return found if len(found) == len(self._others) else None

        if self._until(look, self._deadline) is None:
            missing = ranks_text([rank for rank in self._others if rank not in found])
            raise CheckpointError(
                f"{final}: the checkpoint was not written: {missing} did not write the parts within {self._limit:g} s. "
                "Nothing of it was kept; earlier checkpoints are untouched. Look at the log of that rank, and at its "
                "disk or network file system; timeouts.checkpoint sets the limit"
            )
        return found

    def wait_until_heard(self, seconds: float) -> None:
        """Gives the others so long to hear how it ended; then the messages are deleted."""
        keys = [f"{self._prefix}/heard/{rank}" for rank in self._others]
        if self._until(lambda: None not in self._group.published(keys) or None, time.monotonic() + seconds):
            names = [f"{name}/{rank}" for name in ("report", "turn", "heard") for rank in self._others]
            self._group.forget([f"{self._prefix}/{name}" for name in (*names, "ready", "done")])

    # Other ranks

    def wait_for(self, what: str, *names: str) -> tuple[str, str]:
        """Returns the first message of rank 0 that comes of these, with its name; `what` is what it has done then."""
        found = self._until(lambda: self.first(*names), self._deadline + LONGER_SECONDS)
        if found is None:
            raise CheckpointError(
                f"a checkpoint was not written: rank 0 has not {what} within {self._limit:g} s. Look at its log, and "
                "at its disk or network file system; timeouts.checkpoint sets the limit"
            )
        return found

    def report(self, digests: Mapping[str, str]) -> None:
        self.tell(f"report/{self._group.rank}", json.dumps({"digests": digests}))

    def report_error(self, error: OSError) -> None:
        text = error.strerror or str(error)
        place = f", where it writes {Path(error.filename).name}" if error.filename else ""
        message = {
            "errno": error.errno or 0,
            "text": f"rank {self._group.rank} on {socket.gethostname()}: {text}{place}",
        }
        self.tell(f"report/{self._group.rank}", json.dumps(message))

    def _until(self, look: Callable[[], Value | None], deadline: float) -> Value | None:
        """Polls until the deadline. It does not wait in the store, which others use."""
        pause = _PAUSE_SECONDS
        while (found := look()) is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        return found
