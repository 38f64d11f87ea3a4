"""Saves a run so that it resumes bit for bit, and restores it: what is saved, when it is worth it, and by whom."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import codec, reader
from lockstep.checkpoint.registered import RegisteredState, Stateful, Weights
from lockstep.checkpoint.retention import best_first
from lockstep.checkpoint.sharded_writer import ShardedWriter
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import WholeWriter, other_versions
from lockstep.config.schema import Checkpoint
from lockstep.distributed.group import Group
from lockstep.runtime.base import Runtime, generator_states, restore_generators
from lockstep.strategy.base import Strategy
from lockstep.strategy.fingerprint import check_replicas, marks_of_weights
from lockstep.strategy.slices import read_like, slice_of

logger = logging.getLogger(__name__)

# How often a run makes sure that its folder is still there, beside every save.
_LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class Last:
    """The newest save: its step and its value, and what this rank had that can change between two steps."""

    step: int
    value: float | None
    metrics: Mapping[str, float]
    key: str | None = None


class Checkpointer:
    """One rank's part in saving and restoring. All ranks call it alike."""

    def __init__(
        self,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        settings: Checkpoint,
        limit: float,
        folder: Path,
        weights: Weights,
        seed: int,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        """Writing a checkpoint may take `limit` seconds. `guard` raises where the folder is no longer this run's."""
        self._guard, self._next_look = guard, 0.0
        self._group, self._runtime, self._strategy, self._weights = group, runtime, strategy, weights
        self.storage = CheckpointStorage(folder / "checkpoints", guard)
        self._by_owners = strategy.keeps_slices and group.world_size > 1
        self._writer: WholeWriter | ShardedWriter
        if self._by_owners:
            self._writer = ShardedWriter(self.storage, settings, limit, group)
        else:
            self._writer = WholeWriter(self.storage, settings, limit, group.activity, self._fetch)
        self._writer.resume_from(None)  # until it is restored, a run begins anew
        self.registered = RegisteredState(group, strategy.keeps_slices)
        self._mode, self._seed = settings.keep.mode, seed
        self.last: Last | None = None
        # For rank 0, where the folder is also kept elsewhere: waits until what is saved is there, too.
        self.elsewhere: Callable[[bool], None] = lambda leaving: None

    def save(
        self,
        step: int,
        position: Mapping[str, Any],
        state: Mapping[str, Any],
        about: Mapping[str, Any],
        value: float | None = None,
        metrics: Mapping[str, float] | None = None,
        automatic: bool = False,
    ) -> None:
        """Saves the run; `position` is where it is in its data, `state` the rest that the run itself knows. A step that
        is saved already is saved again where something has changed since. An automatic save keeps the value of the one
        before."""
        self._group.activity.enter("saving")
        self.equalize_buffers()
        key = self._key(position)
        if self.last is not None and self.last.step == step:
            if automatic:
                value, metrics = self.last.value, self.last.metrics
            same = key is not None and (key, value) == (self.last.key, self.last.value)
            if self._group.all(same, f"whether step {step} is saved already"):
                return
        generators = {**generator_states(self._runtime), "place": list(self._strategy.place_of_generators)}
        message = {"generators": generators, "moved": self._weights.moved(), "attached": self.registered.digests()}
        states = self.compared(message, "generator states", step)
        self._weights.note_moved(name for each in states for name in each["moved"])
        attached = self.registered.states([each["attached"] for each in states])
        if self._group.rank == 0 or self._strategy.gathers_state or self._by_owners:
            weights, models = self._weights.state()
            whole = {**position, **models, **state, "attached": attached}
            whole["generators"] = [each["generators"] for each in states]
            if self._group.rank == 0 or isinstance(self._writer, ShardedWriter):
                about = {**about, "value": value, "metrics": dict(metrics or {})}
                self._writer.save(step, weights, whole, about)
            else:  # what is spread over hosts is fetched by all of them together
                self._writer.fetch(weights, whole)
        self.last = Last(step, value, dict(metrics or {}), key)

    def restore(self, step: int | None = None, best: bool = False) -> dict[str, Any] | None:
        """Restores a step, the best or the newest good checkpoint. Returns what the run itself has to load, if any."""
        if self._group.rank == 0:
            self.storage.sweep()
        loaded = reader.restore(self.storage, self._group, step, best, self._mode, self._strategy.keeps_slices)
        self._writer.resume_from(loaded.step if loaded else None)
        if loaded is None:
            return None
        state: dict[str, Any] = loaded.state
        about, path = loaded.about, self.storage.path(loaded.step)
        try:
            self._weights.load(loaded.model, state, str(path))
            self.registered.load(state["attached"])
            state["cursors"] = read_like(state["cursors"], None)  # streams may have tensors in their state
        finally:
            loaded.close()
        place, places = self._strategy.place_of_generators, 1 if self._strategy.leaves else self._strategy.dp_size
        restore_generators(self._runtime, state["generators"], place, places, self._seed + loaded.step)
        self.last = Last(loaded.step, about.get("value"), about.get("metrics") or {})
        logger.info("restored %s (epoch %d)", path.name, about.get("epoch", 0))
        if other := other_versions(about):
            logger.info("%s was %s: numbers may differ in their last bits from here on", path.name, other)
        return state

    def load_weights(self, folder: Path, step: int, beside: Mapping[str, Stateful]) -> None:
        """Loads the weights of a checkpoint of another run, and what is asked for beside them."""
        storage = CheckpointStorage(folder / "checkpoints")
        loaded = reader.restore(storage, self._group, step, slices=self._strategy.keeps_slices)
        assert loaded is not None
        kept = ("model_extra", "models", "frozen", "averages")
        try:
            state = {key: value for key, value in loaded.state.items() if key in kept}
            self._weights.load(loaded.model, state, str(storage.path(step)))
            attached = loaded.state["attached"]
            for name, part in beside.items():
                if name in attached:
                    part.load_state_dict(read_like(attached[name], None))
        finally:
            loaded.close()

    def restored_to(self, position: Mapping[str, Any]) -> None:
        """The run has loaded its part of the state: what it would save now is what is saved already."""
        if self.last is not None:
            self.last = replace(self.last, key=self._key(position))

    def compared(self, message: dict[str, Any], name: str, step: int) -> list[dict[str, Any]]:
        """Gathers a message from all ranks, and checks that weights are finite, and equal where they must be."""
        return check_replicas(self._group, self._strategy, self._weights.modules, message, name, step)

    def equalize_buffers(self) -> None:
        with self._group.activity.within("the buffers", waits=True):
            self._strategy.equalize_buffers(self._weights.modules)

    def best(self) -> dict[str, Any] | None:
        """For rank 0: returns the best of this run's checkpoints that have a value."""
        last = self.last.step if self.last is not None else -1
        found = best_first([each for each in self.storage.saved() if each.step <= last], self._mode)
        return {"value": found[0].value, "step": found[0].step} if found else None

    def check(self) -> None:
        """Raises what a background write raised, and checks the run's folder."""
        self._writer.check()
        if (now := time.monotonic()) > self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self._guard()

    def finish(self) -> None:
        self._writer.finish()

    def settle(self, leaving: bool) -> None:
        """Waits until what is saved may be announced; a run that is `leaving` waits longer for uploads."""
        self.finish()
        self.elsewhere(leaving)

    def give_up(self) -> None:
        """Gives a write under way a few seconds to end, in a run that failed."""
        self._writer.give_up()

    def newest(self) -> tuple[int, Path] | None:
        """For rank 0: waits for the newest save and returns its step and folder. Others may be damaged or abandoned."""
        self._writer.finish()
        if self.last is None or self.last.step not in self.storage.steps():
            return None
        return self.last.step, self.storage.path(self.last.step)

    def _fetch(self, tensors: list[Tensor]) -> list[Tensor]:
        """On a mesh of one, a rank has the whole of sharded tensors, too."""
        return self._runtime.fetch([each if (found := slice_of(each)) is None else found.tensor for each in tensors])

    def _key(self, position: Mapping[str, Any]) -> str | None:
        """What this rank has that can change between two steps, as text; None where it cannot be compared."""
        attached, has_tensors = self.registered.without_tensors()
        marks = marks_of_weights(self._strategy, self._weights.modules)
        plain = codec.pack([dict(position), self._weights.hyperparameters()])[0]
        return None if has_tensors or marks is None else json.dumps([plain, attached, marks], sort_keys=True)
