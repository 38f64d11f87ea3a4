"""What the driver makes of a failed attempt, without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

from dataclasses import asdict

from lockstep.distributed.failure import report
from lockstep.errors import PeerLost, RankStalled, RollCallError
from lockstep.ray.failures import describe, find_failure

KILLED = (
    "WorkerHealthCheckFailedError: A worker health check failed. Worker info: Worker( node_id='dda3', pid=12183) The "
    "actor died unexpectedly before finishing this task. The actor is dead because its worker process has died. Worker "
    "exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. Some "
    " common causes include: (1) the process was killed by the OOM killer due to high memory usage"
)
UNREACHABLE = (
    "WorkerHealthCheckFailedError: A worker health check failed. The actor a3b4 is unavailable: The actor is now "
    "unavailable: RpcError: RPC error: failed to connect to all addresses; Connection refused rpc_code: 14."
)
NODE = "ActorDiedError: The actor died because its node has died. Node Id: dd9b. the actor's node was terminated"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (KILLED, "its process was killed or crashed"),
        (UNREACHABLE, "its process cannot be reached: the node is gone"),
        (NODE, "its node is gone"),
        ("Something: else", "the worker failed: Something: else"),
    ],
)
def test_what_ray_says_of_a_death_in_a_sentence(text: str, meaning: str) -> None:
    assert describe(text).startswith(meaning)


class WorkersFailed(Exception):
    """As Ray's WorkerGroupError."""

    def __init__(self, **errors: str) -> None:
        self.worker_failures = {int(rank[1:]): Exception(text) for rank, text in errors.items()}


def _facts(**errors: Exception) -> dict[int, dict[str, object]]:
    """Of two ranks, of which some have reported an error."""
    return {
        rank: {"host": f"node-{rank}"}
        | ({"report": asdict(report(errors[f"r{rank}"], rank, f"node-{rank}"))} if f"r{rank}" in errors else {})
        for rank in (0, 1)
    }


def test_a_rank_that_died_without_a_word_is_the_cause_of_what_others_report() -> None:
    lost = PeerLost("lost the connection to another rank")
    failure = find_failure(WorkersFailed(r0="PeerLost: lost", r1=KILLED), _facts(r0=lost))
    assert (failure.rank, failure.host, failure.exit_code) == (1, "node-1", 5)
    assert failure.render(2).startswith("rank 1 of 2 on node-1 failed: its process was killed")
    assert failure.followers == {0: "lost the connection to another rank"}
    unnoticed = find_failure(WorkersFailed(r1="PeerLost: lost"), _facts(r1=lost))
    assert (unnoticed.rank, unnoticed.host) == (0, "node-0") and "not heard of any more" in unnoticed.cause


def test_failures_keep_their_exit_codes() -> None:
    stalled = RankStalled("rank 1: in loss of step 3, since 4 s")
    assert find_failure(WorkersFailed(r0=KILLED, r1=KILLED), _facts(r0=stalled)).exit_code == 4

    class ControllerError(Exception):
        controller_failure = RollCallError("ranks 0, 1 are on the same physical device")

    failure = find_failure(ControllerError(), {})
    assert failure.exit_code == 3 and failure.render(2) == "ranks 0, 1 are on the same physical device"
