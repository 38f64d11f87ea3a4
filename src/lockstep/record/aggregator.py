"""Aggregates metrics across ranks: rows to write, sums to decide by, and the check for NaN."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.values import Interval
from lockstep.data.cursors import Due, Progress
from lockstep.distributed.group import Group
from lockstep.errors import NonFiniteGradients, NonFiniteLoss
from lockstep.record.logger import Kind
from lockstep.record.meters import Meter, Parts, Reading, Totals, added_up
from lockstep.record.metric_writer import MetricWriter
from lockstep.record.samples import check_name
from lockstep.runtime.base import Runtime

logger = logging.getLogger(__name__)

# After so many skipped steps in a row the weights themselves are not finite any more.
SKIPS_IN_A_ROW = 100
_NO_METRICS = ("step", "epoch", "examples", "tokens", "skipped_steps", "lr")


@dataclass
class Pending:
    """A row whose numbers are on their way from the device, with everything else as it was at its step."""

    step: int
    epoch: int
    values: dict[str, Any]
    time: float
    reading: Reading
    busy: float


@dataclass
class Apart:
    """Values that were noted outside of any batch: they become a row of the step they were noted at."""

    step: int
    epoch: int
    meter: Meter


class MetricAggregator:
    """The metrics of one rank. Aggregating is a gather, so all ranks do it at the same steps."""

    def __init__(
        self,
        group: Group,
        metric_writer: MetricWriter | None,
        every: Interval,
        runtime: Runtime | None = None,
        is_dp_leader: bool = True,
    ) -> None:
        """Only rank 0 has a writer. Of the ranks with the same part of a batch, only the leader adds to sums."""
        self._is_dp_leader = is_dp_leader
        self._group, self._metric_writer, self._runtime = group, metric_writer, runtime
        self._due = Due(every)
        self._meter = Meter(runtime)
        self._apart: list[Apart] = []
        self._pending: Pending | None = None
        self._since_row = Totals()
        self.since_validation = Totals()
        self.since_epoch: Totals | None = None  # where an adapter takes means over epochs
        self.latest: dict[str, Any] = {}  # the newest value of every metric
        self._busy_seconds = self._next_memory = 0.0
        self.learning_rates: dict[str, Any] = {}  # of the last step
        self.forgive_nan = False  # leave losses that are not finite out of the means, instead of ending the run
        self._skips = {"since_row": 0, "in_a_row": 0, "last": 0}  # steps that did not change the weights
        self._last_gathered_step = self._last_row_step = 0
        # Called with every row on every rank, at the same steps.
        self.listener: Callable[[Mapping[str, Any]], None] | None = None

    def note(self, step: int, examples: int, values: Mapping[str, Any]) -> None:
        """Notes values of this rank that are means over so many examples of a step."""
        self._meter.add(step, examples, values)

    def note_total(self, step: int, name: str, total: Any, count: Any) -> None:
        """Notes a sum of this rank, and what it is a sum over."""
        self._meter.add_total(step, name, total, count)

    def note_apart(self, progress: Progress) -> Meter:
        """Returns a meter for values that belong to no batch: they become a row at the next gather."""
        step, epoch = progress.step, progress.epochs_done
        if not self._apart or (self._apart[-1].step, self._apart[-1].epoch) != (step, epoch):
            self._apart.append(Apart(step, epoch, Meter(self._runtime)))
        return self._apart[-1].meter

    def note_loss(self, step: int, loss: Any) -> None:
        """Notes the loss of a backward pass: nothing is saved after one that is not finite."""
        self._meter.add_loss(step, loss)

    def note_busy(self, seconds: float) -> None:
        """Notes how long this rank took until it was ready to exchange gradients."""
        self._busy_seconds += seconds

    def skipped(self, step: int, why: str | None = None) -> None:
        """Notes, on all ranks alike, a step whose gradients were not finite. `why` is the reason where that is usual,
        as with float16."""
        skips = self._skips
        if skips["last"] == step:  # by another optimizer
            return
        skips["in_a_row"] = skips["in_a_row"] + 1 if skips["last"] == step - 1 else 1
        skips["since_row"], skips["last"] = skips["since_row"] + 1, step
        if why is None:
            logger.warning("step %d: the gradients are not finite; the weights are left as they were", step)
        else:
            logger.info("step %d: the gradients %s; the weights are left as they were", step, why)
        if skips["in_a_row"] >= SKIPS_IN_A_ROW:
            raise NonFiniteGradients(
                f"the gradients of {SKIPS_IN_A_ROW} steps in a row, up to step {step}, were not finite, and they all "
                "were skipped (train.on_nan, or precision: fp16). Lower the learning rate, set "
                "train.clip_norm, or look at the data; the run can be resumed from its last checkpoint"
            )

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        self._group.activity.total_steps = total_steps
        if self._metric_writer is not None:
            self._metric_writer.begin(progress, total_steps)

    def bring_together(self, progress: Progress) -> None:
        """Sums what all ranks noted since the last time; raises NonFiniteLoss for a loss that is not finite."""
        self.write_pending_row()
        busy = self._take_busy(progress.step)
        self._exchange(progress.step, self._meter.begin_reading(self.forgive_nan), busy)

    def write_due_row(self, progress: Progress, clock: float, wait: bool = True) -> None:
        """Writes the row of this step, if one is due and not written yet.

        Without `wait`, its numbers may be left to arrive from the device: write_pending_row writes it then.
        """
        if progress.step == self._last_row_step or not self._due.now(progress, clock):
            return
        self.write_last_row(progress, wait)

    def write_last_row(self, progress: Progress, wait: bool = True) -> None:
        """Writes a row of what was noted since the one before, unless this step has one."""
        if progress.step == self._last_row_step:
            return
        self.write_pending_row()
        self._last_row_step = progress.step
        values: dict[str, Any] = {}
        if self._skips["since_row"]:
            values["skipped_steps"], self._skips["since_row"] = self._skips["since_row"], 0
        if progress.tokens:
            values["tokens"] = progress.tokens
        values |= {name: float(rate) for name, rate in self.learning_rates.items()}
        self._pending = Pending(
            progress.step,
            progress.epochs_done,
            {**values, "examples": progress.examples},
            time.perf_counter(),
            self._meter.begin_reading(self.forgive_nan),
            self._take_busy(progress.step),
        )
        if wait or self._runtime is None or not self._runtime.reads_later:
            self.write_pending_row()

    def write_pending_row(self, wait: bool = True) -> None:
        """Writes the pending row, on all ranks together; with `wait`, also if its numbers have not arrived."""
        pending = self._pending
        if pending is None or not (wait or pending.reading.arrived()):
            return
        self._pending = None
        self._exchange(pending.step, pending.reading, pending.busy)
        row = {**self._since_row.take(), **pending.values}
        self._write({"step": pending.step, "epoch": pending.epoch, **row}, pending.time)

    def write_rest(self) -> None:
        """Writes rank 0's values outside of any batch at the end of a run: other ranks may have logged none."""
        self.write_pending_row()
        noted, self._apart = self._apart, []
        self._write_apart([[[each.step, each.epoch, each.meter.read().parts] for each in noted]])

    def write(self, progress: Progress, values: Mapping[str, Any]) -> None:
        """Writes a row of metrics on rank 0; other ranks only call the listener."""
        self._write({"step": progress.step, "epoch": progress.epochs_done, **values}, time.perf_counter())

    def start_at(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Drops rows after a step: the run was restored there, or ended before its first checkpoint."""
        self._last_gathered_step = self._last_row_step = step
        if state is not None:
            self._since_row.sums, self.since_validation.sums = state["since_row"], state["since_validation"]
            self._skips, self.latest, self.learning_rates = state["skips"], state["latest"], state["learning_rates"]
            self._last_row_step = state["last_row_step"]
        if self._metric_writer is not None:
            self._metric_writer.forget_after(step, 0 if state is None else state["rows"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "since_row": self._since_row.sums,
            "since_validation": self.since_validation.sums,
            "latest": self.latest,
            "skips": self._skips,
            "learning_rates": {name: float(rate) for name, rate in self.learning_rates.items()},
            "last_row_step": self._last_row_step,
            "rows": self._metric_writer.rows if self._metric_writer is not None else None,
        }

    def sample(self, step: int, name: str, kind: Kind, make: Callable[..., Any], *given: Any) -> None:
        """Keeps rank 0's sample; `make` checks it and brings it to the host. Other ranks' are ignored."""
        path = f"run.log_{make.__name__}({name!r}) at step {step}"
        # Under XLA all ranks must read the value, or one would run a program that the others do not.
        if self._metric_writer is None and not (self._runtime is not None and self._runtime.compiles_everything):
            return
        check_name(name, path)
        value = make(*given, path)
        if self._metric_writer is not None:
            self._metric_writer.sample(step, name, kind, value)

    def close(self, status: str = "completed", limit: float | None = None) -> None:
        """Ends all loggers within `log.timeout`, or a lower limit."""
        if self._metric_writer is not None:
            with self._group.activity.within("the end of the loggers", limit=self._group.activity.patience):
                self._metric_writer.close(status, limit)

    def _take_busy(self, step: int) -> float:
        busy = self._busy_seconds / max(step - self._last_gathered_step, 1)
        self._busy_seconds, self._last_gathered_step = 0.0, step
        return busy

    def _exchange(self, step: int, reading: Reading, busy: float) -> None:
        with self._group.activity.within("reading the metrics"):
            found = reading.read()
            apart = [[each.step, each.epoch, each.meter.read().parts] for each in self._apart]
        self._apart = []
        sums = found.parts if self._is_dp_leader else {}
        message: Any = {"sums": sums, "bad": found.bad, "busy": busy, "apart": apart}
        messages = self._group.gather(message, f"metrics of step {step}")
        bad = [(each["bad"][0], rank, each["bad"][1]) for rank, each in enumerate(messages) if each["bad"]]
        if bad:
            raise NonFiniteLoss(*min(bad))
        for totals in (self._since_row, self.since_validation, self.since_epoch):
            if totals is not None:
                totals.add(each["sums"] for each in messages)
        self._group.activity.busy = busy
        self._note_memory()
        if self._metric_writer is not None:
            self._metric_writer.note_lags(step, [each["busy"] for each in messages])
        self._write_apart([each["apart"] for each in messages])

    def _note_memory(self) -> None:
        """At most once a second, and from this thread: another would hold Python's lock while it waits for the
        allocator."""
        now = time.monotonic()
        if self._runtime is not None and self._runtime.name == "cuda" and now >= self._next_memory:
            self._next_memory = now + 1.0
            self._group.activity.memory = self._runtime.memory().get("peak")

    def _write_apart(self, noted: list[list[Any]]) -> None:
        places: dict[tuple[int, int], list[Parts]] = {(step, epoch): [] for rank in noted for step, epoch, _ in rank}
        for rank in noted:
            for step, epoch, sums in rank:
                places[step, epoch].append(sums)
        for (step, epoch), parts in sorted(places.items(), key=lambda each: each[0]):
            means = {name: total / weight for name, (total, weight) in added_up(parts).items() if weight}
            self._write({"step": step, "epoch": epoch, **means}, time.perf_counter())

    def _write(self, row: dict[str, Any], at: float) -> None:
        single = {name: value for name, value in row.items() if not isinstance(value, list)}
        self.latest.update({name: value for name, value in single.items() if name.partition("/")[0] not in _NO_METRICS})
        if self._metric_writer is not None:
            self._metric_writer.write(dict(row), at)
        if self.listener is not None:
            self.listener(row)
