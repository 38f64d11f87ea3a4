"""The fault matrix: which kinds meet which moments, why the other pairs are none, and what must come of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sabotage import (
    ACTS,
    BEFORE_JOINING,
    CONFIG,
    DDP,
    DECIDING,
    EXCEPTION,
    EXIT,
    FIRST_STEP,
    FSDP,
    FULL_DISK,
    HSDP,
    IDENTITIES,
    LAST,
    LOOP,
    MID_EPOCH,
    MOMENTS,
    NAN,
    PERTURB,
    PERTURBED,
    RENAMING,
    ROLL_CALL,
    SAME_DEVICE,
    SAME_RANK,
    SAVING,
    SERVER,
    SHARDED_ACTS,
    SHARDED_MOMENTS,
    SIGKILL,
    SIGSTOP,
    SIGTERM,
    SIGTERM_GROUP,
    SIGTERM_LAUNCHER,
    SKIP,
    SOURCE,
    SYS_EXIT,
    VALIDATION,
    WORLD_SIZE,
    WRITING,
    WRITING_ELSEWHERE,
    WRITING_MOMENTS,
)

WORLD_SIZES = (2, 4)
WAYS = {DDP: WORLD_SIZES, FSDP: (2,), HSDP: (4,)}

# The limits that the ranks of the matrix run under, in seconds, and the interval of checkpoints, in steps.
STALL_AFTER, FIRST_TIME, JOIN_TIMEOUT, WRITE_TIMEOUT, CHECKPOINT_EVERY = 4, 8, 5, 4, 2
# Ranks that are started one by one each have to import torch first.
JOIN_BY_HAND = 20
# What a message may take beyond its limit: the others get 5 s to end by themselves, and machines are busy.
MARGIN = 8.0
# How much longer than rank 0 the others wait for its verdict at the roll call.
VERDICT = 5.0
# How much longer than rank 0 the others wait for its word that a checkpoint is whole.
LONGER = 10.0
# What a rank gets to end by itself once others have failed; one that runs in circles does not.
GIVE_UP = 5.0

# Seven steps make an epoch, and there are two: the tenth is in the midst of the second.
STEPS = {
    BEFORE_JOINING: 0,
    ROLL_CALL: 0,
    FIRST_STEP: 1,
    MID_EPOCH: 10,
    VALIDATION: 7,
    **dict.fromkeys((SAVING, *WRITING_MOMENTS), 8),
    DECIDING: 7,
    LAST: 14,
}
# With four ranks, rank 0 fails where it has a part of its own, and otherwise one that is neither first nor last.
_RANK_OF_FOUR = {ROLL_CALL: 0, VALIDATION: 0, DECIDING: 0, MID_EPOCH: 3}

NOT_A_CELL = {
    **{
        (kind, moment): "who a rank is, what it runs on and what it runs is fixed once the roll call is over"
        for kind in IDENTITIES
        for moment in MOMENTS
        if moment != ROLL_CALL
    },
    (SERVER, BEFORE_JOINING): "the other ranks may not be made yet, and then another server makes them",
    (SYS_EXIT, SAVING): "it is the thread that writes, and sys.exit would end no more than that",
    (SKIP, BEFORE_JOINING): "there is no exchange before ranks join",
    (NAN, BEFORE_JOINING): "there is no loss yet",
    (NAN, ROLL_CALL): "there is no loss yet",
    (NAN, VALIDATION): "it is no failure: nothing is trained with it, and the row of that validation says so",
    (NAN, DECIDING): "no loss is computed there",
    (NAN, LAST): "no loss is computed there",
    (PERTURB, BEFORE_JOINING): "there is no model yet",
    (PERTURB, ROLL_CALL): "there is no model yet",
    (PERTURB, LAST): "the last checkpoint is written and nothing is computed any more",
    **{
        (FULL_DISK, moment): "no checkpoint is being written; rows that cannot be written are another test's"
        for moment in (*MOMENTS, *SHARDED_MOMENTS)
        if moment not in (SAVING, *WRITING_MOMENTS)
    },
}
NOT_A_CELL_BY_FSDP = {
    (PERTURB, moment): "no other rank has the same part of a weight, to compare with: by hsdp there is one"
    for moment in SHARDED_MOMENTS
    if moment != LAST
}


@dataclass(frozen=True)
class Cell:
    kind: str
    moment: str
    world_size: int
    way: str = DDP

    @property
    def rank(self) -> int:
        if self.moment in (SAVING, WRITING, RENAMING):
            return 0  # who writes, or renames
        if self.kind in IDENTITIES:
            return 1
        return 1 if self.world_size == 2 else _RANK_OF_FOUR.get(self.moment, 2)

    @property
    def step(self) -> int:
        return STEPS[self.moment]

    @property
    def id(self) -> str:
        words = f"{self.kind} {self.moment} of {self.ranks}"
        return re.sub(r"[^\w]+", "-", words).strip("-")

    @property
    def ranks(self) -> str:
        """How many, and how the model is kept where each has but a part of it."""
        return str(self.world_size) + ("" if self.way == DDP else f", {self.way}")

    @property
    def starts_by_hand(self) -> bool:
        """Whether each rank is started on its own, as a foreign launcher does: ours does not make that mistake."""
        return self.kind in IDENTITIES and self.kind != SAME_DEVICE

    @property
    def stall_after(self) -> int:
        """As by default, the watch gives the roll call time to speak first."""
        return STALL_AFTER if STEPS[self.moment] else 6 * JOIN_TIMEOUT

    @property
    def write_timeout(self) -> int:
        """As by default, the watch speaks first where a rank that writes its part is stopped."""
        return 5 * WRITE_TIMEOUT if self.kind == SIGSTOP and self.moment in WRITING_MOMENTS else WRITE_TIMEOUT

    @property
    def slow(self) -> float:
        """Seconds a step takes: the shorter it is, the more steps lie between two pulses by which a stop is heard."""
        slower = self.moment == SAVING or self.moment in WRITING_MOMENTS
        return 0.15 if slower or self.kind in (SIGTERM, SIGTERM_LAUNCHER, SIGTERM_GROUP) else 0.02

    @property
    def settle(self) -> float:
        """Several ranks that write one checkpoint, on two cores, take longer than one."""
        return 0.5 if self.way == DDP else 1.0

    @property
    def leaves_no_checkpoint(self) -> bool:
        """Whether the one that is being written then never comes to be."""
        writes = self.moment == SAVING or self.moment in WRITING_MOMENTS
        return writes and self.kind in (SIGKILL, LOOP, FULL_DISK)


@dataclass(frozen=True)
class Expected:
    """What must come of a cell: the exit code, the headline, who or what it names, and within how many seconds."""

    code: int
    says: str  # a regular expression that is found in the message exactly once
    names: str
    within: float
    loses: int = CHECKPOINT_EVERY  # steps, at most
    or_code: int | None = None  # where it depends on how far the others have come


CELLS = [
    Cell(kind, moment, world_size)
    for kind in (*ACTS, *IDENTITIES)
    for moment in MOMENTS
    for world_size in WORLD_SIZES
    if (kind, moment) not in NOT_A_CELL
] + [
    Cell(kind, moment, world_size, way)
    for way in (FSDP, HSDP)
    for kind in SHARDED_ACTS
    for moment in SHARDED_MOMENTS
    for world_size in WAYS[way]
    if (kind, moment) not in NOT_A_CELL and not (way == FSDP and (kind, moment) in NOT_A_CELL_BY_FSDP)
]

# Every kind and every moment at least once, for `make test`.
SELECTION = {
    Cell(SIGKILL, SAVING, 2),
    Cell(SIGKILL, LAST, 4),
    Cell(SIGSTOP, MID_EPOCH, 2),
    Cell(SIGSTOP, SAVING, 2),
    Cell(SIGTERM, MID_EPOCH, 2),
    Cell(SIGTERM_LAUNCHER, VALIDATION, 2),
    Cell(SIGTERM_GROUP, MID_EPOCH, 2),
    Cell(EXCEPTION, DECIDING, 2),
    Cell(EXIT, FIRST_STEP, 2),
    Cell(SYS_EXIT, DECIDING, 2),
    Cell(SERVER, MID_EPOCH, 2),
    Cell(LOOP, BEFORE_JOINING, 2),
    Cell(SKIP, LAST, 2),
    Cell(NAN, MID_EPOCH, 2),
    Cell(SAME_DEVICE, ROLL_CALL, 2),
    Cell(SAME_RANK, ROLL_CALL, 4),
    Cell(WORLD_SIZE, ROLL_CALL, 2),
    Cell(CONFIG, ROLL_CALL, 2),
    Cell(SOURCE, ROLL_CALL, 2),
    Cell(SIGKILL, WRITING_ELSEWHERE, 2, FSDP),
    Cell(SIGKILL, RENAMING, 2, FSDP),
    Cell(FULL_DISK, WRITING, 2, FSDP),
    Cell(PERTURB, MID_EPOCH, 4, HSDP),
}


def expected(cell: Cell) -> Expected:
    """What the run must say and how it must end."""
    if cell.kind in IDENTITIES:
        return _identity(cell)
    rank, world_size = cell.rank, cell.world_size
    failed = rf"rank {rank} of {world_size} on \S+ failed: "
    at_once = Expected(5, "", f"rank {rank}", MARGIN, _most_lost(cell))
    if cell.kind == FULL_DISK:
        return _full_disk(cell)
    if cell.kind == SIGKILL:
        return _with(at_once, says=failed + "killed by SIGKILL")
    if cell.kind == EXIT:
        return _with(at_once, says=failed + r"the process left without finishing its work \(exit code 0\)")
    if cell.kind == SYS_EXIT:
        return _with(
            at_once, says=failed + r"sys\.exit\(0\) was called at sabotage\.py:\d+", names=f"rank {rank}, the line"
        )
    if cell.kind == SERVER:
        return _without_server(cell)
    if cell.kind == EXCEPTION:
        return _with(at_once, says=failed + "ValueError: this example cannot be right", names=f"rank {rank}, the line")
    if cell.kind in (SIGSTOP, LOOP):
        return _stuck(cell)
    if cell.kind in (SIGTERM, SIGTERM_LAUNCHER, SIGTERM_GROUP):
        return _asked_to_stop(cell)
    if cell.kind == SKIP:
        return _out_of_step(cell)
    if cell.kind == NAN:
        step = "(9|10)" if cell.moment == SAVING or cell.moment in WRITING_MOMENTS else cell.step
        return _with(at_once, says=rf"the loss is nan at step {step} on rank {rank}", names=f"rank {rank}, the step")
    assert cell.kind == PERTURB
    who = "between all ranks" if world_size == 2 else f"on rank {rank} from the others"
    names = "" if world_size == 2 else f", rank {rank}"
    if cell.way == HSDP:  # two ranks have the same part of it: either may be the one that has changed
        both = [rank // 2 * 2, rank // 2 * 2 + 1]
        who, names = f"between ranks {both[0]}, {both[1]}", f", ranks {both[0]} and {both[1]}"
    says = rf"not equal any more at step \d+: '{PERTURBED}' differs {who}"
    return _with(at_once, says=says, names=PERTURBED + names)


def _with(base: Expected, says: str, names: str | None = None) -> Expected:
    return Expected(base.code, says, base.names if names is None else names, base.within, base.loses)


def _most_lost(cell: Cell) -> int:
    """A checkpoint that is being written when its writer fails never comes to be, and steps went on meanwhile."""
    writes = cell.moment == SAVING or cell.moment in WRITING_MOMENTS
    return 2 * CHECKPOINT_EVERY if writes else CHECKPOINT_EVERY


def _full_disk(cell: Cell) -> Expected:
    """Whoever finds no room, all ranks learn of it, and none writes on."""
    who = "" if cell.rank == 0 else rf"rank {cell.rank} on \S+: "
    says = rf"step-00000008: the checkpoint could not be written: \[Errno 28\] {who}No space left on device"
    names = "the checkpoint, the space" if cell.rank == 0 else f"rank {cell.rank}, the checkpoint, the space"
    return Expected(5, says, names, MARGIN, _most_lost(cell))


def _stuck(cell: Cell) -> Expected:
    rank, world_size = cell.rank, cell.world_size
    if cell.moment in (BEFORE_JOINING, ROLL_CALL):
        within = JOIN_TIMEOUT + MARGIN + (VERDICT if rank == 0 else 0.0)
        return Expected(3, rf"rank {rank} of {world_size} did not arrive", f"rank {rank}", within)
    if cell.kind == LOOP and cell.moment == SAVING:
        says = rf"rank {rank} of {world_size} on \S+ failed: \S+: writing a checkpoint has taken more than 4 s"
        return Expected(5, says, "the checkpoints' folder", WRITE_TIMEOUT + MARGIN, _most_lost(cell))
    if cell.kind == LOOP and cell.moment in (WRITING, RENAMING):
        says = r"a checkpoint was not written: rank 0 has not said whether the checkpoint is whole within 4 s"
        return Expected(5, says, "rank 0", WRITE_TIMEOUT + LONGER + GIVE_UP + MARGIN, _most_lost(cell))
    if cell.kind == LOOP and cell.moment == WRITING_ELSEWHERE:
        says = rf"step-00000008: the checkpoint was not written: rank {rank} did not write the parts within 4 s"
        return Expected(5, says, f"rank {rank}, the checkpoint", WRITE_TIMEOUT + MARGIN, _most_lost(cell))
    within = FIRST_TIME + MARGIN
    if cell.kind == SIGSTOP:
        return Expected(4, rf"rank {rank}: stopped by a signal \(SIGSTOP\) ", f"rank {rank}", within, _most_lost(cell))
    return Expected(
        4, rf"rank {rank}: in [\w ]+ of step \d+, sabotage\.py:\d+, since", f"rank {rank}, the line", within
    )


def _asked_to_stop(cell: Cell) -> Expected:
    """One save, at the same step on all ranks; nothing is lost. Once the work is done, there is nothing to stop."""
    if cell.moment == LAST:
        return Expected(0, "completed: epoch 2, step 14", "-", MARGIN, 0)
    if cell.moment in (BEFORE_JOINING, ROLL_CALL) and cell.kind != SIGTERM:
        # A rank that is only being made has nothing to save, and leaves as it is; one that listens makes a first step.
        says = r"saved at step \d+ and leaving: SIGTERM on ranks? [\d, ]+\n|stopped before the first step: there was no"
        return Expected(75, says, "the signal", MARGIN, 0, or_code=130)
    # The launcher passes it on to one rank after the other, and the first that heard it speak for all.
    who, names = (f"rank {cell.rank}",) * 2 if cell.kind == SIGTERM else (r"ranks? [\d, ]+", "the signal")
    return Expected(75, rf"saved at step \d+ and leaving: SIGTERM on {who}\n", names, MARGIN, 0)


def _without_server(cell: Cell) -> Expected:
    """Ranks live on without the server, save and leave; once the work is done, nobody misses it."""
    if cell.moment == LAST:
        return Expected(0, "completed: epoch 2, step 14", "-", MARGIN, 0)
    return Expected(5, r"the fork server \(pid \d+\), which the ranks were made by, is gone", "the server", MARGIN, 0)


def _out_of_step(cell: Cell) -> Expected:
    rank, world_size = cell.rank, cell.world_size
    others = [each for each in range(world_size) if each != rank]
    they = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
    wait = "wait" if len(others) > 1 else "waits"
    exchanges = {
        ROLL_CALL: ("the run's folder", "the proof of the data plane"),
        VALIDATION: ("the end of validation", "validation"),
        **dict.fromkeys((SAVING, *WRITING_MOMENTS), ("generator states", "metrics of step 10")),
        LAST: ("how the run ended", "metrics of step 14"),
    }
    if cell.moment in exchanges:
        mine, theirs = exchanges[cell.moment]
        me, them = (f"rank {rank} at .{mine}.", f"{they} at .{theirs}.")
        order = f"{me}; {them}" if rank == 0 else f"{them}; {me}"
        return Expected(5, f"the ranks are not in step: {order}", f"rank {rank}, both places", MARGIN, _most_lost(cell))
    places = {
        FIRST_STEP: ("'the control sync at step 1'", "gradient reduction of step 1"),
        MID_EPOCH: ("'metrics of step 10'", "gradient reduction of step 10"),
        DECIDING: ("gradient reduction of step 8", "'whether to stop early'"),
    }
    mine, theirs = places[cell.moment]
    if cell.way != DDP:
        theirs = f"the parameters of the model of step {cell.step}"
    me, them = f"rank {rank} waits in {mine}", f"{they} {wait} in {theirs}"
    order = f"{me}; {them}" if rank == 0 else f"{them}; {me}"
    if cell.way == HSDP:  # the other half of the mesh comes further, to where the halves bring gradients together
        half = {rank % 2: f"rank {(rank + 2) % 4} waits in {theirs}"}
        half[1 - rank % 2] = (
            f"ranks {1 - rank % 2}, {3 - rank % 2} wait in the gradients of the model of step {cell.step}"
        )
        order = f"{half[0]}; {half[1]}; {me}"
    says = rf"the ranks wait for different things, since \d+ s: {order}"
    return Expected(4, says, f"rank {rank}, both places", FIRST_TIME + MARGIN)


def _identity(cell: Cell) -> Expected:
    says, names = {
        SAME_DEVICE: ("ranks 0, 1 are on the same physical device, host/device-0", "ranks 0 and 1, the device"),
        SAME_RANK: (
            (r"rank 1 is claimed 2 times, by process \d+ on \S+ and process \d+", "rank 1, both processes")
            if cell.world_size > 2
            else ("rank 1 of 2 did not arrive|RANK=0 is given to another process", "rank 1 is missing, RANK=0 twice")
        ),
        WORLD_SIZE: ("WORLD_SIZE differs: .* on rank 1", "rank 1, WORLD_SIZE"),
        CONFIG: ("rank 1 has another config: optimizer.lr is 0.2, on rank 0 0.1", "rank 1, optimizer.lr"),
        SOURCE: ("rank 1 has another version of the task's source: task.py on", "rank 1, task.py"),
    }[cell.kind]
    return Expected(3, says, names, MARGIN + (JOIN_BY_HAND if cell.kind == SAME_RANK else 0.0))
