"""How the attempts of a run ended: combines what ranks reported and what Ray saw into one failure each."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from ray.exceptions import RayTaskError

from lockstep.distributed.failure import Failure, Report, find_cause, report
from lockstep.errors import CONSEQUENCES, LaunchError, LockstepError
from lockstep.ray.mailbox import Event

# What Ray says of the death of a worker, among much else, and what that means.
_DEATHS = (
    (r"node has died|node died|node was terminated|marked dead", "its node is gone"),
    (r"low on memory|memory pressure|OutOfMemoryError", "Ray ended its process: the node was running out of memory"),
    (r"is unavailable|failed to connect", "its process cannot be reached: the node is gone, or the network to it cut"),
    (r"process has died|unexpectedly exits", "its process was killed or crashed (out of memory? see the kernel log)"),
)


class Attempts:
    """Collects what ranks report of the current attempt, until a failure concludes it."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[str, str]] = {}  # rank -> the id of its worker, and its node
        self._over: set[str] = set()  # workers of earlier attempts, whose late messages do not count
        self._reports: list[Report] = []
        self.exit_codes: dict[int, int] = {}
        self.count = 0

    @property
    def began(self) -> bool:
        return bool(self._places)

    def note(self, event: Event) -> None:
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
        """Ends the attempt with what Ray saw of each rank. A rank that died without a report is the lost one."""
        reported = {each.rank for each in self._reports}
        deaths = {rank: describe(text) for rank, text in errors.items()}
        if all(each.consequence for each in self._reports) and not deaths.keys() - reported:
            # Ray has not noticed yet which rank the others miss.
            deaths |= dict.fromkeys(self._places, "it is not heard of any more: its process or its node is gone")
        lost = []
        for rank, text in sorted(deaths.items()):
            _, node = self._places.get(rank, ("", "an unknown node"))
            if rank not in reported:
                lost.append(Report(rank, node, "WorkerDied", text, 5, time.time()))
        failure = find_cause([*self._reports, *lost], {}, "the cluster")
        self._over |= {worker for worker, _ in self._places.values()}
        self._places, self._reports, self.exit_codes = {}, [], {}
        self.count += 1
        return failure

    def conclude_before_training(self, error: BaseException) -> Failure:
        """Ends an attempt whose workers could not be placed, or whose roll call failed."""
        cause = cause_of(error)
        if no_capacity(error):
            cause = LaunchError("the workers could not be placed in time (launch.ray.placement_timeout)")
        found = report(cause, 0, "the cluster")
        self.count += 1
        return Failure(
            0, found.host, found.message, found.exit_code, found.kind, found.traceback, concerns_all_ranks=True
        )


def no_capacity(error: BaseException | None) -> bool:
    """Whether Ray gave up waiting until all workers could be placed."""
    return type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError"


def describe(error: str) -> str:
    """Says in a sentence what Ray knows of the death of a worker."""
    text = " ".join(error.split())
    for pattern, meaning in _DEATHS:
        if re.search(pattern, text):
            return meaning
    return f"the worker failed: {text[:300]}"


def cause_of(error: BaseException) -> BaseException:
    """Returns the error of Lockstep inside a failed `fit`, a cause before a consequence; else what a worker raised."""
    found = list(_innermost(error))
    ours = [each for each in found if isinstance(each, (LockstepError, ImportError))]
    causes = [each for each in ours if type(each).__name__ not in CONSEQUENCES]
    return (causes or ours or found)[0]


def _innermost(error: BaseException) -> Iterator[BaseException]:
    wrapped: list[object] = [getattr(error, "controller_failure", None)]
    wrapped += [each for _, each in sorted(getattr(error, "worker_failures", {}).items())]
    if isinstance(error, RayTaskError):
        wrapped.append(error.cause)
    wrapped.append(getattr(error, "_base_exc", None))  # what Ray keeps of a worker's exception
    inner = [each for each in wrapped if isinstance(each, BaseException)]
    if not inner and error.__cause__ is not None:
        inner = [error.__cause__]
    for each in inner:
        yield from _innermost(each)
    if not inner:
        yield error
