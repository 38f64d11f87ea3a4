"""The RunConfig models: how to train, one YAML file, validated before any process starts."""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from lockstep.config import loggers
from lockstep.config.component import Component as Component
from lockstep.config.component import as_mapping
from lockstep.config.optimizing import EVERY_EPOCH as EVERY_EPOCH
from lockstep.config.optimizing import AnyCompile, AnyEma, AnyScheduler, Optimizer, Patterns
from lockstep.config.optimizing import Schedule as Schedule
from lockstep.config.optimizing import Scheduler as Scheduler
from lockstep.config.pod import Pod
from lockstep.config.section import Section as Section
from lockstep.config.slurm import Slurm
from lockstep.config.values import HostName, Interval, Seconds, import_path

Precision = Literal["float32", "tf32", "bf16", "fp16"]
COMM_HOOKS = ("bf16_compress", "fp16_compress", "powerSGD")
Region = Literal["data", "forward", "backward", "optimizer", "checkpoint", "validate"]
REGIONS: tuple[Region, ...] = get_args(Region)


def _as_path(value: Any) -> Any:
    """A bare path stands for a mapping with that alone."""
    return {"path": value} if isinstance(value, str) else value


def _in_steps(value: Any) -> Any:
    """A bare number counts steps."""
    return f"{value} steps" if isinstance(value, int) and not isinstance(value, bool) else value


def _mesh_shape(shape: dict[str, int]) -> dict[str, int]:
    if not shape:
        raise ValueError("a mesh needs at least one axis, for example {data: -1}")
    wrong = [f"{axis}: {size}" for axis, size in shape.items() if size == 0 or size < -1]
    if wrong:
        raise ValueError(f"the size of an axis is 1 or more, or -1 for the rest; got {', '.join(wrong)}")
    if list(shape.values()).count(-1) > 1:
        raise ValueError(f"only one axis can be -1, the rest; got {shape}")
    return shape


def _as_rule(value: Any) -> Any:
    """A bare list stands for a rule over `strategy.mesh`."""
    return {"spec": value} if isinstance(value, list | tuple) else value


def _processes(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("must be a number greater than 0, or auto")


def _hook_name(text: str) -> str:
    if text in COMM_HOOKS:
        return text
    if "." not in text and ":" not in text:
        raise ValueError(f"must be {', '.join(COMM_HOOKS)}, or an import path such as package.module:function")
    return import_path(text)


def _recompute(value: Any) -> Any:
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


MeshShape = Annotated[dict[str, int], AfterValidator(_mesh_shape)]
# What shards one dimension of a tensor: an axis of the mesh, several, or none.
AxisNames = str | Annotated[tuple[str, ...], Field(strict=False)] | None


class ShardRule(Section):
    """How parameters are split: an axis name (or several, or null) for every dimension, over the mesh of a name."""

    spec: tuple[AxisNames, ...] = Field(strict=False)
    mesh: str | None = Field(None, description="one of strategy.meshes; strategy.mesh where not given")
    activations: Literal["whole", "split"] = Field(
        "whole", description="split: what leaves a column-parallel layer, or enters a row-parallel one, stays split"
    )


class CommHook(Section):
    """How DDP exchanges a bucket of gradients: one of torch's hooks by its name, or a function of one's own."""

    type: Annotated[str, AfterValidator(_hook_name)] = Field(
        description="bf16_compress, fp16_compress, powerSGD, or the import path of a function (state, bucket)"
    )
    rank: int = Field(1, gt=0, le=1024, description="powerSGD: of the matrices that travel in place of gradients")
    start: int = Field(1000, gt=1, description="powerSGD: the step from which on it compresses")

    @model_validator(mode="after")
    def _numbers_are_for_power_sgd(self) -> CommHook:
        given = [name for name in ("rank", "start") if getattr(self, name) != CommHook.model_fields[name].default]
        if given and self.type != "powerSGD":
            raise ValueError(f"{given[0]} is for type: powerSGD, but the type is {self.type}")
        return self


class Strategy(Section):
    """How the model and the batch are spread over the processes and devices."""

    type: Literal["auto", "single", "ddp", "threads", "spmd"] = "auto"
    find_unused_parameters: bool = False
    output_device: int | None = Field(None, ge=0)
    bucket_mb: int = Field(25, gt=0, le=2**40)
    static_graph: bool = Field(False, description="ddp: every step uses the same parameters in the same way")
    gradient_as_bucket_view: bool = Field(False, description="ddp: gradients live in the buckets they travel in")
    sync_batchnorm: bool = Field(False, description="ddp: BatchNorm normalises by the batches of all processes")
    comm_hook: Annotated[CommHook, as_mapping(CommHook)] | None = Field(
        None, description="ddp: how buckets of gradients travel"
    )
    mesh: MeshShape | None = Field(None, description="axes and their sizes; -1 is what the others leave over")
    meshes: dict[str, MeshShape] = Field({}, description="further meshes over the same devices, by name")
    shard: dict[str, Annotated[ShardRule, BeforeValidator(_as_rule)]] = Field(
        {}, description="parameter-name pattern -> how to split it; the first that matches counts"
    )
    preset: Literal["fsdp", "hsdp", "tensor"] | None = Field(
        None,
        description="fsdp: split every block over data; hsdp: the same, with a copy for each of the axis replica; "
        "tensor: by the rules, which must be there",
    )
    blocks: str | None = Field(
        None, min_length=1, description="pattern of module names: the model's blocks; where not given, they are found"
    )
    offload: bool = Field(False, description="keep parameters and optimizer state in host memory (CUDA)")
    gather: Literal["float32", "bf16"] = Field(
        "float32",
        description="what a block's parameters are put together in; bf16 halves what is sent and kept of them",
    )

    @model_validator(mode="after")
    def _meshes_are_for_spmd(self) -> Strategy:
        given = [name for name in ("mesh", "meshes", "shard", "preset", "offload") if getattr(self, name)]
        given += ["gather"] if self.gather != "float32" else []
        if given and self.type != "spmd":
            raise ValueError(f"{given[0]} is for strategy: spmd, but the strategy is {self.type}")
        return self

    @property
    def given_for_ddp(self) -> list[str]:
        """What only torch's DistributedDataParallel can do."""
        names = ("static_graph", "gradient_as_bucket_view", "sync_batchnorm", "comm_hook")
        return [name for name in names if getattr(self, name)]

    @model_validator(mode="after")
    def _some_are_for_ddp(self) -> Strategy:
        if self.given_for_ddp and self.type not in ("auto", "ddp"):
            raise ValueError(f"{self.given_for_ddp[0]} is for strategy: ddp, but the strategy is {self.type}")
        return self


class Train(Section):
    epochs: int | None = Field(None, gt=0)
    steps: int | None = Field(None, gt=0)
    batch_size: int = Field(32, gt=0, description="examples per optimizer step, over all processes together")
    precision: Precision = Field(
        "float32", description="tf32: shorter products on CUDA; bf16, fp16 (CUDA): by autocast, fp16 with a scaled loss"
    )
    accumulate: int = Field(1, gt=0, description="parts in which a process computes its share of a batch")
    clip_norm: float | None = Field(None, gt=0)
    recompute: Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_recompute)] = Field(
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


class Split(Section):
    """Fractions of the task's train_data that become training, validation and test data."""

    train: float = Field(gt=0, le=1)
    val: float = Field(0.0, ge=0, lt=1)
    test: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _sums_to_one(self) -> Split:
        total = self.train + self.val + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"the fractions must sum to one, but train {self.train:g} + val {self.val:g} + test {self.test:g} "
                f"= {total:g}"
            )
        return self


class Ordering(Section):
    """In which order an epoch visits its examples."""

    type: Literal["shuffled", "sequential", "weighted", "buckets", "own"]
    replacement: bool = Field(True, description="weighted: whether an example that was drawn may be drawn again")
    count: int | None = Field(None, gt=0, description="weighted: examples in an epoch; as many as there are")
    weights: str | None = Field(
        None, description="weighted: a file of numpy's (.npy), in place of the task's weights()"
    )
    window: int | None = Field(None, gt=0, description="buckets: batches that are sorted by length together; 100")
    lengths: str | None = Field(None, description="buckets: a file of numpy's (.npy), in place of the task's lengths()")

    @model_validator(mode="after")
    def _of_the_type(self) -> Ordering:
        for type_, names in (("weighted", ("count", "weights")), ("buckets", ("window", "lengths"))):
            given = [name for name in names if getattr(self, name) is not None]
            if given and self.type != type_:
                raise ValueError(f"{given[0]} is for type: {type_}, but the type is {self.type}")
        if not self.replacement and self.type != "weighted":
            raise ValueError(f"replacement is for type: weighted, but the type is {self.type}")
        return self


class Data(Section):
    workers: int = Field(0, ge=0)
    pin_memory: bool | None = Field(None, description="page-locked host memory; where not given, with CUDA")
    prefetch: int | None = Field(None, gt=0, le=10_000, description="batches that every worker fetches ahead")
    drop_last: bool = False
    shuffle: bool = Field(True, description="false is short for order: sequential")
    shuffle_buffer: int | None = Field(
        None, gt=1, description="for streams: shuffle the examples of each shard in blocks of so many"
    )
    order: Annotated[Ordering, as_mapping(Ordering)] | None = Field(
        None, description="where not given: the task's own, if it has one, else shuffled"
    )
    split: Split | None = None

    @model_validator(mode="before")
    @classmethod
    def _order_and_shuffle(cls, given: Any) -> Any:
        """Both are kept so that they say the same, also in the config that a run writes down."""
        if not isinstance(given, dict) or given.get("order") is None:
            return given
        order, shuffle = given["order"], given.get("shuffle")
        asked = order.get("type") if isinstance(order, dict) else getattr(order, "type", order)
        if asked == "sequential" and shuffle is None:
            return {**given, "shuffle": False}
        if isinstance(shuffle, bool) and shuffle == (asked == "sequential"):
            raise ValueError(
                f"shuffle: {str(shuffle).lower()} and order: {asked} contradict each other: leave shuffle out"
            )
        return given

    @model_validator(mode="after")
    def _prefetch_needs_workers(self) -> Data:
        if self.prefetch is not None and self.workers == 0:
            raise ValueError(f"prefetch: {self.prefetch} needs workers to do it; set data.workers to 1 or more")
        return self


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
    timeout: Seconds = Field(1800.0, description="how long writing one may take")
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
    gradient_norm: bool = Field(False, description="the norm of all gradients, before they are clipped")
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
    join_timeout: Seconds = Field(60.0, description="how long to wait for all ranks to arrive")
    timeout: Seconds = Field(1800.0, description="the longest wait for other ranks while training")
    grace: Seconds = Field(60.0, description="how long a run may take to save and leave once asked to stop")
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


class Watch(Section):
    stall_after: Seconds | None = Field(
        300.0, description="how long a rank may go without progress; null: for as long as it likes"
    )
    first_time: Seconds = Field(1800.0, description="the same, for what a process does for the first time (compiling)")
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
    hooks: tuple[Annotated[Component, as_mapping(Component)], ...] = Field(
        (), strict=False, description="what else happens between steps: classes like lockstep.Hook, made on every rank"
    )
    init_from: Annotated[InitFrom, BeforeValidator(_as_path, json_schema_input_type=InitFrom | str)] | None = None
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
