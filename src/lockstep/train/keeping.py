"""What a run keeps so that it can go on bit for bit: when and what it saves, and how it comes back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep import profiler
from lockstep.checkpoint import reader
from lockstep.checkpoint.stateful import Stateful
from lockstep.checkpoint.storage import CheckpointStorage
from lockstep.checkpoint.writer import CheckpointWriter
from lockstep.config.schema import RunSettings
from lockstep.data.progress import Progress
from lockstep.distributed.group import Group
from lockstep.distributed.topology import Topology
from lockstep.errors import ConfigError
from lockstep.profiler.base import in_region
from lockstep.record.journal import Journal
from lockstep.record.recorder import Record
from lockstep.runtime.base import Runtime
from lockstep.runtime.generators import generator_states, seed_generators, set_generator_states
from lockstep.strategy.base import Strategy
from lockstep.strategy.fingerprint import combined, compare, fingerprint
from lockstep.train.devices import OnDevices
from lockstep.train.kept import Kept
from lockstep.train.requests import Pulse, Requests

logger = logging.getLogger(__name__)


class Keeping(OnDevices):
    """One rank, its progress, and the checkpoints that rank 0 writes for all."""

    def __init__(
        self,
        topology: Topology,
        group: Group,
        runtime: Runtime,
        strategy: Strategy,
        settings: RunSettings,
        folder: Path,
        requests: Requests,
        record: Record | None,
    ) -> None:
        super().__init__(group, runtime, strategy)
        self.topology, self.settings, self.folder = topology, settings, folder
        self.progress = Progress()
        self.journal = Journal(group, record, settings.log.every)
        self._kept = Kept(self.progress, self.journal)
        self._pulse = Pulse(group, requests)
        self._activity = group.activity
        self.profiler = profiler.create(settings.profile, runtime.name, topology, folder, group.activity)
        self._store = CheckpointStorage(folder / "checkpoints")
        to_host = runtime.to_host if runtime.name == "xla" else list
        self._writer = CheckpointWriter(self._store, settings.checkpoint, group.activity, to_host)
        self._last_saved_step = -1

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper: what to evaluate and save."""
        return self._set_up(self._kept.module)

    @property
    def optimizer(self) -> Optimizer | None:
        return self._kept.optimizer

    @property
    def seconds(self) -> float:
        """Seconds of training so far, restarts included, as all ranks know them."""
        return self._pulse.clock

    @property
    def seconds_since_start(self) -> float:
        """Seconds since the run was started or restored, as all ranks know them: what intervals are measured by."""
        return self._pulse.since_start

    def elapsed(self) -> float:
        """Seconds of training by this rank's own clock."""
        return self._pulse.elapsed()

    def attach(self, name: str, part: Stateful) -> None:
        """Save and restore something else along with the model."""
        self._kept.attached[name] = part

    @in_region("checkpoint")
    def checkpoint(self, value: float | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Save everything needed to go on bit for bit; `value` is what the best checkpoints are kept by."""
        self.write_due_row()  # a row that is due belongs to what was before the checkpoint, not to what is resumed
        self.journal.bring_together(self.progress.step)  # also makes sure that nothing after a NaN is ever saved
        if self.progress.step == self._last_saved_step:
            return
        self._last_saved_step = self.progress.step
        self._activity.enter("saving")
        self._equalize_buffers()
        states = self._compared({"generators": generator_states(self.runtime)}, "generator states")
        if not self.is_main:
            if self._strategy.name == "spmd":  # what is spread over hosts is fetched by all of them together
                self._writer.fetch(*self._kept.model_and_state())
            return
        model, state = self._kept.model_and_state()
        state |= {"seconds": self.seconds, "generators": [each["generators"] for each in states]}
        about = {
            "epoch": self.progress.epoch,
            "world_size": self.world_size,
            "value": value,
            "metrics": dict(metrics or {}),
        }
        self._writer.save(self.progress.step, model, state, about)

    def restore(self) -> bool:
        """Go on from the newest good checkpoint of this run's folder; False where there is none."""
        if self.is_main:
            self._store.sweep()
        loaded = reader.restore(self._store, self.group)
        self._writer.go_on_from(loaded.step if loaded else None)
        if loaded is None:
            self._pulse.start(0, 0.0)
            self.journal.start_at(0)
            return False
        step, state = loaded.step, loaded.state
        self._set_up(self._kept.module)
        self._kept.load(loaded.model, state, str(self._store.path(step)))
        self._strategy.restored(self.module, self._kept.optimizer)
        self._last_saved_step = step
        self._pulse.start(step, state["seconds"])
        if len(state["generators"]) == self.world_size:
            set_generator_states(self.runtime, state["generators"][self.rank])
        else:  # another number of ranks: new streams, that depend on nothing but the seed and the place
            seed_generators(self.runtime, self.settings.seed + step, self.rank)
        logger.info("restored %s (epoch %d)", self._store.path(step).name, self.progress.epoch)
        return True

    def newest_saved(self) -> tuple[int, Path] | None:
        """For rank 0: the step and folder of the newest checkpoint, once a save under way is on the disk."""
        self._writer.finish()
        steps = self._store.steps()
        return (steps[-1], self._store.path(steps[-1])) if steps else None

    def write_due_row(self) -> None:
        """Write the row of this step, if there is one and it is not written yet."""
        self.journal.write_due_row(self.progress, self.seconds_since_start, self._learning_rate())

    # Inside

    def _compared(self, message: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """Gather a message from all ranks, and with it make sure that their replicas are equal."""
        replicas = self._strategy.replicas(self._kept.module) if self._kept.module is not None else {}
        mine = fingerprint(replicas)
        messages = self.gather({**message, "fingerprint": combined(mine)}, name)
        compare(self.group, list(replicas), mine, [each["fingerprint"] for each in messages], self.progress.step)
        return messages

    def _equalize_buffers(self) -> None:
        with self._activity.within("the buffers", waits=True):
            self._strategy.equalize_buffers(self.module)

    def _learning_rate(self) -> float | None:
        return None if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])

    @staticmethod
    def _set_up(model: nn.Module | None) -> nn.Module:
        if model is None:
            raise ConfigError("this needs a model: call run.setup(model, optimizer) first")
        return model
