"""The errors of Lockstep: one class per kind of mistake, each with its exit code.

A message says what failed, where (rank, host, YAML path, file), the value received and what to do.
"""

from __future__ import annotations

from typing import Any


class LockstepError(Exception):
    """The base class of every error that Lockstep raises for its user."""

    exit_code = 5
    # Whether it is about all ranks, so that none is named as the one that failed.
    concerns_all_ranks = False


class ConfigError(LockstepError):
    """The configuration, the command line or the task cannot be used as given."""

    exit_code = 2


class TopologyError(ConfigError):
    """The variables that say who takes part contradict each other."""


class LaunchError(LockstepError):
    """The processes of a run could not be started."""

    exit_code = 2


class RollCallError(LockstepError):
    """The processes that met are not the run that the config describes."""

    exit_code = 3
    concerns_all_ranks = True


class RankAbsent(RollCallError):
    """Some ranks did not come to the roll call."""


class RankMissing(LockstepError):
    """Some ranks did not arrive at a wait within its limit."""

    exit_code = 4
    concerns_all_ranks = True


class RankStalled(LockstepError):
    """A rank made no progress for longer than it may."""

    exit_code = 4
    concerns_all_ranks = True


class OutOfStep(LockstepError):
    """Ranks met at different places of the program: one of them took another branch."""

    concerns_all_ranks = True


class ReplicasDiffer(LockstepError):
    """The replicas of the model are no longer equal on all ranks."""

    concerns_all_ranks = True


class PeerLost(LockstepError):
    """Another rank ended while this one was communicating with it: a consequence, never a cause."""


class RankLeft(LockstepError):
    """The user's code ended a rank before its work was done."""


class BadMessage(LockstepError):
    """A message from another rank is malformed."""


class ClusterLost(LockstepError):
    """The cluster that a run is on does not answer any more."""


class RankZeroFailed(LockstepError):
    """Work that rank 0 did for all ranks failed: a consequence on the other ranks."""


class CheckpointError(LockstepError):
    """A checkpoint could not be written or read."""


class FolderLost(LockstepError):
    """The run's folder was moved, deleted or taken over while the run was at work."""


class BucketBehind(LockstepError):
    """The run is over, but not all of its folder was uploaded to its bucket."""

    exit_code = 6
    concerns_all_ranks = True


class NonFiniteLoss(LockstepError):
    """The loss became NaN or infinite."""

    def __init__(self, step: int, rank: int, value: float) -> None:
        super().__init__(
            f"the loss is {value} at step {step} on rank {rank}. No checkpoint was written after that step. "
            "Lower the learning rate, set train.clip_norm, or look at the batch of that step; "
            "the run can be resumed from its last checkpoint."
        )
        self.step, self.rank, self.value = step, rank, value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.rank, self.value)


class NonFiniteWeights(LockstepError):
    """A parameter became NaN or infinite."""

    concerns_all_ranks = True

    def __init__(self, step: int, name: str, ranks: str) -> None:
        super().__init__(
            f"the parameter {name} is not finite at step {step}, on {ranks}: a gradient was not, though no loss showed "
            "it (sqrt at 0, a division by 0, a norm of nothing). No checkpoint was written from this state. Set "
            "train.on_nan: skip to leave such steps out, or train.clip_norm, or look at what has such a gradient; the "
            "run can be resumed from its last checkpoint"
        )
        self.step, self.name, self.ranks = step, name, ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.name, self.ranks)


class NonFiniteGradients(LockstepError):
    """Step after step was skipped: the gradients are not finite any more."""

    concerns_all_ranks = True


class Recompiled(LockstepError):
    """The step was compiled anew more often than the config allows."""

    concerns_all_ranks = True


class CallbackFailed(LockstepError):
    """A user callback raised an error."""

    def __init__(self, callback: str, method: str, step: int, rank: int, error: BaseException | str) -> None:
        cause = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(f"callback {callback}.{method} failed after step {step} on rank {rank}: {cause}")
        self.callback, self.method, self.step, self.rank, self.cause = callback, method, step, rank, cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.callback, self.method, self.step, self.rank, self.cause)


class WorkerFailed(LockstepError):
    """A process of the run ended before its work was done."""

    def __init__(self, rank: int, host: str, cause: str, exit_code: int = 5) -> None:
        super().__init__(cause)
        self.rank, self.host, self.cause, self.exit_code = rank, host, cause, exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.host, self.cause, self.exit_code)


PREEMPTED_EXIT_CODE = 75
INTERRUPTED_EXIT_CODE = 130

# Errors that follow from another rank's failure: never the headline while a cause is known.
CONSEQUENCES = (PeerLost.__name__, RankZeroFailed.__name__, RankMissing.__name__, RankAbsent.__name__)

# How gloo and NCCL say that another rank went away, in lower case.
LOST_PEER = ("connection closed by peer", "connection reset", "broken pipe", "communicator was aborted")
