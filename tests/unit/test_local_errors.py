"""Errors of torch and the system that are a rank's own, told from a lost connection."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.config.load import validate
from lockstep.config.schema import RunConfig
from lockstep.distributed import failure
from lockstep.distributed.failure import Result, ended_by_the_kernel, find_cause, report
from lockstep.distributed.group import Group
from lockstep.errors import PREEMPTED_EXIT_CODE, PeerLost
from lockstep.launchers.ending import conclude
from lockstep.launchers.local import limits

WORKER = "DataLoader worker (pid 4711) is killed by signal: Killed. "
BUS = (
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
FROM_WORKER = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    "RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)\n"
)
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15 GiB\nmore"


@pytest.mark.parametrize(
    ("error", "beginning", "is_complete"),
    [
        (
            RuntimeError(WORKER),
            "a data worker died: DataLoader worker (pid 4711) is killed by signal: Killed. Wh",
            True,
        ),
        (RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"), "a data worker died: DataLoader", True),
        (RuntimeError(BUS), "shared memory is full: DataLoader worker (pid 4711) is killed by signal: Bus", True),
        (RuntimeError(FROM_WORKER), "shared memory is full: RuntimeError: unable to write to file </torch_1", True),
        (torch.OutOfMemoryError(CUDA), "out of memory: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0", False),
        (MemoryError(), "out of memory: MemoryError. To need less", False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory. ", False),
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "could not be written: [Errno 28] No space l", True),
    ],
)
def test_it_is_called_what_it_is(error: BaseException, beginning: str, is_complete: bool) -> None:
    found = failure.local_error(error)
    assert found is not None
    assert (found.message[: len(beginning)], found.is_complete) == (beginning, is_complete)
    written = report(error, 1, "box")
    assert (written.message, written.consequence) == (found.message, False)
    group = Group(0, 2, timeout=1.0)
    if isinstance(error, RuntimeError):
        assert group.explain(error, "the gradients of step 1") is error
        with pytest.raises(RuntimeError) as raised, group._waiting("a barrier"):
            raise error
        assert raised.value is error, "what a rank found out while it waited is not about the others"


def test_whose_memory_it_is() -> None:
    assert report(torch.OutOfMemoryError(CUDA), 0, "box").memory == "device"
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52)
    assert report(raised.value, 0, "box").memory == "host"
    assert report(RuntimeError(WORKER), 0, "box").memory == report(ValueError("no"), 0, "box").memory == ""


@pytest.mark.parametrize("text", ["Connection closed by peer [127.0.0.1]:4711", "Connection reset by peer"])
def test_a_lost_connection_is_none_of_these(text: str) -> None:
    error = RuntimeError(text)
    assert failure.local_error(error) is None
    assert report(error, 1, "box").consequence
    assert isinstance(Group(0, 2, timeout=9.0).explain(error, "the gradients"), PeerLost)


@pytest.mark.parametrize("error", [ValueError("out of memory"), KeyError("shared memory"), RuntimeError("bus error")])
def test_an_error_of_the_users_own_is_left_alone(error: Exception) -> None:
    assert failure.local_error(error) is None


def test_memory_that_ran_out_in_earnest() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**52)
    assert failure.local_error(raised.value) is not None
    with pytest.raises(MemoryError) as failed:
        bytearray(2**62)
    assert failure.local_error(failed.value) is not None


class Dying(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_was_killed_in_earnest() -> None:
    with pytest.raises(RuntimeError) as raised:
        list(DataLoader(Dying(), num_workers=1))
    found = failure.local_error(raised.value)
    assert found is not None and found.message.startswith("a data worker died: DataLoader worker (pid")


def test_kills_by_the_kernel_are_told_from_others(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 3\n")
    assert limits.kills_for_memory(counters) == 3 and limits.kills_for_memory(tmp_path / "none") == 0
    killed = ended_by_the_kernel(find_cause([], {0: -9}, "box"))
    assert (killed.memory, killed.cause) == ("host", "killed by SIGKILL: the kernel has ended it for lack of memory")
    left = find_cause([], {0: 1}, "box")
    assert ended_by_the_kernel(left) is left


def test_commands_that_are_named_at_the_end_can_be_pasted(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "my runs" / "it's"
    folder.mkdir(parents=True)
    config = validate(RunConfig, {"task": "a.b:C"}, {}, "c")
    assert conclude(folder, Result(PREEMPTED_EXIT_CODE), config, said.append) == PREEMPTED_EXIT_CODE
    (told,) = (each for each in said if "go on with: " in each)
    assert shlex.split(told.partition("go on with: ")[2]) == ["lockstep", "resume", str(folder)]
