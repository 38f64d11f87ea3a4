"""How the attempts of a run ended: what ranks reported and what Ray saw, brought together in one headline each."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from lockstep.distributed.failure import Failure, Report, find_cause, report
from lockstep.errors import LaunchError
from lockstep.ray.mailbox import Event


class Attempts:
    """Collects what is known of the attempt under way, until a failure concludes it."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, str]] = {}  # rank -> the id of its worker, and its node
        self._over: set[str] = set()  # workers of attempts before
        self._reports: list[Report] = []
        self.exit_codes: dict[int, int] = {}
        self.count = 0

    @property
    def began(self) -> bool:
        """Whether any rank of the attempt under way has been heard of."""
        return bool(self._places)

    def note(self, event: Event) -> None:
        """Take in an event, unless it comes late, of an attempt that is over."""
        if event["worker"] in self._over:
            return
        rank = event["rank"]
        if event["kind"] == "started":
            self._places[rank] = (event["worker"], event["host"])
        elif event["kind"] == "failed":
            self._reports.append(Report(**event["report"]))
        elif event["kind"] == "ended":
            self.exit_codes[rank] = event["exit_code"]

    def conclude(self, errors: Mapping[int, str]) -> Failure:
        """Ray has ended this attempt. A rank that it saw die, and that said nothing itself, is the one that is lost."""
        reported = {each.rank for each in self._reports}
        words = {rank: describe(text) for rank, text in errors.items()}
        if all(each.consequence for each in self._reports) and not words.keys() - reported:
            # Ray has not noticed yet who it is that the others miss.
            words |= dict.fromkeys(self._places, "it is not heard of any more: its process or its node is gone")
        lost = [
            Report(rank, self._node(rank), "WorkerDied", text, 5, time.time())
            for rank, text in sorted(words.items())
            if rank not in reported
        ]
        failure = find_cause([*self._reports, *lost], {}, "the cluster")
        self._over |= {worker for worker, _ in self._places.values()}
        self._places, self._reports, self.exit_codes = {}, [], {}
        self.count += 1
        return failure

    def conclude_before_training(self, error: BaseException) -> Failure:
        """An attempt that did not get as far as training: the workers could not be placed, or the roll call failed."""
        cause = getattr(error, "controller_failure", None) or error
        cause = getattr(cause, "cause", None) or cause  # of a call to a worker
        if no_capacity(error):
            cause = LaunchError("the workers could not be placed in time (launch.ray.placement_timeout)")
        told = report(cause, 0, "the cluster")
        self.count += 1
        return Failure(0, told.host, told.message, told.exit_code, told.kind, told.traceback, concerns_all_ranks=True)

    def _node(self, rank: int) -> str:
        return self._places[rank][1] if rank in self._places else "an unknown node"


def no_capacity(error: BaseException | None) -> bool:
    """Whether Ray gave up waiting until all workers could be placed."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


# What Ray says of the death of a worker, among much else, and what that means.
_DEATHS = (
    (r"node has died|node died|node was terminated|marked dead", "its node is gone"),
    (r"low on memory|memory pressure|OutOfMemoryError", "Ray ended its process: the node was running out of memory"),
    (
        r"is unavailable|failed to connect",
        "its process cannot be reached: the node is gone, or the network to it is cut",
    ),
    (
        r"worker process has died|unexpectedly exits",
        "its process was killed or crashed (out of memory? see the kernel log)",
    ),
)


def describe(error: str) -> str:
    """What Ray knows of the death of a worker, in a sentence."""
    text = " ".join(error.split())
    for pattern, meaning in _DEATHS:
        if re.search(pattern, text):
            return meaning
    return f"the worker failed: {text[:300]}"
