"""How a rank misbehaves on purpose: what, where and when, as plain data, and the code that does it inside of a rank.

A fault travels to the ranks in an environment variable, since some faults happen before there is a config. What is
wrapped here only says when a fault happens and how far a rank came; what is tested is the product as it is.
"""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

VARIABLE = "LOCKSTEP_TEST_FAULT"

DDP, FSDP, HSDP = "ddp", "fsdp", "hsdp"  # ways of running

BEFORE_JOINING, ROLL_CALL, FIRST_STEP, MID_EPOCH, VALIDATION, SAVING, DECIDING, LAST = MOMENTS = (
    "before joining",
    "at roll call",
    "first step",
    "mid-epoch",
    "in validation",
    "while a checkpoint is being written",
    "between validation and decision",
    "last barrier",
)
# Where every rank writes its own part of a checkpoint, SAVING is three moments.
WRITING, WRITING_ELSEWHERE, RENAMING = WRITING_MOMENTS = (
    "while rank 0 writes its shards",
    "while another rank writes its shards",
    "between the last shard and the rename",
)
SHARDED_MOMENTS = (FIRST_STEP, MID_EPOCH, VALIDATION, *WRITING_MOMENTS, LAST)
(
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    SIGTERM_LAUNCHER,
    SIGTERM_GROUP,
    EXCEPTION,
    EXIT,
    SYS_EXIT,
    SERVER,
    LOOP,
    SKIP,
    NAN,
    PERTURB,
    FULL_DISK,
) = ACTS = (
    "SIGKILL",
    "SIGSTOP",
    "SIGTERM to one rank",
    "SIGTERM to the launcher",
    "SIGTERM to the group, with data workers",
    "exception",
    "os._exit(0)",
    "sys.exit(0)",
    "SIGKILL to the fork server",
    "infinite loop",
    "skipped collective",
    "NaN",
    "perturbed weight",
    "full disk",
)
# The others do not ask how the model is kept.
SHARDED_ACTS = (SIGKILL, SIGSTOP, SIGTERM, SIGTERM_LAUNCHER, LOOP, SKIP, NAN, PERTURB, FULL_DISK)
SAME_DEVICE, SAME_RANK, WORLD_SIZE, CONFIG, SOURCE = IDENTITIES = (
    "wrong device",
    "duplicate rank",
    "wrong world size",
    "different config",
    "different task source",
)

# Which exchange a rank leaves out; in a training step it is the reduction of the gradients, or all of the model.
LEFT_OUT = {
    ROLL_CALL: "the proof of the data plane",
    VALIDATION: "validation",
    **dict.fromkeys((SAVING, *WRITING_MOMENTS), "metrics of step 10"),
    DECIDING: "whether to stop early",
    LAST: "metrics of step 14",
}
PERTURBED = "hidden.weight"


@dataclass(frozen=True)
class Fault:
    how: str
    moment: str
    rank: int
    step: int
    folder: str = ""  # where ranks leave word: `happened`, `steps-0`, `steps-1`
    slow: float = 0.0  # seconds that every training step takes
    # Long enough for a checkpoint that is being written to be there, so that what is lost does not depend on chance.
    settle: float = 0.5

    def env(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def fail_at(rank: int, step: int, how: str, moment: str, folder: Path, slow: float = 0.0, settle: float = 0.5) -> Fault:
    return Fault(how, moment, rank, step, str(folder), slow, settle)


def happened(fault: Fault) -> float:
    """When the fault happened, by the clock of the file system."""
    return (Path(fault.folder) / "happened").stat().st_mtime


def steps_done(fault: Fault) -> int:
    """How many steps the rank that came furthest had done in the end."""
    return max((int(each.read_text() or 0) for each in Path(fault.folder).glob("steps-*")), default=0)


class Saboteur:
    """Lives in every rank, waits there for the moment, and on the rank in question acts, once."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.rank, self.here = fault, rank, rank == fault.rank
        self.model: nn.Module | None = None  # the bare one, once the task has made it
        self.writes: int | None = None  # the step whose shards this rank has begun to write
        self._pending: set[str] = set()  # what was asked for elsewhere and is to happen in the training thread

    def reached(self, moment: str, step: int) -> None:
        if not self.here or (moment, step) != (self.fault.moment, self.fault.step) or self._mark().exists():
            return
        if moment not in (BEFORE_JOINING, ROLL_CALL, SAVING, *WRITING_MOMENTS):
            time.sleep(self.fault.settle)
        self._mark().touch()
        self._act(self.fault.how)

    def taking(self, what: str) -> bool:
        """Whether something is due now in the training thread; asking for it takes it."""
        if what not in self._pending:
            return False
        self._pending.remove(what)
        return True

    def _mark(self) -> Path:
        return Path(self.fault.folder) / "happened"

    def _act(self, how: str) -> None:
        launcher = multiprocessing.parent_process()
        if how == SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == SIGTERM_LAUNCHER:
            assert launcher is not None and launcher.pid is not None
            os.kill(launcher.pid, signal.SIGTERM)
        elif how == SIGTERM_GROUP:
            os.killpg(os.getpgid(0), signal.SIGTERM)
        elif how == SYS_EXIT:
            sys.exit(0)
        elif how == SERVER:
            os.kill(os.getppid(), signal.SIGKILL)
        elif how == EXCEPTION:
            raise ValueError("this example cannot be right")
        elif how == EXIT:
            os._exit(0)
        elif how == LOOP:
            _loop()
        elif how == FULL_DISK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif how == PERTURB and threading.current_thread() is threading.main_thread():
            self.perturb()
        else:
            self._pending.add(how)

    def perturb(self) -> None:
        """Change a weight by a little; of one that is split, this rank's part."""
        assert self.model is not None
        weight = self.model.get_parameter(PERTURBED)
        with torch.no_grad():
            (weight.to_local() if isinstance(weight, DTensor) else weight)[0, 0] += 1e-3


def _loop() -> NoReturn:
    while True:
        pass


def saboteur() -> Saboteur | None:
    """The one of this rank, with everything in place that it needs to know when; none in a run without a fault."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    found = Saboteur(Fault(**json.loads(text)), int(os.environ["RANK"]))
    if found.fault.how == SAME_DEVICE:
        _claim_one_device(found)
    else:
        _watch_for_moments(found)
    found.reached(BEFORE_JOINING, 0)
    return found


def _watch_for_moments(saboteur: Saboteur) -> None:
    import lockstep.distributed.rollcall.call as hold
    from lockstep.checkpoint import manifest, ranges
    from lockstep.checkpoint.sharded_writer import ShardedWriter
    from lockstep.checkpoint.storage import CheckpointStorage
    from lockstep.distributed.group import Group
    from lockstep.engine.engine import Engine
    from lockstep.engine.run import Run

    def before(owner: Any, name: str, happens: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            happens(*args, **kwargs)
            return inner(*args, **kwargs)

        setattr(owner, name, wrapped)

    def after(owner: Any, name: str, happens: Callable[..., None]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            value = inner(*args, **kwargs)
            happens(*args, **kwargs)
            return value

        setattr(owner, name, wrapped)

    def files_are_written(folder: Path, told: Any) -> None:
        """Everything but the manifest is there, under the temporary name."""
        saboteur.reached(SAVING, int(told["step"]))

    def writes_shards(writer: Any, folder: Path, saving: Any, *blocks: Any) -> None:
        saboteur.writes = saving.step

    def first_shard_is_written(*about: Any) -> None:
        """And others are not: this rank is in the midst of it."""
        step, saboteur.writes = saboteur.writes, None
        if step is not None:
            saboteur.reached(WRITING if saboteur.rank == 0 else WRITING_ELSEWHERE, step)

    def about_to_be_renamed(storage: Any, temporary: Path, final: Path) -> None:
        saboteur.reached(RENAMING, int(final.name.removeprefix("step-")))

    def validated(run: Run, name: str = "") -> None:
        if name == "the end of validation":
            saboteur.reached(DECIDING, run.progress.step)

    def note_step(run: Run, *optimizer: Any) -> None:
        (Path(saboteur.fault.folder) / f"steps-{saboteur.rank}").write_text(str(run.progress.step))

    before(hold, "call", lambda *args, **kwargs: saboteur.reached(ROLL_CALL, 0))
    before(manifest, "write", files_are_written)
    before(ShardedWriter, "_write_blocks", writes_shards)
    after(ranges, "put", first_shard_is_written)
    before(CheckpointStorage, "_publish", about_to_be_renamed)
    after(Run, "barrier", validated)
    before(Engine, "finish", lambda engine, *status: saboteur.reached(LAST, engine.progress.step))
    after(Run, "step", note_step)
    _leave_out_when_asked(saboteur, Group)


def _leave_out_when_asked(saboteur: Saboteur, group: type) -> None:
    """A rank that leaves out an exchange goes on with what it has itself."""
    name_left_out = LEFT_OUT.get(saboteur.fault.moment)
    rendezvous, agree = group.rendezvous, group.agree  # type: ignore[attr-defined]

    def leaves_out(name: str) -> bool:
        in_training_thread = threading.current_thread() is threading.main_thread()
        return name == name_left_out and in_training_thread and saboteur.taking(SKIP)

    def own_rendezvous(self: Any, tag: str, payload: bytes = b"") -> list[bytes]:
        return [payload] * self.world_size if leaves_out(tag) else rendezvous(self, tag, payload)

    def own_agree(self: Any, value: Any, name: str = "a decision") -> Any:
        return value() if leaves_out(name) else agree(self, value, name)

    group.rendezvous, group.agree = own_rendezvous, own_agree  # type: ignore[attr-defined]


def _claim_one_device(saboteur: Saboteur) -> None:
    """There is one CPU runtime per process, so two ranks on one device can only be pretended here."""
    from lockstep.runtime.cpu import CpuRuntime

    if saboteur.rank in (0, saboteur.fault.rank):
        CpuRuntime.identity = lambda self: "host/device-0"  # type: ignore[method-assign]
    if saboteur.here:
        saboteur._mark().touch()
