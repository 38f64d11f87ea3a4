"""The RunConfig models: how to train, one YAML file, validated before any process starts."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.config import loggers
from lockstep.config.launch import Slurm
from lockstep.config.pod import Pod
from lockstep.config.strategy import Strategy
from lockstep.config.training import EVERY_EPOCH as EVERY_EPOCH
from lockstep.config.training import AnyCompile, AnyEma, AnyScheduler, Data, Optimizer, Patterns
from lockstep.config.training import Schedule as Schedule
from lockstep.config.training import Scheduler as Scheduler
from lockstep.config.values import Component as Component
from lockstep.config.values import HostName, Interval, Seconds, as_mapping
from lockstep.config.values import Section as Section

Precision = Literal["float32", "tf32", "bf16", "fp16", "fp8"]
Region = Literal["data", "forward", "backward", "optimizer", "checkpoint", "validate"]
REGIONS: tuple[Region, ...] = get_args(Region)


def _as_path(value: Any) -> Any:
    """A bare path stands for a mapping with that alone."""
    return {"path": value} if isinstance(value, str) else value


def _in_steps(value: Any) -> Any:
    """A bare number counts steps."""
    return f"{value} steps" if isinstance(value, int) and not isinstance(value, bool) else value


def _processes(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("must be a number greater than 0, or auto")


def _activation_checkpointing(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    raise ValueError("must be blocks, or a pattern over the names of modules, or null")


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ValueError(f"not a network; write for example 10.0.0.0/24 ({error})") from None
    return text


def _not_empty(criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
    if not criteria:
        raise ValueError("there must be at least one criterion; leave early_stop out to train to the end")
    return criteria


class Train(Section):
    epochs: int | None = Field(None, gt=0)
    steps: int | None = Field(None, gt=0)
    batch_size: int = Field(32, gt=0, description="examples per optimizer step, over all processes together")
    precision: Precision = Field(
        "float32",
        description="tf32: shorter products on CUDA; bf16, fp16 (CUDA): by autocast, fp16 with a scaled loss; fp8: "
        "bf16, with large linear layers in eight bits",
    )
    accumulate: int = Field(1, gt=0, description="parts in which a process computes its share of a batch")
    clip_norm: float | None = Field(None, gt=0)
    activation_checkpointing: Annotated[
        Annotated[str, Field(min_length=1)] | None, BeforeValidator(_activation_checkpointing)
    ] = Field(
        None, description="blocks, or a pattern of module names: what is computed again in the backward pass, not kept"
    )
    compile: AnyCompile = Field(False, description="by torch.compile; blocks: each kind of block once")
    freeze: Patterns | None = Field(None, description="patterns of parameter names: what is not trained")
    ema: AnyEma | None = Field(None, description="a moving average of the weights; a bare number is its decay")
    on_nan: Literal["stop", "skip"] = Field("stop", description="what to do where the gradients are not finite")

    @model_validator(mode="after")
    def _one_limit(self) -> Train:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"give epochs or steps, not both (epochs: {self.epochs}, steps: {self.steps})")
        return self

    @property
    def epoch_limit(self) -> int | None:
        """Epochs to train for; one where nothing was said, none where steps are counted instead."""
        return 1 if self.epochs is None and self.steps is None else self.epochs


class Validate(Section):
    every: Interval = EVERY_EPOCH
    on: Literal["all", "rank0"] = "all"
    batch_size: int | None = Field(None, gt=0, description="train.batch_size where not given")


class Criterion(Section):
    metric: str = "val/loss"
    mode: Literal["min", "max"] = "min"
    delta: float = Field(0.0, ge=0, description="a change smaller than this is no improvement")
    grace: int = Field(0, ge=0, description="validations before this criterion begins to count")


class EarlyStop(Section):
    criteria: Annotated[tuple[Criterion, ...], AfterValidator(_not_empty)] = Field(
        (Criterion(),), strict=False, json_schema_extra={"minItems": 1}
    )
    combine: Literal["any", "all"] = "any"
    patience: int = Field(3, gt=0, description="validations without improvement before stopping")


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
        "auto", description="trainable: no weights that are frozen; auto: that for a model of peft's, else all"
    )


class InitFrom(Section):
    """Weights that a run begins with."""

    path: str = Field(min_length=1, description="a run, a checkpoint, a safetensors file, a Hugging Face folder")
    strict: bool = Field(True, description="refuse weights that are missing, unexpected or of another shape")
    map: dict[str, str | None] = Field(
        {}, description="what names begin with there -> what they begin with here; null: left out"
    )


class After(Section):
    """What is done with a trained model in place of training: lockstep evaluate and predict set it."""

    do: Literal["evaluate", "predict"]
    run: str = Field(min_length=1, description="the folder of the run that has the model")
    step: int = Field(ge=0, description="of its checkpoint")
    data: str | None = Field(None, description="the name of the data; of evaluate: test where there is any, else val")
    input: str | None = Field(None, description="given to the task's predict_data")
    out: str | None = Field(None, description="the file of predictions")
    chunk: int = Field(1024, gt=0, description="examples in every part of the predictions")
    weights: Literal["raw", "ema"] = Field("raw", description="to predict with: as they were trained, or averaged")


class Log(Section):
    """Where rows of metrics and samples go; further keys are loggers of one's own, each with a `type`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, loggers.Own]

    every: Interval = Interval(10, "step")
    jsonl: bool = True
    tensorboard: bool = False
    gradient_norm: bool | None = Field(
        None, description="the norm of all gradients, before they are clipped; null: where they are"
    )
    wandb: Annotated[loggers.Wandb | None, loggers.switch(loggers.Wandb)] = None
    mlflow: Annotated[loggers.Mlflow | None, loggers.switch(loggers.Mlflow)] = None
    trackio: Annotated[loggers.Trackio | None, loggers.switch(loggers.Trackio)] = None
    timeout: Seconds = Field(30.0, description="how long a logger may take at the end before the run leaves without it")

    @model_validator(mode="after")
    def _names(self) -> Log:
        wrong = next((name for name in self.own if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII)), None)
        if wrong is not None:
            raise ValueError(f"the name of a logger is made of letters, digits and _; got {wrong!r}")
        return self

    @property
    def own(self) -> dict[str, loggers.OwnLogger]:
        return dict(self.__pydantic_extra__ or {})

    @property
    def has_loggers(self) -> bool:
        return bool(self.tensorboard or self.wandb or self.mlflow or self.trackio or self.own)


def _no_client(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(
            "Ray Client (ray://) cannot carry a training run; give the cluster's own address (HOST:6379) on a machine "
            "of the cluster, or submit the command with `ray job submit`"
        )
    return address


class RayCluster(Section):
    """Where Ray starts the workers, and what each of them gets."""

    address: Annotated[str, AfterValidator(_no_client)] | None = Field(
        None, description="of a cluster that runs; where not given, RAY_ADDRESS, or one of our own on this machine"
    )
    resources: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description="per worker: CPU (1 where not given), GPU, TPU, memory in bytes, or the cluster's own names"
    )
    topology: str | None = Field(None, description="of the TPU slice that several workers share, such as 2x2x2")
    accelerator: str | None = Field(None, description="its kind by Ray's name, such as TPU-V4; both for TPUs only")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    placement_timeout: Seconds = Field(60.0, description="how long to wait for room for all workers")
    min_workers: int | None = Field(None, gt=0, description="go on with so few where there is no room for all")
    runtime_env: dict[str, Any] = Field({}, description="Ray's own; the task's folder travels to the workers anyway")
    insecure: bool = Field(False, description="use a cluster that asks nobody for a token: see docs/security.md")
    storage: str | None = Field(
        None, description="a folder that all nodes share, or a bucket, for the runs' folders; --out where not given"
    )


class Launch(Section):
    type: Literal["local", "ssh", "ray", "slurm"] = "local"
    hosts: tuple[HostName, ...] = Field(
        (), strict=False, description="for ssh: where to train, by the names of your SSH config; [user@]host"
    )
    hosts_file: str | None = Field(None, min_length=1, description="or a file that has one in every line")
    nodes: int | None = Field(
        None, gt=0, description="how many of the hosts to train on: the others are spares, for a host that dies"
    )
    network: Annotated[str, AfterValidator(_network)] | None = Field(
        None, description="for ssh: where the hosts reach each other, such as 10.0.0.0/24; as they are logged in to"
    )
    max_restarts: int = Field(0, ge=0)
    port: int | None = Field(None, gt=0, lt=65536, description="a free one where not given")
    threads: int | None = Field(
        None, gt=0, le=65_536, description="CPU threads per process; cores / processes where not given"
    )
    share_devices: bool = Field(False, description="let several processes use one physical device")
    ray: RayCluster = RayCluster()
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _hosts_are_for_ssh(self) -> Launch:
        given = [name for name in ("hosts", "hosts_file", "nodes", "network") if getattr(self, name)]
        if given and self.type != "ssh":
            raise ValueError(f"{given[0]} is for launch: ssh, but launch.type is {self.type}")
        if self.hosts and self.hosts_file:
            raise ValueError("give hosts or hosts_file, not both")
        return self


class Timeouts(Section):
    """How long a run waits before it reports an error."""

    rendezvous: Seconds = Field(60.0, description="for all ranks to arrive")
    collective: Seconds = Field(1800.0, description="for other ranks while training")
    stall: Seconds | None = Field(
        300.0, description="for a rank that holds up others without progress; null: for as long as it likes"
    )
    first_step: Seconds = Field(1800.0, description="the same, for what a process does for the first time (compiling)")
    checkpoint: Seconds = Field(1800.0, description="for a checkpoint to be written")
    stop: Seconds = Field(60.0, description="for a run to save and leave once asked to stop")


class Watch(Section):
    fingerprint_every: Annotated[Interval | None, BeforeValidator(_in_steps)] = Field(
        Interval(1000, "step"), description="how often the replicas are compared; null: at checkpoints only"
    )


class Xla(Section):
    """The PJRT runtime: which devices, how much of their memory, and what a recompilation means."""

    device: Literal["CPU", "TPU", "CUDA", "GPU"] | None = Field(
        None, description="the device family; PJRT_DEVICE where not given, and CPU where that is not set either"
    )
    chips: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, strict=False, description="the TPU chips of this host to use; all where not given"
    )
    max_recompiles: int | None = Field(
        None, ge=0, description="compilations after warm-up that end the run; null: they are reported only"
    )
    cache: str | None = Field(None, description="a folder for compiled programs, where the device supports it")
    memory_fraction: float | None = Field(None, gt=0, le=1, description="of the device's memory (CUDA)")
    preallocate: bool | None = Field(None, description="take that memory at once (CUDA)")


class Profile(Section):
    """A trace of a few steps, of every process or of some; and a server that takes one when it is asked to."""

    enabled: bool = Field(True, description="false: as if there were no profile section")
    start_step: int | None = Field(None, gt=0, description="the first step; the tenth of the process where not given")
    steps: int = Field(5, ge=0, le=1000, description="how many: a trace is kept in memory until it is written")
    regions: tuple[Region, ...] = Field(REGIONS, strict=False, description="which parts of a step are named in it")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(None, strict=False, description="null: all of them")
    port: int | None = Field(9012, gt=0, lt=65536, description="the server's, plus the local rank; null: no server")
    address: str = Field("127.0.0.1", min_length=1, description="what the server listens at")


class RunSettings(Section):
    """What every run has, with a Task or with a loop of its own."""

    name: str | None = Field(None, pattern=r"^[\w][\w.-]*$")
    seed: int = Field(0, ge=0, lt=2**63)
    runtime: Annotated[
        Literal["auto", "cpu", "cuda", "xla"],
        BeforeValidator(
            lambda value: "cuda" if value == "gpu" else value,
            json_schema_input_type=Literal["auto", "cpu", "cuda", "gpu", "xla"],
        ),
    ] = Field("auto", description="gpu means cuda")
    processes: Annotated[Literal["auto"] | Annotated[int, Field(gt=0)], BeforeValidator(_processes)] = "auto"
    devices: Annotated[Literal["auto"] | Annotated[int, Field(gt=0, le=65_536)], BeforeValidator(_processes)] = Field(
        "auto", description="XLA devices of every process; on the CPU, how many it pretends to have"
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


class RunConfig(RunSettings):
    """Everything that `lockstep train` needs to know."""

    task: Annotated[Component, as_mapping(Component)]
    train: Train = Train()
    optimizer: Annotated[Optimizer, as_mapping(Optimizer)] | None = Field(
        None, description="torch.optim.AdamW where neither the config nor the task names one"
    )
    scheduler: Annotated[AnyScheduler, as_mapping(AnyScheduler)] | None = None
    validation: Validate = Field(Validate(), alias="validate")
    early_stop: EarlyStop | None = None
    callbacks: tuple[Annotated[Component, as_mapping(Component)], ...] = Field(
        (),
        strict=False,
        description="what else happens between steps: classes like lockstep.Callback, made on every rank",
    )
    init_from: Annotated[InitFrom, BeforeValidator(_as_path, json_schema_input_type=InitFrom | str)] | None = None
    plan: Literal["off", "check"] = Field(
        "off", description="check: before it starts, say whether a step fits the devices that are here"
    )
    after: After | None = None

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
                "scaled loss"
            )
        return self

    def plain(self) -> dict[str, Any]:
        """As plain data, by the names that the YAML uses: what config.yaml holds."""
        return self.model_dump(mode="json", by_alias=True)
