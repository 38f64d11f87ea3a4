"""When ranks that do not get on are stuck, and which of them."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.schema import Timeouts
from lockstep.distributed.activity import LEFT, Activity, Beat
from lockstep.distributed.topology import Place, Topology
from lockstep.distributed.watch import heartbeat as heartbeats
from lockstep.distributed.watch.heartbeat import Heartbeat, interval, user_line
from lockstep.distributed.watch.stall import APART_SECONDS, Limits, RunningClock, Seen, Watcher, find_slow, find_stall

LIMITS = Limits(stall=300.0, first_step=1800.0, apart=APART_SECONDS)


def seen(rank: int, doing: str, still: float, *, quiet: float = 0.5, suspended: bool = False, **changes: Any) -> Seen:
    usual = Beat(9, 5, 118, doing, False, False, 0.0, max(still - quiet, 0.0), "")
    return Seen(rank, replace(usual, **changes), quiet, suspended)


def waiting(rank: int, doing: str = "gradient reduction", still: float = 305.0, **changes: Any) -> Seen:
    return seen(rank, doing, still, waits=True, **changes)


def test_who_is_stuck_and_who_waits_for_them() -> None:
    stall = find_stall([waiting(0), seen(1, "loss", 310, where="train.py:42"), waiting(2), waiting(3)], LIMITS)
    assert stall is not None
    assert stall.ranks == (1,)
    assert stall.message == (
        "rank 1: in loss of step 118, train.py:42, since 310 s; ranks 0, 2, 3 wait in gradient reduction of step 118"
    )


@pytest.mark.parametrize(
    "everyone",
    [
        pytest.param([seen(0, "loss", 200), waiting(1, still=200)], id="within the limit"),
        pytest.param([seen(0, "loss", 2), waiting(1, still=3000)], id="a rank that waits is not stuck while one works"),
        pytest.param([seen(0, "loss", 1500, first=True), waiting(1, still=1500)], id="the first time may take longer"),
        pytest.param([seen(0, "sampling", 900, limit=3600.0), waiting(1, still=900)], id="the user said it takes long"),
        pytest.param([waiting(0, still=20), waiting(1, "'metrics of step 9'", still=20)], id="apart, but not for long"),
        pytest.param([waiting(0, still=200), waiting(1, still=200)], id="a slow exchange"),
        pytest.param([seen(0, LEFT, 5000, waits=True, quiet=5000), seen(1, "loss", 3)], id="one is done"),
        pytest.param([seen(0, LEFT, 5000, waits=True, quiet=5000)], id="all are done"),
        pytest.param([Seen(0, None, 1000)], id="not yet heard of, and there is time"),
    ],
)
def test_ranks_that_get_on(everyone: list[Seen]) -> None:
    assert find_stall(everyone, LIMITS) is None


def test_ranks_that_wait_for_different_things_are_told_before_the_limit() -> None:
    everyone = [waiting(0, still=31), waiting(1, "'metrics of step 117'", still=40)]
    assert APART_SECONDS < 31
    stall = find_stall(everyone, LIMITS)
    assert stall is not None and stall.ranks == (0, 1)
    assert "rank 0 waits in gradient reduction of step 118; rank 1 waits in 'metrics of step 117'" in stall.message
    assert "different numbers of batches" in stall.message
    assert find_stall(everyone, Limits.of(Timeouts(stall=None), "cpu")) is None
    assert find_stall(everyone, Limits.of(Timeouts(), "cuda")) is None, "a device may still be at work on its queue"
    assert find_stall(everyone, Limits.of(Timeouts(), "cpu")) is not None


def test_a_rank_that_left_while_another_waits_for_it() -> None:
    """Leaving is something that a rank does for the first time, which gives those that wait for it no more time."""
    stall = find_stall([waiting(0, still=40), seen(1, LEFT, 50, waits=True, first=True)], LIMITS)
    assert stall is not None
    assert "rank 0 waits in gradient reduction of step 118; rank 1 has left" in stall.message


def test_all_wait_for_the_same_and_it_does_not_come() -> None:
    stall = find_stall([waiting(0), waiting(1)], LIMITS)
    assert stall is not None
    assert "all ranks wait, and nothing comes: ranks 0, 1 wait in gradient reduction of step 118" in stall.message


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (seen(1, "loss", 310, quiet=305, suspended=True), "rank 1: stopped by a signal (SIGSTOP) in loss of step 118"),
        (waiting(1, still=310, quiet=305), "rank 1: no sign of life since 305 s, last waits in gradient reduction"),
        (seen(1, "loss", 9, quiet=1805, first=True), "rank 1: no sign of life since 1805 s, last in loss of step 118"),
        (seen(1, "loss", 310, quiet=305, suspended=True, first=True), "rank 1: stopped by a signal (SIGSTOP) in loss"),
        (Seen(1, None, 1801), "rank 1: never gave a sign of life"),
    ],
)
def test_a_rank_that_gives_no_sign_of_life(rank: Seen, words: str) -> None:
    stall = find_stall([waiting(0), rank], LIMITS)
    assert stall is not None and stall.ranks == (1,)
    assert words in stall.message


def test_a_process_that_was_stopped_gets_no_more_time_for_what_it_was_doing() -> None:
    stopped = seen(1, "writing a checkpoint", 310, quiet=305, suspended=True, limit=1800.0)
    stall = find_stall([waiting(0), stopped], LIMITS)
    assert stall is not None and stall.ranks == (1,)
    assert find_stall([waiting(0), replace(stopped, suspended=False)], LIMITS) is None, "may be a slow disk"


def test_a_rank_in_code_of_its_own_is_left_alone_until_somebody_waits_for_it() -> None:
    own = seen(1, "main", 9999, limit=math.inf)
    assert find_stall([seen(0, "main", 9999, limit=math.inf), own], LIMITS) is None
    stall = find_stall([waiting(0, still=9000), own], LIMITS)
    assert stall is not None and stall.ranks == (1,)


def test_a_rank_may_be_held_up_for_as_long_as_another_may_take() -> None:
    """On a GPU the host of one rank waits for the device, at any line, while another writes a checkpoint."""
    writing = seen(0, "writing a checkpoint", 900, limit=1830.0)
    assert find_stall([writing, seen(1, "loss", 900)], LIMITS) is None
    ahead = seen(0, "data", 890, exchanges=8)
    stall = find_stall([ahead, seen(1, "loss", 900, exchanges=7)], LIMITS)
    assert stall is not None and stall.ranks == (1,), "rank 0 has begun an exchange that rank 1 has not"


def test_where_no_rank_waits_nobody_is_ended() -> None:
    """Rollouts, sampling, an upload: all ranks are in user code, and no rank holds up another."""
    everyone = [seen(0, "the end", 310, where="rollout.py:12"), seen(1, "the end", 305)]
    assert find_stall(everyone, LIMITS) is None
    first_to_be_done = waiting(0, still=2)
    assert find_stall([first_to_be_done, seen(1, "the end", 310)], LIMITS) is None, "it waits only since 2 s"
    assert find_stall([seen(0, "loss", 4000, quiet=3000)], LIMITS) is None, "native code that holds Python's lock"
    slow = find_slow(everyone, LIMITS)
    assert slow is not None and not slow.waited_for
    assert slow.message == (
        "rank 0: in the end of step 118, rollout.py:12, since 310 s; rank 1: in the end of step 118, since 305 s. No "
        "rank waits for another, so the run continues; run.working(name, limit) sets the limit"
    )
    assert find_slow([seen(0, "the end", 290), seen(1, "the end", 290)], LIMITS) is None
    assert find_slow([seen(0, "main", 9999, limit=math.inf)], LIMITS) is None


def test_a_save_is_requested_before_a_rank_that_others_wait_for_is_ended() -> None:
    everyone = [waiting(0, still=155), seen(1, "loss", 160, where="train.py:42")]
    assert find_stall(everyone, LIMITS) is None
    slow = find_slow(everyone, LIMITS)
    assert slow is not None and slow.waited_for and slow.ranks == (1,)
    assert slow.message.startswith("rank 0 waited 155 s for rank 1 (in loss of step 118, train.py:42). The run ends at")
    assert find_slow([waiting(0, still=140), seen(1, "loss", 160)], LIMITS) is None


def test_warnings_are_rare() -> None:
    class Store:
        beat: Beat

        def read_all(self, keys: list[str]) -> list[bytes]:
            return [self.beat.encode()]

    store = Store()
    watcher, told = Watcher(store, [0], LIMITS), []
    for number, still in enumerate([10, 290, 301, 310, 590, 700, 20, 310, 1399, 1401]):
        store.beat = Beat(number + 1, number, 3, "the end", False, False, 0.0, float(still), "")
        assert watcher.look() is None
        told += [still] if watcher.warning() is not None else []
    assert told == [301, 700, 1401], "once, and again when it takes twice as long"


def test_a_process_that_was_paused_did_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 602.0, 603.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    clock = RunningClock()
    assert [clock.now() for _ in range(4)] == [1.0, 2.0, 2.0, 3.0]


def test_beats_come_often_enough_for_a_short_limit() -> None:
    assert interval(LIMITS) == 1.0
    assert interval(Limits(4.0, 8.0)) == 0.5


@pytest.mark.parametrize("slow_store", [False, True])
def test_a_store_is_lost_while_it_owes_an_answer_and_not_while_the_beats_are_late(
    monkeypatch: pytest.MonkeyPatch, slow_store: bool
) -> None:
    """On a host with too few cores the beating thread may itself come late."""

    class Store:
        def set(self, key: str, value: bytes) -> None:
            answered.wait(10.0 if slow_store else 0.0)

        def read(self, key: str) -> None:
            return None

    class LateBeats(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            late = threading.current_thread().name == "lockstep-heartbeat"
            return super().wait(2.0 if late else timeout)

    answered, ended = threading.Event(), list[str]()
    monkeypatch.setattr(Heartbeat, "_end", lambda self, message: ended.append(message))
    heartbeat = Heartbeat(Store(), Topology(Place(rank=2), world_size=3, port=1), Activity(), Limits(0.4, 0.4))
    heartbeat._stopping = LateBeats()
    heartbeat.start()
    time.sleep(1.5)
    heartbeat._stopping.set()
    answered.set()
    heartbeat.stop()
    assert bool(ended) == slow_store, ended


def test_a_beat_keeps_no_tensor_of_the_training_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is looked at has its locals for as long as it is held: logits, into the backward pass."""
    monkeypatch.setattr(heartbeats, "_INTERVAL", -1.0)
    beating = Heartbeat(None, Topology(), Activity(), Limits(600, 600))
    lines: list[str] = []

    def forward() -> weakref.ref[Any]:
        logits = {1}
        thread = threading.Thread(target=lambda: lines.append(beating._now().where))
        thread.start()
        thread.join()
        return weakref.ref(logits)

    gc.disable()
    try:
        assert forward()() is None and lines[0].startswith("test_stall.py:")
    finally:
        gc.enable()


def test_a_rank_that_comes_to_another_block_of_a_split_model_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow backward pass of many blocks was ended: beats of one moment find ranks in different blocks."""
    monkeypatch.setattr(heartbeats, "_INTERVAL", -1.0)
    activity, blocks, still = Activity(), [2, 1, 1, 0], list[float]()
    activity.locate = lambda stacks: (f"the gradients of blocks.{blocks.pop(0)}", True)
    beating = Heartbeat(None, Topology(), activity, Limits(600, 600))
    activity._now = (*activity._now[:5], time.monotonic() - 50.0, 0.0)

    def beats() -> None:
        for _ in range(4):
            still.append(beating._now().still)
            time.sleep(0.15)

    other = threading.Thread(target=beats)
    other.start()
    other.join()
    assert still[0] >= 50.0 and still[1] == 0.0 and 0.1 <= still[2] < 1.0 and still[3] == 0.0


def test_a_beat_survives_its_way_through_the_store() -> None:
    beat = seen(0, "loss", 3.0, where="train.py:1").beat
    assert beat is not None and Beat.decode(beat.encode()) == beat
    assert Beat.decode(b"") is None


def test_the_line_of_the_user_and_not_of_a_library() -> None:
    assert user_line(sys._getframe()).startswith("test_stall.py:")
    assert user_line(None) == ""


# Activity


def test_something_is_the_first_of_its_kind_only_once() -> None:
    here = Activity()
    here.enter("loss", step=1)
    assert here.now.first and here.now.step == 1
    here.enter("data")
    here.enter("loss", step=2)
    assert not here.now.first


def test_what_happens_within_something_else_leaves_it_as_it_was() -> None:
    here = Activity()
    here.enter("validation", step=4)
    before = here.now
    with here.within("'metrics of step 4'", waits=True):
        assert here.now.waits and here.now.doing == "'metrics of step 4'" and not here.now.first
    assert here.now._replace(number=before.number, since=before.since) == before
    assert here.now.number == before.number + 2, "coming back is progress"
    assert time.monotonic() - here.now.since < 5
