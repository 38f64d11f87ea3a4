"""What the driver makes of what it hears: pure functions and small state, without a cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

from dataclasses import asdict

from lockstep.distributed.failure import report
from lockstep.errors import PeerLost, RankStalled, RollCallError
from lockstep.ray import placement
from lockstep.ray.failures import Attempts, describe

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


def _event(kind: str, rank: int, worker: str, **content: object) -> dict[str, object]:
    return {"kind": kind, "rank": rank, "worker": worker, **content}


def test_a_rank_that_died_without_a_word_is_the_cause_of_what_others_report() -> None:
    attempts = Attempts()
    for rank in (0, 1):
        attempts.note(_event("started", rank, f"worker-{rank}", host=f"node-{rank}"))
    lost = asdict(report(PeerLost("lost the connection to another rank"), 0, "node-0"))
    attempts.note(_event("failed", 0, "worker-0", report=lost))
    failure = attempts.conclude({0: "PeerLost: lost", 1: KILLED})
    assert (failure.rank, failure.host, failure.exit_code) == (1, "node-1", 5)
    assert failure.render(2).startswith("rank 1 of 2 on node-1 failed: its process was killed")
    assert failure.followers == {0: "lost the connection to another rank"}


def test_a_rank_that_nobody_has_noticed_to_be_gone_is_still_the_cause() -> None:
    attempts = Attempts()
    for rank in (0, 1):
        attempts.note(_event("started", rank, f"worker-{rank}", host=f"node-{rank}"))
    lost = asdict(report(PeerLost("lost the connection to another rank"), 1, "node-1"))
    attempts.note(_event("failed", 1, "worker-1", report=lost))
    failure = attempts.conclude({1: "PeerLost: lost"})
    assert (failure.rank, failure.host) == (0, "node-0") and "not heard of any more" in failure.cause


def test_late_words_of_an_attempt_do_not_count_for_the_next() -> None:
    attempts = Attempts()
    attempts.note(_event("started", 0, "first", host="node"))
    attempts.conclude({0: KILLED})
    attempts.note(_event("failed", 0, "first", report=asdict(report(ValueError("late"), 0, "node"))))
    attempts.note(_event("started", 0, "second", host="node"))
    failure = attempts.conclude({0: NODE})
    assert failure.cause == "its node is gone" and attempts.count == 2


def test_a_stall_keeps_its_exit_code() -> None:
    attempts = Attempts()
    attempts.note(_event("started", 0, "worker", host="node"))
    told = asdict(report(RankStalled("rank 1: in loss of step 3, since 4 s"), 0, "node"))
    attempts.note(_event("failed", 0, "worker", report=told))
    assert attempts.conclude({0: KILLED, 1: KILLED}).exit_code == 4


def test_a_roll_call_that_failed_keeps_its_exit_code() -> None:
    class ControllerError(Exception):
        controller_failure = RollCallError("ranks 0, 1 are on the same physical device")

    failure = Attempts().conclude_before_training(ControllerError())
    assert failure.exit_code == 3 and failure.render(2) == "ranks 0, 1 are on the same physical device"


@pytest.mark.parametrize(
    ("workers", "fewest", "sizes"), [(4, None, [4]), (4, 1, [4, 3, 2, 1]), (4, 2, [4, 3, 2]), (1, 1, [1])]
)
def test_the_numbers_of_workers_that_a_run_may_have(workers: int, fewest: int | None, sizes: list[int]) -> None:
    assert placement.sizes(workers, fewest) == sizes


def test_how_many_workers_living_nodes_hold() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 5.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert placement.capacity(nodes, {"CPU": 2.0}) == 6
    assert placement.capacity(nodes, {"CPU": 1.0, "GPU": 1.0}) == 2
