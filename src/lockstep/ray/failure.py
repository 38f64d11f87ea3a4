"""What was the cause, out of the errors that Ray wraps into each other."""

from __future__ import annotations

from collections.abc import Iterator

from ray.exceptions import RayTaskError

from lockstep.errors import CONSEQUENCES, LockstepError


def cause_of(error: BaseException) -> BaseException:
    """The error of ours that a failed `fit` comes from, and one that is no consequence of another where there is one;
    else what a worker raised, else the error itself."""
    found = list(_inside(error))
    ours = [each for each in found if isinstance(each, (LockstepError, ImportError))]
    causes = [each for each in ours if type(each).__name__ not in CONSEQUENCES]
    return (causes or ours or found)[0]


def _inside(error: BaseException) -> Iterator[BaseException]:
    """The innermost errors: of a controller, of every worker by rank, of a task."""
    wrapped: list[object] = [getattr(error, "controller_failure", None)]
    wrapped += [each for _, each in sorted(getattr(error, "worker_failures", {}).items())]
    if isinstance(error, RayTaskError):
        wrapped.append(error.cause)
    wrapped.append(getattr(error, "_base_exc", None))  # what Ray keeps of a worker's own exception
    inner = [each for each in wrapped if isinstance(each, BaseException)]
    if not inner and error.__cause__ is not None:
        inner = [error.__cause__]
    for each in inner:
        yield from _inside(each)
    if not inner:
        yield error
