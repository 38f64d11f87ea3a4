"""Measures validation and test data with the steps of a LightningModule: every example counts once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.adapters.lightning.trainer import Logged, Trainer, short_name, transferred
from lockstep.errors import ConfigError
from lockstep.evaluation.means import BatchMean, Mean
from lockstep.evaluation.metric_states import computed, plain, require_metrics, states_of

_STEPS = {"val": "validation_step", "test": "test_step"}


class Sets:
    """Calls the steps and hooks of one set of data after the other.

    It takes the place of EpochMetrics: `begin` and `part` enclose a set on every rank, `computed` is called on rank 0.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kind, self._number, self._batch, self._is_open = "val", 0, 0, False
        self._tried = 0  # sets of which a batch was measured before training
        self._metrics: dict[str, Any] = {}  # torchmetrics objects that were logged, by short name
        self._called: dict[str, str] = {}  # what the module calls a value, by its full name here
        self.shown: dict[str, str] = {}  # full names by those that callbacks and schedulers know
        self._last: Mapping[str, Any] = {}  # what the module logged of the last batch

    def begin(self, name: str = "") -> Sets:
        """Begins a set: `validation`, `test`, or `validation of 1`."""
        kind, _, number = name.partition(" of ")
        self._kind, self._number = ("test" if kind == "test" else "val"), int(number or 0)
        self._open(sanity=False)
        return self

    def _open(self, sanity: bool) -> None:
        trainer = self._trainer
        trainer.sanity_checking = sanity
        trainer.validating, trainer.testing = not sanity and self._kind == "val", self._kind == "test"
        self._batch, self._is_open, self._metrics = 0, True, {}
        trainer.let_hooks_be()
        if self._number == 0:
            trainer.call_evaluating(f"on_{self._word}_start")
            trainer.call_evaluating(f"on_{self._word}_epoch_start")

    @property
    def _word(self) -> str:
        return "validation" if self._kind == "val" else "test"

    @property
    def _count(self) -> int:
        """How many sets there are of this kind."""
        loaders = self._trainer.num_val_batches if self._kind == "val" else self._trainer.num_test_batches
        return max(1, len(loaders))

    def measure(self, batch: Any) -> dict[str, Any]:
        """Returns what the module logs of a batch, as means over its examples."""
        trainer = self._trainer
        if not self._is_open:  # the first batch of every set is tried before training
            self._kind = "val" if trainer.num_val_batches else "test"
            self._number, self._tried = self._tried % self._count, self._tried + 1
            self._open(sanity=True)
        batch = transferred(trainer, batch, self._number)
        where = batch, self._batch, *([self._number] if self._count > 1 else [])
        trainer.call(f"on_{self._word}_batch_start", *where)
        out = trainer.call_step(_STEPS[self._kind], *where)
        trainer.call(f"on_{self._word}_batch_end", out, *where)
        self._batch += 1
        found: dict[str, Any] = {}
        for name, logged in trainer.take().items():
            short = self._short(name, logged)
            if hasattr(logged.value, "compute"):
                self._metrics[short] = logged.value
            elif logged.batch_size is None:
                found[short] = BatchMean(logged.value)
            else:
                found[short] = Mean(logged.value.double() * logged.batch_size, float(logged.batch_size))
        self._last = found
        return found

    def _short(self, name: str, logged: Logged) -> str:
        short, end = short_name(name, self._kind), f"/dataloader_idx_{self._number}" if self._count > 1 else ""
        full, end = self._full(short), end if logged.add_dataloader_idx else ""
        if self._called.setdefault(full, name + end) != name + end:
            raise ConfigError(f"self.log: {name!r} and {self._called[full]!r} are both {full}: rename one of them")
        for shown in [name + end, f"{name}_epoch{end}"][: logged.on_epoch + logged.on_step * logged.on_epoch]:
            if self.shown.setdefault(shown, full) != full:
                raise ConfigError(
                    f"self.log: {shown!r} is both {self.shown[shown]} and {full}: rename one of them, or log it "
                    "without add_dataloader_idx=False"
                )
        return short

    def _full(self, short: str) -> str:
        return f"{self._kind}/{self._number}/{short}" if self._count > 1 else f"{self._kind}/{short}"

    def part(self) -> dict[str, Any]:
        """Returns what this rank has for `computed`."""
        self._trainer.take()
        # A metric that is reset clears its lists in place.
        states = {
            name: [{key: copy.copy(state) for key, state in part.items()} for part in states_of(each)]
            for name, each in self._metrics.items()
        }
        return {"states": states}

    def computed(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Computes from what all ranks found."""
        found = {}
        for name, metric in self._metrics.items():
            apart = require_metrics({name: copy.deepcopy(metric)}, "self.log")[name]
            found[name] = plain(computed(apart, [part["states"].get(name, []) for part in parts]), name)
        return found

    def finish(self, values: Mapping[str, Any], alone: bool) -> dict[str, Any]:
        """Ends a set, whose values hooks find in callback_metrics. Returns what they log."""
        trainer, found = self._trainer, dict[str, Any]()
        self.show({self._full(name): each for name, each in values.items()})
        if self._number == self._count - 1:
            trainer.call_evaluating(f"on_{self._word}_epoch_end")
            for name, each in trainer.take().items():
                found[self._short(name, each)] = trainer.agreed(name, each, alone)
            if self._kind == "test" or trainer.sanity_checking:
                trainer.call_evaluating(f"on_{self._word}_end")
        for metric in self._metrics.values():
            metric.reset()
        self._is_open = trainer.sanity_checking = trainer.validating = trainer.testing = False
        return found

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Shows metrics to callbacks and schedulers, by the names that the module has for them."""
        for shown, full in self.shown.items():
            if not isinstance(metrics.get(full, []), list):
                self._trainer.note(shown, metrics[full])

    # What else EpochMetrics has

    def take(self, micro: Any, outputs: Any) -> None:
        """The step has kept what it needs."""

    def check(self, outputs: Any, length: int) -> None:
        """There are no outputs."""

    def real(self, outputs: Any, rows: Any, length: int) -> dict[str, Any]:
        return {}

    def tried(self, outputs: Any) -> dict[str, Any]:
        metrics = self._trainer.callback_metrics
        before = dict(metrics)
        means = {name: each.value if isinstance(each, BatchMean) else each.total / each.count
                 for name, each in self._last.items()}  # fmt: skip
        values = self.computed([self.part()])
        values |= self.finish({**means, **values}, alone=True)
        metrics.clear()
        metrics.update(before)
        return values
