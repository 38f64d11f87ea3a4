"""What a training loop has: `main(run)` is called with it on every rank. The engine behind it does the work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lockstep.checkpoint.registered import Stateful
from lockstep.config.training import Compile, Ema
from lockstep.data.cursors import Progress, call_site
from lockstep.data.loader import Collate
from lockstep.data.order import OrderChoice
from lockstep.data.source import source_of, whole_number
from lockstep.engine.devices import Devices
from lockstep.engine.ema import ema_settings, in_place
from lockstep.engine.engine import Engine
from lockstep.engine.setup import SetupOptions, skips_nan
from lockstep.engine.weights import Given
from lockstep.errors import ConfigError
from lockstep.evaluation.means import Mean, Measure
from lockstep.record import meters, samples
from lockstep.strategy.compiled import how_to_compile
from lockstep.strategy.mesh import shard_rules
from lockstep.strategy.parameters import without_gradients
from lockstep.strategy.placing import Parallelize

Value = TypeVar("Value")


class Run:
    """One rank's view of a run. Batch sizes are global. All ranks make the same calls in the same order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # Ranks, and what they decide together

    @property
    def rank(self) -> int:
        """The rank of this process: 0 to `world_size - 1`."""
        return self._engine.group.rank

    @property
    def world_size(self) -> int:
        """The number of processes that train together, on all hosts."""
        return self._engine.group.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._engine.runtime.device

    @property
    def devices(self) -> Devices:
        """Device counts, meshes and the strategy, by the names that torch_xla and JAX have for them."""
        return self._engine.devices

    @property
    def dp_rank(self) -> int:
        """Which part of every batch this rank computes. Ranks that split a model between them have the same one."""
        return self._engine.strategy.dp_rank

    @property
    def dp_size(self) -> int:
        """The number of parts that a batch is divided into."""
        return self._engine.strategy.dp_size

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._engine.folder

    @overload
    def agree(self, value: Callable[[], Value], name: str = ...) -> Value: ...

    @overload
    def agree(self, value: Value, name: str = ...) -> Value: ...

    def agree(self, value: Any, name: str = "a decision") -> Any:
        """Returns rank 0's value on every rank. A callable runs on rank 0 only, and what it raises is raised on all."""
        return self._engine.group.agree(value, name)

    def any(self, value: bool, name: str = "whether any rank wants to") -> bool:
        """Returns on all ranks whether the value is true on any."""
        return self._engine.group.any(value, name)

    def gather(self, value: Value, name: str = "a gathering") -> list[Value]:
        """Returns the values of all ranks, plain data, in rank order."""
        return self._engine.group.gather(value, name)

    def barrier(self, name: str = "a barrier") -> None:
        """Waits until every rank is here. A rank that does not arrive is named."""
        self._engine.group.barrier(name)

    def stop(self, reason: str) -> None:
        """Ends training on all ranks at the same step: `batches` and `epochs` then end there. Ranks learn of it at the
        next control sync, about half a second later; `run.stopped` has the reason."""
        self._engine.requests.stop = self._engine.requests.stop or reason

    @property
    def stopped(self) -> str | None:
        """Why training ended before its limit; the same on all ranks."""
        return self._engine.stopped

    def working(self, name: str, limit: float) -> contextlib.AbstractContextManager[None]:
        """Allows user code up to `limit` seconds without progress, in place of `timeouts.stall`."""
        return self._engine.activity.within(name, limit=limit)

    # Models

    @property
    def model(self) -> nn.Module:
        """What to call in training, where there is one model; with several, `models` has them by name."""
        return self._engine.models.only().model

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper: what to evaluate and save; with several, `modules` has them by name."""
        return self._engine.models.only().module

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the one model, if it has one."""
        return self._engine.models.only().optimizer if self._engine.models.entries else None

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """What to call in training, by name."""
        return {name: each.model for name, each in self._engine.models.entries.items()}

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The models without their wrappers, by name."""
        return self._engine.models.modules

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """The optimizers by the names of their models."""
        return self._engine.models.optimizers

    def setup(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        name: str | None = None,
        precision: str = "float32",
        clip_norm: float | None = None,
        compile: bool | str | Mapping[str, Any] | Compile = False,
        activation_checkpointing: str | None = None,
        on_nan: str = "stop",
        ema: float | Mapping[str, Any] | Ema | None = None,
        shard: Mapping[str, Any] | None = None,
        parallelize: Parallelize | None = None,
        init_weights: Callable[[nn.Module], object] | None = None,
        init_from: Given | None = None,
    ) -> Any:
        """Places a model on the device, equal on all ranks. Returns what it was given, in the same order.

        Called once for every model; with several, each has a `name`. `on_nan="skip"` leaves the weights as they are
        after a step whose gradients are not finite. `shard` has sharding rules for SPMD, after those of
        `strategy.shard`; `parallelize(model, mesh)` splits a model in place of Lockstep. `init_weights(module)` gives
        values to the parameters of a model that was made on the meta device, in place of `reset_parameters`. The others
        are as in the config's `train`, `init_from` as there.
        """
        options = SetupOptions(
            precision, clip_norm, how_to_compile(compile), activation_checkpointing, skips_nan(on_nan),
            None if ema is None else ema_settings(ema), shard_rules(shard or {}), parallelize, init_weights, init_from,
        )  # fmt: skip
        placed = self._engine.setup(model, optimizer, scheduler, name, options)
        given = [placed, *(each for each in (optimizer, scheduler) if each is not None)]
        return given[0] if len(given) == 1 else tuple(given)

    def frozen(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Gives a model no gradients inside the block: the discriminator, while the generator learns."""
        return without_gradients(self._engine.strategy.copies_of(model))

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives models that were set up with `ema` their averages for weights inside the block. All ranks call it."""
        averages = self._engine.models.averages
        if not averages:
            raise ConfigError("run.averaged_weights: no model has an average: run.setup(model, optimizer, ema=0.999)")
        return in_place(averages)

    # Data

    @property
    def progress(self) -> Progress:
        """Where training is: `epoch`, `step` and the rest that a checkpoint keeps of it."""
        return self._engine.progress

    def epochs(self, count: int | None) -> Iterator[int]:
        """Yields the epochs still to do, up to `count` (without end where it is None). An epoch is done when the loop
        comes back for the next one, so that what follows its last batch belongs to it."""
        return self._engine.epochs(None if count is None else whole_number(count, "run.epochs", 0))

    def steps(self, count: int | None) -> Iterator[int]:
        """Yields the steps still to do, up to `count`, of a loop that makes its own data. An iteration is a step,
        whatever optimizers do in it. Between two, the run saves and leaves if it was asked to."""
        return self._engine.steps(None if count is None else whole_number(count, "run.steps", 0))

    def batches(
        self,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        accumulate: int = 1,
        collate: Collate | None = None,
        name: str | None = None,
        order: OrderChoice = None,
    ) -> Iterator[Any]:
        """Yields this rank's part of every global batch of a pass over a dataset or a stream, on the device. A torch
        DataLoader brings its dataset, batch size (of all ranks together), sampler, collate_fn and workers.

        With `accumulate`, it comes in so many micro-batches; `step` acts on the last. A run that was asked to stop
        saves and leaves between two batches, on all ranks at once. A loop that is left early continues the pass with
        the next call. Every dataset has a position; `name` tells two uses of one dataset apart. `order` is as
        `data.order` in the config, or a function of (epoch, seed, count).
        """
        source = source_of(dataset, batch_size, collate, shuffle, drop_last, order, self._engine.settings.seed)
        self._engine.checks.walks(source.dataset)
        return self._engine.batches(source, name=name, accumulate=accumulate, site=call_site(sys._getframe(1)))

    def stream(
        self, batches: Iterable[Any], count: Callable[[Any], int], name: str | None = None, *, ahead: bool = False
    ) -> Iterator[Any]:
        """Yields batches of a custom loader, of which every dp rank has different ones, until no rank has any left.

        Gradients are those of the mean over all examples that the ranks have, and every example counts once. An epoch
        that was interrupted continues where it was if the source has state_dict and load_state_dict, on as many ranks;
        otherwise it starts again. Ranks exchange the number of examples before each batch. A source with a state is
        read some batches ahead, so that one exchange covers all of these; with `ahead` any source is. Leave it out
        where the next batch depends on the training of the last.
        """
        return self._engine.stream(batches, count, name=name, site=call_site(sys._getframe(1)), ahead=ahead)

    # The step

    def autocast(self, name: str | None = None) -> contextlib.AbstractContextManager[Any]:
        """Runs the forward pass and the loss in the precision that `setup` was given."""
        return self._engine.runtime.autocast(self._engine.models.precision_of(name))

    def region(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Names a part of the step in the profile, while one is being taken."""
        return self._engine.profiler.region(name)

    def backward(self, loss: Tensor | Mean, count: Tensor | float | None = None) -> None:
        """Computes gradients of the mean loss over the global batch, over all ranks and micro-batches.

        The loss is a mean over the examples of the batch; or, with a `count` (or as a Mean), a sum over so many tokens
        or pixels, and the mean is taken over all that the ranks counted.
        """
        self._engine.backward(loss, count)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenates the tensors of all ranks along their first dimension, which may differ in length.

        Gradients flow back to every rank: a loss over gathered examples has the gradients that it has on one process.
        A rank without an example of the last batch adds nothing.
        """
        return self._engine.all_gather(tensor)

    def step(self, optimizer: Optimizer | None = None, closure: Callable[[], object] | None = None) -> bool:
        """Steps an optimizer and clears its gradients; returns False, doing nothing, while micro-batches are missing.
        Several optimizers are stepped one by one; together they are one step of the run. A `closure` is for one that
        computes the loss itself (LBFGS, SAM): it calls the model and run.backward on the current batch."""
        return self._engine.step(optimizer, closure)

    def gradients(self, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
        """Returns the gradients of the whole batch by parameter: reduced, divided, unscaled, not clipped yet. `step`
        uses what is done to them in place, alike on all ranks. Empty while micro-batches are missing."""
        return self._engine.gradients(optimizer)

    @property
    def completes_batch(self) -> bool:
        """Whether the current micro-batch is the last of its global batch: `step` acts on it."""
        step = self._engine.feed.step
        return step is None or step.completes_batch

    def log(self, **values: Tensor | Mean | float) -> None:
        """Logs values of the current batch; means over all ranks are written every `log.every`. Values that are logged
        outside of a batch get a separate row."""
        self._engine.log(values)

    def log_image(self, name: str, image: Any) -> None:
        """Logs a tensor or array [C, H, W], [H, W, C] or [H, W] of uint8 or of floats from 0 to 1; or a PIL image."""
        self._engine.log_sample(name, "image", samples.image, image)

    def log_text(self, name: str, text: str) -> None:
        """Logs a text. Rank 0's samples are kept in the run's folder, and sent to every logger that can show them."""
        self._engine.log_sample(name, "text", samples.text, text)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs rows of numbers, texts, truth values or None, one cell for each column."""
        self._engine.log_sample(name, "table", samples.table, columns, rows)

    # Evaluation and checkpoints

    def evaluate(
        self,
        measure: Measure,
        dataset: Dataset[Any] | DataLoader[Any],
        batch_size: int | None = None,
        *,
        on: str = "all",
        collate: Collate | None = None,
        name: str = "validation",
    ) -> dict[str, float]:
        """Returns exact means over a dataset of what `measure(batch)` returns: one value per example, or a Mean. Equal
        on all ranks. With `on="rank0"`, rank 0 measures alone. Use run.module inside, never the wrapper."""
        source = source_of(dataset, batch_size, collate, True, False, None, self._engine.settings.seed)
        return self._engine.evaluate(measure, source, on, name)

    def register_state(self, name: str, part: Stateful, *, per_rank: bool = False) -> None:
        """Saves and restores another object along with the models, now or after a restore.

        Where ranks have different states, each gets its own back. On another number of ranks such a state starts
        fresh with `per_rank`, and is refused without it.
        """
        self._engine.register_state(name, part, per_rank=per_rank)

    def checkpoint(self, value: float | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Saves everything needed to resume bit for bit; `value` is what the best checkpoints are kept by. After the
        inner loop of an epoch, the epoch is saved as done: call it last."""
        with self.region("checkpoint"):
            self._engine.save(None if value is None else meters.number(value, "run.checkpoint"), metrics, explicit=True)

    def restore(self, step: int | None = None, best: bool = False) -> bool:
        """Resumes from the newest good checkpoint of this run's folder; returns False where there is none.

        Or from that of a `step`, or from the best by the `value` that it was saved with: newer ones are then renamed,
        before anything is saved.
        """
        return self._engine.restore(step, best)

    def load_weights(self, folder: Path | str, step: int) -> None:
        """Loads the weights of a checkpoint of another run, to evaluate or use the model. That run is not changed."""
        self._engine.load_weights(Path(folder), step, {})
