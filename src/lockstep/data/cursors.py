"""Where training is in its data: a cursor for every source, saved with what its position depends on.

A source is one dataset as the training loop walks it. It counts its own epochs, so that two sources in one epoch of the
run do not disturb each other. A cursor belongs to a live dataset, or to the name that `run.batches(..., name=...)`
gives it. A loop may build its dataset anew for every pass: the new one inherits the cursor of one that no longer
exists. After a restore, a source is matched by its name, or by what was saved of it: type, length and the call of
`run.batches` in the code. What is ambiguous is refused.
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import CodeType, FrameType, ModuleType
from typing import Any

from lockstep.config.values import Interval
from lockstep.data.batches import MicroBatch, Position
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]


@dataclass
class Progress:
    """How far training has come. Equal on all ranks at every step boundary."""

    epoch: int = 0  # whole epochs done and left behind, what follows their last step included
    step: int = 0  # global batches trained on, however many optimizers stepped for each
    batch: int = 0  # global batches done in the pass over the data that is under way
    examples: int = 0  # examples trained on, over all ranks
    tokens: int = 0  # tokens trained on, over all ranks, where the task says how many an example has
    epoch_ended: bool = False  # whether the last step was the last of its pass over the data

    @property
    def epochs_done(self) -> int:
        """Whole epochs, counting one whose last step was the last one made."""
        return self.epoch + self.epoch_ended

    def next_epoch(self) -> None:
        self.epoch, self.batch, self.epoch_ended = self.epoch + 1, 0, False

    def state_dict(self, epoch_is_done: bool = False) -> dict[str, Any]:
        """Returns the state; with `epoch_is_done`, as it will be once the loop has come back for the next epoch."""
        state = asdict(self)
        return {**state, "epoch": self.epoch + 1, "batch": 0, "epoch_ended": False} if epoch_is_done else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in (each.name for each in fields(self)):
            setattr(self, name, state[name])


class Due:
    """Tells when an interval has passed. Steps and epochs are counted; seconds come from a clock that ranks share."""

    def __init__(self, interval: Interval | None) -> None:
        self._interval = interval
        self._last = 0.0

    def now(self, progress: Progress, clock: float) -> bool:
        if self._interval is None:
            return False
        count = self._interval.count
        if self._interval.unit == "step":
            return progress.step % count == 0
        if self._interval.unit == "epoch":
            return progress.epoch_ended and progress.epochs_done % count == 0
        if clock - self._last < count:
            return False
        self._last = clock
        return True


def call_site(frame: FrameType) -> str:
    """Names the call of `run.batches` that a frame is in, by its function and number: lines may move in an edit."""
    return _site(frame.f_code, frame.f_lasti)


@functools.cache
def _site(code: CodeType, at: int) -> str:
    calls = _calls(code)
    return f"{code.co_qualname}, call {sum(each <= at for each in calls)} of {len(calls)}"


def _calls(code: CodeType) -> list[int]:
    return [each.offset for each in dis.get_instructions(code) if each.argval in ("batches", "stream")]


def _exists(site: str, current: str | None) -> bool:
    """Whether the loaded code has such a call of `run.batches`; `current` is one that it has."""
    function, _, number = site.rpartition(", call ")
    calls = number.rpartition(" of ")[2]
    if current is not None and current.startswith(f"{function}, call ") and current.endswith(f" of {calls}"):
        return True
    first, *rest = function.split(".")
    for module in list(sys.modules.values()):
        found = vars(module).get(first) if isinstance(module, ModuleType) else None
        code = _code(found, rest) if found is not None else None
        if code is not None and code.co_qualname == function and len(_calls(code)) == int(calls):
            return True
    return False


def _code(found: Any, path: Sequence[str]) -> CodeType | None:
    """Returns the code of a function, of a method, or of a function within a function."""
    for name in path:
        if name == "<locals>":
            continue
        code = _code_of(found)
        if code is None:
            found = vars(found).get(name) if isinstance(found, type) else None
        else:
            found = next((each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name), None)
    return _code_of(found)


def _code_of(found: Any) -> CodeType | None:
    found = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else found
    code = found if isinstance(found, CodeType) else getattr(found, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Reference:
    """Refers to a dataset without keeping it alive, where its type allows that."""

    def __init__(self, dataset: Any) -> None:
        self._weak: weakref.ref[Any] | None = None
        self._strong: Any = None
        try:
            self._weak = weakref.ref(dataset)
        except TypeError:  # a list or a tuple
            self._strong = dataset

    def is_to(self, dataset: Any) -> bool:
        return (self._strong if self._weak is None else self._weak()) is dataset

    @property
    def is_dead(self) -> bool:
        if self._weak is not None:
            return self._weak() is None
        return sys.getrefcount(self._strong) <= 2  # this object's own reference, and the argument of the call


@dataclass(frozen=True)
class Look:
    """What an unnamed source is recognized by, beside the calls of run.batches that walk it."""

    kind: str  # the type of the dataset
    count: int | None

    @classmethod
    def of(cls, dataset: Any, count: int | None) -> Look:
        return cls(f"{type(dataset).__module__}.{type(dataset).__qualname__}", count)

    def __str__(self) -> str:
        size = "" if self.count is None else f" of {self.count} examples"
        return f"{self.kind.rpartition('.')[2]}{size}"


@dataclass
class Cursor:
    """The position in one source. It advances when the step of a batch is done, not when the batch is handed out."""

    name: str
    look: Look | None = None  # None where the user gave the name
    sites: list[str] = field(default_factory=list)  # the calls of run.batches that have walked it
    facts: dict[str, Any] | None = None  # what the position depends on, from the first pass on
    epoch: int = 0  # passes over the source: what its order is a function of
    batch: int = 0  # global batches done in this pass
    position: Position = field(default_factory=Position)  # the same in examples; streams have none
    # Whether all of them are done. What follows the pass in the user's loop may not be: so the cursor stays at the end
    # until the loop has been left, and a run that is resumed there finds the pass empty.
    ended: bool = False
    passes: int = 0  # how often the loop over it was left in this epoch of the run
    # The source whose loop was under way when this one was opened: zip() asks that one first, and asks this one no more
    # once that one has ended.
    leader: str | None = None
    taken: int = 0  # micro-batches that the loop has taken of this pass
    micro: MicroBatch | None = field(default=None, repr=False)  # the last of them
    opened_at: int = 0  # how many were taken of the leader when this pass was opened
    taken_at: int = 0  # and when its last micro-batch was taken
    outlived: str | None = None  # a source whose pass has ended, though it was walked beside this one
    # Of a stream in the middle of a pass: where all dp ranks were when the run was saved; None of any other source.
    stream: dict[str, Any] | None = None
    place: Callable[[], Any] | None = field(default=None, repr=False)  # where this rank is in it now
    kind: str = ""  # of stream that it is, which says what its places mean
    dataset: Reference | None = field(default=None, repr=False)  # None after a restore, until the source is walked
    is_open: bool = False
    opened: bool = False  # since this start of the run
    to_skip: int = 0  # passes of the epoch under way that were done before the run was restored

    @property
    def in_pass(self) -> bool:
        return bool(self.batch and not self.ended)

    def advance(self, micro: MicroBatch) -> None:
        self.batch, self.ended = micro.batch + 1, micro.completes_epoch
        self.position = micro.after or self.position
        self.place = None if self.ended else micro.place

    def leave(self, finished: bool) -> None:
        self.is_open = False
        if finished or self.ended:
            self.epoch, self.batch, self.ended = self.epoch + 1, 0, False
            self.position = self.position._replace(batch=0, begin=0)
            self.stream = self.place = None

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("name", "facts", "epoch", "batch", "ended", "passes", "leader")}
        look, state["position"] = self.look, list(self.position)
        state["look"] = None if look is None else [look.kind, look.count]
        state["sites"] = list(self.sites)
        return state if self.stream is None else {**state, "stream": self.stream}


class Cursors:
    """The cursors of a run, in the order in which their sources were first walked."""

    def __init__(self) -> None:
        self._cursors: list[Cursor] = []

    @property
    def between_passes(self) -> bool:
        """Whether a pass of this epoch was left and none is under way: here is what follows the inner loop."""
        return any(each.passes for each in self._cursors) and not self.any_open

    def open(self, dataset: Any, facts: Facts, name: str | None = None, site: str | None = None) -> Cursor | None:
        """Returns the cursor of a source that is about to be walked; None where this pass was done before a restore."""
        cursor = self.find(dataset, facts.get("count"), name, site)
        if cursor.is_open:
            raise ConfigError(
                f"run.batches: {cursor.name} is being walked already: its position would be counted twice. Leave the "
                "first loop over it before, or give the second one its own name: run.batches(..., name='second')"
            )
        if cursor.to_skip:
            cursor.to_skip -= 1
            return None
        self._check(cursor, facts)
        leaders = [each for each in self._cursors if each.is_open and not self.leader_of(each)]
        cursor.leader, cursor.opened_at = (leaders[0].name, leaders[0].taken) if leaders else (None, 0)
        cursor.facts, cursor.is_open, cursor.opened = dict(facts), True, True
        cursor.taken, cursor.taken_at, cursor.outlived = 0, 0, None
        return cursor

    def take(self, cursor: Cursor, micro: MicroBatch) -> Cursor | None:
        """Notes that the loop takes a micro-batch. Returns the source that it asks before this one, if any.

        Refuses to go on without a source that was walked beside this one and has ended: a resumed run would not know
        that, and end this loop.
        """
        leader = self.leader_of(cursor)
        if leader is not None:
            assert leader.micro is not None
            if cursor.taken_at == leader.taken and not leader.micro.completes_batch:
                raise ConfigError(
                    f"run.batches: the loop over {cursor.name} is within the one over {leader.name}, whose batches are "
                    "in parts (accumulate, or train.exact): it would be walked for each part. Take whole batches there"
                )
            cursor.taken_at = leader.taken
        cursor.taken, cursor.micro = cursor.taken + 1, micro
        beside = next((each for each in self._cursors if each.name == cursor.outlived), None)
        if beside is not None and not beside.is_open:
            raise ConfigError(
                f"run.batches: the pass over {beside.name} has ended, and the loop continues with {cursor.name} alone "
                "(itertools.cycle, zip_longest): a resumed run could not continue there. To begin it again, give zip a "
                "generator: while True: yield from run.batches(...)"
            )
        cursor.outlived = None
        return leader

    def leave(self, cursor: Cursor, finished: bool) -> None:
        """The loop over a source was left, at its end or before.

        The passes of others that were walked together with it (zip) and are done as well end with it: nobody asks for
        them again. After a resume, such a pass is skipped with that of its leader, and not once more for itself. One
        that was made within a batch of its leader belongs to that batch.
        """
        leader = self.leader_of(cursor)
        if leader is not None and finished and cursor.opened_at != leader.taken:
            leader.outlived = cursor.name
        cursor.passes += cursor.leader is None
        cursor.leave(finished)
        for each in self._cursors:
            if each.leader == cursor.name and each.ended:
                each.leave(finished=True)

    def leader_of(self, cursor: Cursor) -> Cursor | None:
        """Returns the source that the loop asks before this one, if it is under way."""
        return next((each for each in self._cursors if each.is_open and each.name == cursor.leader), None)

    @property
    def any_open(self) -> bool:
        return any(each.is_open for each in self._cursors)

    @property
    def moved_on(self) -> list[Cursor]:
        """Those of streams of which a batch is done since they were opened or saved."""
        return [each for each in self._cursors if each.place is not None]

    def begin_epoch(self) -> None:
        for cursor in self._cursors:
            cursor.passes = cursor.to_skip = 0

    def state_dict(self, epoch_is_done: bool = False) -> list[dict[str, Any]]:
        states = [cursor.state_dict() for cursor in self._cursors]
        return [{**each, "passes": 0} for each in states] if epoch_is_done else states

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        self._cursors = [
            Cursor(
                **{
                    **state,
                    "look": Look(*state["look"]) if state["look"] else None,
                    "position": Position(*state["position"]),
                },
                to_skip=state["passes"],
            )
            for state in states
        ]

    def knows(self, dataset: Any) -> bool:
        return any(each.dataset is not None and each.dataset.is_to(dataset) for each in self._cursors)

    @property
    def closed(self) -> list[str]:
        return [each.name for each in self._cursors if not each.is_open]

    def find(self, dataset: Any, count: int | None, name: str | None, site: str | None = None) -> Cursor:
        """Returns the cursor of a source, whether it is walked or not."""
        look = Look.of(dataset, count)
        if name is not None:
            cursor = next((each for each in self._cursors if each.name == name), None) or self._new(name)
        else:
            cursor = self._of_dataset(dataset, look, site)
        if not cursor.is_open:
            cursor.dataset = Reference(dataset)
            cursor.look = look if name is None else None
            if site is not None and site not in cursor.sites:
                cursor.sites.append(site)
        return cursor

    def _of_dataset(self, dataset: Any, look: Look, site: str | None) -> Cursor:
        for cursor in self._cursors:
            if cursor.dataset is not None and cursor.dataset.is_to(dataset) and cursor.look is not None:
                return cursor
        return self._restored(look, site) or self._inherited(look, site) or self._new(None)

    def _restored(self, look: Look, site: str | None) -> Cursor | None:
        """Returns the cursor of a checkpoint that a new source fits, of those that none has claimed yet.

        One whose call of run.batches is still in the code waits for that call. Only where the code was changed is a
        source matched by its type and length, or by its type alone.
        """
        left = [each for each in self._cursors if each.dataset is None and each.look is not None]
        alike = [each for each in left if each.look == look]
        of_kind = [each for each in left if each.look is not None and each.look.kind == look.kind]
        of_site = [each for each in of_kind if site in each.sites]
        gone = [each for each in left if not any(_exists(saved, site) for saved in each.sites)]
        of_kind = [each for each in of_kind if len(left) == 1 and each in gone]
        for found in ([each for each in of_site if each in alike], alike, of_site, of_kind):
            if len(found) == 1 and (found[0] in of_site or found[0] in gone):
                return found[0]
            if found:
                raise ConfigError(
                    f"run.batches: this {look} may be {' or '.join(each.name for each in found)} of the checkpoint, of "
                    f"the same type and length. If it is, name it: run.batches(..., name={found[0].name!r}). If it is "
                    "another, give it another name"
                )
        if begun := [each for each in gone if each.in_pass and not each.to_skip]:
            shown = "; ".join(f"{each.name}: a {each.look}, {each.batch} batches done" for each in begun)
            raise ConfigError(
                f"run.batches: this {look} is none of the sources that the checkpoint is in the middle of ({shown}). "
                f"If it is one of them, name it: run.batches(..., name={begun[0].name!r}). If it is new, give it "
                "another name"
            )
        return None

    def _inherited(self, look: Look, site: str | None) -> Cursor | None:
        """Returns the cursor of a dataset that is gone, and that this one takes the place of."""
        alike = [
            each for each in self._cursors if each.look == look and site in each.sites and each.dataset is not None
        ]
        if not alike:
            return None
        dead = [each for each in alike if each.dataset is not None and each.dataset.is_dead]
        if not dead:
            gc.collect()  # a dataset that refers to itself outlives its last user
            dead = [each for each in alike if each.dataset is not None and each.dataset.is_dead]
        if len(dead) == 1 and len(alike) == 1:
            return dead[0]
        raise ConfigError(
            f"run.batches: this {look} cannot be distinguished from {' and '.join(each.name for each in alike)}: the "
            "same call walks both, and their type and length are the same. Give each source a name: "
            "run.batches(..., name='a')"
        )

    def _new(self, name: str | None) -> Cursor:
        if name is None:
            taken = {each.name for each in self._cursors}
            numbered = (f"source {number}" for number in itertools.count(len(taken) + 1))
            name = next(each for each in numbered if each not in taken)
        self._cursors.append(Cursor(name))
        return self._cursors[-1]

    def _check(self, cursor: Cursor, facts: Facts) -> None:
        """Refuses to resume in the middle of a pass where something that its position depends on has changed."""
        before = cursor.facts or {}
        # Which examples there are in which place may be new in every pass: in the middle of one, it may not.
        changed = [f"{name} {before[name]!r} -> {value!r}" for name, value in facts.items()
                   if name in before and before[name] != value and (cursor.in_pass or name != "examples")]  # fmt: skip
        if not changed:
            return
        if cursor.in_pass:
            raise ConfigError(
                f"run.batches: {cursor.batch} batches of this pass over {cursor.name} are done, and it cannot be "
                f"resumed with {', '.join(changed)}: examples would be trained on twice, or never. Undo the change "
                "until the pass is done, or resume from a checkpoint at the end of an epoch: run.restore(step=...)"
            )
        text = f"{cursor.name} is walked differently from here on: {', '.join(changed)}"
        if before.get("count", facts.get("count")) == facts.get("count") or cursor.opened:
            logger.info(text)
        else:  # since the run was resumed
            logger.warning(
                "%s. Where it is a random part of other data, of which another part is for validation, examples may "
                "have moved between the two", text,
            )  # fmt: skip
