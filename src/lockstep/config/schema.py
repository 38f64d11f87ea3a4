"""The RunConfig models: how to train, as one YAML file that is validated before any process starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from lockstep.config.launch import Launch
from lockstep.config.launch import RayCluster as RayCluster
from lockstep.config.loggers import Log as Log
from lockstep.config.pod import Pod
from lockstep.config.strategy import Strategy
from lockstep.config.training import (
    EVERY_EPOCH,
    AnyCompile,
    AnyEma,
    AnyRamp,
    AnyScheduler,
    Data,
    Optimizer,
    Patterns,
    Sizes,
    Tokens,
)
from lockstep.config.training import Schedule as Schedule
from lockstep.config.training import Scheduler as Scheduler
from lockstep.config.values import Component as Component
from lockstep.config.values import Interval, PathOrUrl, Seconds, as_mapping, require
from lockstep.config.values import Section as Section

Precision = Literal["float32", "tf32", "bf16", "fp16", "fp8"]


# A bare number counts steps.
_IN_STEPS = BeforeValidator(
    lambda value: f"{value} steps" if isinstance(value, int) and not isinstance(value, bool) else value
)
_AUTO_OR_COUNT = require(
    lambda value: value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0),
    "must be a number greater than 0, or auto",
    BeforeValidator,
)
_TEXT_OR_NULL = require(
    lambda value: value is None or isinstance(value, str),
    "must be blocks, or a pattern over the names of modules, or null",
    BeforeValidator,
)
_NOT_EMPTY = require(len, "there must be at least one criterion; leave early_stop out to train to the end")


_LEAVES = BeforeValidator(
    lambda value: {True: 8, False: None}[value] if isinstance(value, bool) else value,
    json_schema_input_type=bool | int | None,
)
_POWER_OF_TWO = require(
    lambda value: value is None or (0 < value <= 1024 and value & (value - 1) == 0),
    "must be true, false or a power of two up to 1024: the number of leaves that every batch is divided into",
)


class Reproducible(Section):
    """How far the numbers of a run depend on the machine and on the number of ranks."""

    deterministic: bool = Field(
        False, description="use deterministic algorithms only, and launch.threads: 1 unless it is set"
    )
    exact: Annotated[int | None, _LEAVES, _POWER_OF_TWO] = Field(
        None,
        description="the same bits on any number of ranks: every batch is divided into this many leaves (true: 8), "
        "whose gradients are added in a fixed order",
    )

    @property
    def is_deterministic(self) -> bool:
        return self.deterministic or self.exact is not None


def require_leaves(leaves: int, ranks: int) -> None:
    """Refuses a number of ranks that cannot have the same number of leaves each."""
    if leaves % ranks:
        possible = [str(2**power) for power in range(leaves.bit_length())]
        more = f", or set train.exact to {2 ** (ranks - 1).bit_length()}" if ranks & (ranks - 1) == 0 else ""
        raise ValueError(
            f"train.exact: {leaves} leaves cannot be divided among {ranks} processes: use {', '.join(possible)}{more}"
        )


class Train(Reproducible):
    epochs: int | None = Field(None, gt=0)
    steps: int | None = Field(None, gt=0)
    tokens: Tokens | None = Field(None, description="until so many tokens are trained on, over all processes")
    limit: int | None = Field(None, gt=0, description="train on the first so many examples; null: on all")
    overfit: int | None = Field(
        None, gt=0, description="train on the first so many examples, always in their order, and validate on the same"
    )
    batch_size: int = Field(32, gt=0, description="examples per optimizer step, summed over all processes")
    batch_ramp: AnyRamp | None = Field(
        None, description="smaller batches at first, up to batch_size: {start: 8, steps: 1000}, or a list of stages"
    )
    sequence_ramp: AnyRamp | None = Field(
        None, description="shorter sequences at first, by the task's cut(): {start: 128, end: 1024, steps: 1000}"
    )
    precision: Precision = Field(
        "float32",
        description="tf32: faster matrix products on CUDA; bf16 and fp16 (CUDA) use autocast, fp16 with loss scaling; "
        "fp8: bf16 with large linear layers in 8 bits",
    )
    accumulate: int = Field(1, gt=0, description="micro-batches per optimizer step on each process")
    clip_norm: float | None = Field(None, gt=0)
    activation_checkpointing: Annotated[Annotated[str, Field(min_length=1)] | None, _TEXT_OR_NULL] = Field(
        None, description="blocks, or a pattern of module names: their activations are recomputed in the backward pass"
    )
    compile: AnyCompile = Field(False, description="use torch.compile; blocks: compile each kind of block once")
    freeze: Patterns | None = Field(None, description="patterns of parameter names that are not trained")
    ema: AnyEma | None = Field(None, description="an exponential moving average of the weights; a number is its decay")
    on_nan: Literal["stop", "skip"] = Field("stop", description="what to do when gradients are not finite")

    @model_validator(mode="after")
    def _one_limit(self) -> Train:
        limits = {name: getattr(self, name) for name in ("epochs", "steps", "tokens")}
        given = {name: value for name, value in limits.items() if value is not None}
        if len(given) > 1:
            shown = ", ".join(f"{name}: {value}" for name, value in given.items())
            raise ValueError(f"give {' or '.join(given)}, not {'both' if len(given) == 2 else 'all'} ({shown})")
        if self.limit is not None and self.overfit is not None:
            raise ValueError(f"give limit or overfit, not both (limit: {self.limit}, overfit: {self.overfit})")
        return self

    @property
    def epoch_limit(self) -> int | None:
        """Epochs to train for: one by default, and None if `steps` or `tokens` is set."""
        return 1 if self.epochs is None and self.steps is None and self.tokens is None else self.epochs

    def is_done(self, steps: int, tokens: int) -> bool:
        """Whether the limit of steps or tokens is reached."""
        return (self.steps is not None and steps >= self.steps) or (self.tokens is not None and tokens >= self.tokens)

    @property
    def batch_sizes(self) -> Sizes | None:
        return None if self.batch_ramp is None else Sizes.of(self.batch_ramp, "batch_ramp", self.batch_size)

    @property
    def sequence_lengths(self) -> Sizes | None:
        return None if self.sequence_ramp is None else Sizes.of(self.sequence_ramp, "sequence_ramp")

    @model_validator(mode="after")
    def _ramps_fit(self) -> Train:
        _ = self.batch_sizes, self.sequence_lengths
        return self


class Validate(Section):
    every: Interval = EVERY_EPOCH
    on: Literal["all", "rank0"] = "all"
    batch_size: int | None = Field(None, gt=0, description="defaults to train.batch_size / train.accumulate")
    limit: int | None = Field(
        None, gt=0, description="measure the first so many examples of every set, also of test data; null: all"
    )


class Criterion(Section):
    metric: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    delta: float = Field(0.0, ge=0, description="the smallest change that counts as an improvement")
    grace: int = Field(0, ge=0, description="validations before this criterion counts")


class EarlyStop(Section):
    criteria: Annotated[tuple[Criterion, ...], _NOT_EMPTY] = Field(
        (Criterion(),), strict=False, json_schema_extra={"minItems": 1}
    )
    combine: Literal["any", "all"] = "any"
    patience: int = Field(3, gt=0, description="validations without improvement before training stops")


class Keep(Section):
    last: int = Field(2, gt=0)
    best: int = Field(1, ge=0)
    metric: str = "val/loss"
    mode: Literal["min", "max"] = "min"


class Checkpoint(Section):
    every: Interval | None = EVERY_EPOCH
    keep: Keep = Keep()
    asynchronous: bool = Field(True, alias="async")
    save: Literal["auto", "all", "trainable"] = Field(
        "auto", description="trainable: leave out frozen weights; auto: trainable for peft models, otherwise all"
    )


class InitFrom(Section):
    """The weights that a run starts from."""

    path: PathOrUrl = Field(
        min_length=1, description="a run, a checkpoint, a safetensors file or a Hugging Face folder"
    )
    strict: bool = Field(True, description="refuse missing, unexpected or differently shaped weights")
    map: dict[str, str | None] = Field(
        {}, description="prefix of names in the file -> prefix in the model; null: leave these weights out"
    )


class After(Section):
    """What is done with a trained model, by the command of that name. It is no part of the user's config."""

    do: Literal["evaluate", "predict", "export"]
    run: str = Field(min_length=1)  # the folder of the run that has the model
    step: int = Field(ge=0)  # the step of its checkpoint
    data: str | None = None  # the name of the data; evaluate: test if there is any, otherwise val
    input: str | None = None  # passed to the task's predict_data
    out: str | None = None  # the file of predictions, or the exported model
    to: Literal["hf", "torch-export", "onnx"] | None = None  # the form to export
    merge: bool = False  # whether adapters of peft are added into the weights that are exported
    chunk: int = Field(1024, gt=0)  # examples in each part of the predictions
    weights: Literal["raw", "ema"] = "raw"


class Timeouts(Section):
    """How long a run waits before it reports an error."""

    rendezvous: Seconds = Field(60.0, description="for all ranks to join")
    collective: Seconds = Field(1800.0, description="for the other ranks during training")
    stall: Seconds | None = Field(
        300.0, description="for a rank that makes no progress while others wait for it; null: no limit"
    )
    first_step: Seconds = Field(1800.0, description="the same for what a process does for the first time (compiling)")
    checkpoint: Seconds = Field(1800.0, description="for a checkpoint to be written")
    stop: Seconds = Field(60.0, description="for a run to save and exit after a request to stop")


class Watch(Section):
    fingerprint_every: Annotated[Interval | None, _IN_STEPS] = Field(
        Interval(1000, "step"), description="how often replicas are compared; null: at checkpoints only"
    )


class Xla(Section):
    """The PJRT runtime: its devices, their memory and recompilations."""

    device: Literal["CPU", "TPU", "CUDA", "GPU"] | None = Field(
        None, description="the device family; defaults to PJRT_DEVICE, then to CPU"
    )
    chips: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, strict=False, description="the TPU chips of this host to use; null: all"
    )
    max_recompiles: int | None = Field(
        None, ge=0, description="end the run after this many recompilations past warm-up; null: only report them"
    )
    cache: str | None = Field(None, description="a folder for compiled programs, if the device supports it")
    memory_fraction: float | None = Field(None, gt=0, le=1, description="fraction of device memory to use (CUDA)")
    preallocate: bool | None = Field(None, description="allocate that memory at the start (CUDA)")


class Profile(Section):
    """A trace of a few steps, and a server that takes one on request."""

    enabled: bool = Field(True, description="false: ignore this section")
    start_step: int | None = Field(None, gt=0, description="the first traced step; null: the tenth of the process")
    steps: int = Field(5, ge=0, le=1000, description="how many steps; the trace is kept in memory until it is written")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, strict=False, description="null: all ranks")
    port: int | None = Field(
        9012, gt=0, lt=65536, description="of the server, plus the local rank; null: start no server"
    )
    address: str = Field("127.0.0.1", min_length=1, description="the address the server listens on")


class RunSettings(Section):
    """Settings that every run has, with a Task or with a custom loop."""

    name: str | None = Field(None, pattern=r"^[\w][\w.-]*$")
    seed: int = Field(0, ge=0, lt=2**63)
    runtime: Annotated[
        Literal["auto", "cpu", "cuda", "xla"],
        BeforeValidator(
            lambda value: "cuda" if value == "gpu" else value,
            json_schema_input_type=Literal["auto", "cpu", "cuda", "gpu", "xla"],
        ),
    ] = Field("auto", description="gpu means cuda")
    processes: Annotated[Literal["auto"] | Annotated[int, Field(gt=0, le=65_536)], _AUTO_OR_COUNT] = "auto"
    devices: Annotated[Literal["auto"] | Annotated[int, Field(gt=0, le=65_536)], _AUTO_OR_COUNT] = Field(
        "auto", description="XLA devices per process; on the CPU, the number of virtual devices"
    )
    strategy: Annotated[Strategy, as_mapping(Strategy)] = Strategy()
    xla: Xla = Xla()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    launch: Annotated[Launch, as_mapping(Launch)] = Launch()
    pod: Pod = Pod()
    timeouts: Timeouts = Timeouts()
    watch: Watch = Watch()
    profile: Profile | None = None
    train: Reproducible = Reproducible()

    @model_validator(mode="after")
    def _fixed_threads(self) -> RunSettings:
        """Sums over many numbers depend on the number of threads, and that depends on the number of processes."""
        if self.train.is_deterministic and self.launch.threads is None:
            self.__dict__["launch"] = self.launch.model_copy(update={"threads": 1})
        return self

    @model_validator(mode="after")
    def _exact_goes_with(self) -> RunSettings:
        leaves, strategy = self.train.exact, self.strategy
        if leaves is None:
            return self
        wrong = (
            f"runtime: {self.runtime}: it adds gradients in its own order. Use cpu or cuda" if self.runtime == "xla"
            else f"strategy: {strategy.type}: its collectives add gradients in their own order. Use ddp"
            if strategy.type not in ("auto", "single", "ddp")
            else f"strategy.{strategy.given_for_ddp[0]}, which is for torch's DistributedDataParallel: leave it out"
            if strategy.given_for_ddp
            else "strategy.sync_batchnorm: each leaf has its own statistics. Leave it out" if strategy.sync_batchnorm
            else None
        )  # fmt: skip
        if wrong is not None:
            raise ValueError(f"train.exact: {leaves} cannot be used with {wrong}")
        if isinstance(self.processes, int):
            require_leaves(leaves, self.processes)
        return self

    def plain(self) -> dict[str, Any]:
        """Returns plain data under the names that the YAML uses."""
        return self.model_dump(mode="json", by_alias=True)


class RunConfig(RunSettings):
    """Everything that `lockstep train` needs to know."""

    task: Annotated[Component, as_mapping(Component)]
    train: Train = Train()
    optimizer: Annotated[Optimizer, as_mapping(Optimizer)] | None = Field(
        None, description="defaults to the task's, then to torch.optim.AdamW"
    )
    scheduler: Annotated[AnyScheduler, as_mapping(AnyScheduler)] | None = None
    validation: Validate = Field(Validate(), alias="validate")
    early_stop: EarlyStop | None = None
    callbacks: tuple[Annotated[Component, as_mapping(Component)], ...] = Field(
        (), strict=False, description="classes like lockstep.Callback, created on every rank"
    )
    init_from: Annotated[InitFrom, as_mapping(InitFrom, "path")] | None = None
    _after: After | None = PrivateAttr(None)

    @property
    def after(self) -> After | None:
        """What is done with a trained model in place of training, if anything."""
        return self._after

    @property
    def evaluation_batch_size(self) -> int:
        """Examples that are measured or predicted at once. A micro-batch fits wherever training fits."""
        return self.validation.batch_size or max(1, self.train.batch_size // self.train.accumulate)

    def with_after(self, after: After | None) -> RunConfig:
        copy = self.model_copy()
        copy._after = after
        return copy

    def plain(self) -> dict[str, Any]:
        """Returns what config.yaml holds. `lockstep.config.load.from_plain` reads it."""
        return {**super().plain(), **({"after": self._after.model_dump(mode="json")} if self._after else {})}

    @model_validator(mode="after")
    def _a_static_graph_is_exchanged_at_once(self) -> RunConfig:
        if self.strategy.static_graph and self.train.accumulate > 1:
            raise ValueError(
                f"strategy.static_graph: torch learns the graph from the first backward pass, which has to exchange "
                f"gradients, but with train.accumulate: {self.train.accumulate} it does not: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _half_precision_needs_a_gpu(self) -> RunConfig:
        if self.train.precision == "fp16" and self.runtime in ("cpu", "xla"):
            raise ValueError(
                f"train.precision: fp16 is for CUDA GPUs, but the runtime is {self.runtime}: use bf16, which needs no "
                "loss scaling"
            )
        return self
