"""Why an attempt failed: combines what ranks told the driver and what Ray saw into one failure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ray.exceptions import RayTaskError

from lockstep.distributed.failure import Failure, Report, find_cause, report
from lockstep.errors import CONSEQUENCES, LaunchError, LockstepError

Facts = dict[str, Any]  # what a rank told the driver

# What Ray says of the death of a worker, among much else, and what that means.
_DEATHS = (
    (r"node has died|node died|node was terminated|marked dead", "its node is gone"),
    (r"low on memory|memory pressure|OutOfMemoryError", "Ray ended its process: the node was running out of memory"),
    (r"is unavailable|failed to connect", "its process cannot be reached: the node is gone, or the network to it cut"),
    (r"process has died|unexpectedly exits", "its process was killed or crashed (out of memory? see the kernel log)"),
)


def find_failure(error: Exception, facts: Mapping[int, Facts]) -> Failure:
    """Returns the failure that Ray's error and the facts of each rank add up to.

    A rank that died without a report is the lost one, also if Ray has not noticed yet.
    """
    errors: Mapping[int, Exception] | None = getattr(error, "worker_failures", None)
    if errors is None:
        return _before_training(error)
    reports = [Report(**each["report"]) for each in facts.values() if "report" in each]
    reported = {each.rank for each in reports}
    deaths = {rank: describe(str(each)) for rank, each in errors.items() if rank not in reported}
    if not deaths and all(each.consequence for each in reports):
        lost = "it is not heard of any more: its process or its node is gone"
        deaths = {rank: lost for rank in facts if rank not in reported}
    for rank, text in sorted(deaths.items()):
        host = facts.get(rank, {}).get("host", "an unknown node")
        reports.append(Report(rank, host, "WorkerDied", text, 5, time.time()))
    return find_cause(reports, {}, "the cluster")


def _before_training(error: Exception) -> Failure:
    """The workers could not be placed, or their roll call failed."""
    cause = cause_of(error)
    if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError":
        cause = LaunchError("the workers could not be placed in time (launch.ray.placement_timeout)")
    found = report(cause, 0, "the cluster")
    return Failure(0, found.host, found.message, found.exit_code, found.kind, found.traceback, concerns_all_ranks=True)


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
