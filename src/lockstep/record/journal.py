"""What ranks note while they train, brought together: rows to write, sums to decide by, and the check for NaN."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config.values import Interval
from lockstep.data.progress import Due, Progress
from lockstep.distributed.group import Group
from lockstep.errors import NonFiniteGradients, NonFiniteLoss
from lockstep.record.meters import Meter, Totals
from lockstep.record.recorder import Record

logger = logging.getLogger(__name__)

# So many skipped steps one after the other are no accident: the weights themselves are not finite any more.
SKIPS_IN_A_ROW = 100


class Journal:
    """One rank's notes. Bringing them together is a gathering, so all ranks do it at the same steps."""

    def __init__(self, group: Group, record: Record | None, every: Interval) -> None:
        self._group, self._record = group, record  # only rank 0 has a record
        self._due = Due(every)
        self._meter = Meter()
        self._since_row = Totals()
        self.since_validation = Totals()
        self._busy_seconds = 0.0
        self.forgive_nan = False  # a loss that is not finite is left out of the means, and does not end the run
        self._skips = {"since_row": 0, "in_a_row": 0, "last": 0}  # steps that left the weights as they were
        self._last_gathered_step = self._last_row_step = 0
        # Called with every row on every rank, at the same steps: for whoever else wants to know of them.
        self.listener: Callable[[Mapping[str, Any]], None] | None = None

    def note(self, step: int, examples: int, values: Mapping[str, Any]) -> None:
        """Values of this rank that are means over so many examples of a step."""
        self._meter.add(step, examples, values)

    def note_busy(self, seconds: float) -> None:
        """Time that this rank took before it was ready to exchange gradients: what makes others wait."""
        self._busy_seconds += seconds

    def skipped(self, step: int) -> None:
        """A step left the weights as they were: its gradients were not finite. Known to all ranks alike."""
        skips = self._skips
        skips["in_a_row"] = skips["in_a_row"] + 1 if skips["last"] == step - 1 else 1
        skips["since_row"], skips["last"] = skips["since_row"] + 1, step
        logger.warning("step %d: the gradients are not finite; the weights are left as they were", step)
        if skips["in_a_row"] >= SKIPS_IN_A_ROW:
            raise NonFiniteGradients(
                f"the gradients of {SKIPS_IN_A_ROW} steps in a row, up to step {step}, were not finite, and they all "
                "were skipped (train.on_nan). Lower the learning rate, set train.clip_norm, or look at the data; "
                "the run can be resumed from its last checkpoint"
            )

    def begin(self, progress: Progress, total_steps: int | None) -> None:
        if self._record is not None:
            self._record.begin(progress, total_steps)

    def bring_together(self, step: int) -> None:
        """Add up what all ranks noted since the last time; refuses to go on with a loss that is not a number."""
        with self._group.activity.within("reading the metrics"):
            sums, bad = self._meter.read(leave_out_bad=self.forgive_nan)
        steps = max(step - self._last_gathered_step, 1)
        message: Any = {"sums": sums, "bad": bad, "busy": self._busy_seconds / steps}
        self._busy_seconds, self._last_gathered_step = 0.0, step
        messages = self._group.gather(message, f"metrics of step {step}")
        found = [(each["bad"][0], rank, each["bad"][1]) for rank, each in enumerate(messages) if each["bad"]]
        if found:
            raise NonFiniteLoss(*min(found))
        for each in messages:
            self._since_row.add(each["sums"])
            self.since_validation.add(each["sums"])
        if self._record is not None:
            self._record.lags = [each["busy"] for each in messages]

    def write_due_row(self, progress: Progress, clock: float, learning_rate: float | None) -> None:
        """Write the row of this step, if `log.every` says that there is one and it is not written yet."""
        if progress.step != self._last_row_step and self._due.now(progress, clock):
            self.write_last_row(progress, learning_rate)

    def write_last_row(self, progress: Progress, learning_rate: float | None) -> None:
        """Write a row of what was noted since the one before, unless this step has one."""
        if progress.step == self._last_row_step:
            return
        self._last_row_step = progress.step
        self.bring_together(progress.step)
        row: dict[str, Any] = dict(self._since_row.take())
        if self._skips["since_row"]:
            row["skipped_steps"], self._skips["since_row"] = self._skips["since_row"], 0
        if learning_rate is not None:
            row["lr"] = learning_rate
        self.write(progress, {**row, "examples": progress.examples})

    def write(self, progress: Progress, values: Mapping[str, Any]) -> None:
        """Write a row of metrics, on rank 0; elsewhere only a listener hears of it."""
        row = {"step": progress.step, "epoch": progress.epoch, **values}
        if self._record is not None:
            self._record.write(dict(row))
        if self.listener is not None:
            self.listener(row)

    def start_at(self, step: int, state: dict[str, Any] | None = None) -> None:
        """Forget rows after a step: of a run that is restored there, or that ended before its first checkpoint."""
        self._last_gathered_step = self._last_row_step = step
        if state is not None:
            self._load_state_dict(state)
        if self._record is not None:
            self._record.forget_after(step, self._last_row_step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "since_row": self._since_row.sums,
            "since_validation": self.since_validation.sums,
            "skips": self._skips,
            "last_row_step": self._last_row_step,
        }

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._since_row.sums, self.since_validation.sums = state["since_row"], state["since_validation"]
        self._skips = state.get("skips", self._skips)
        self._last_row_step = state.get("last_row_step", self._last_row_step)

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
