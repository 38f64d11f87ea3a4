"""The ways of running a task that are compared: what each needs, what it changes, how it is started."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config.plain import did_you_mean
from lockstep.doctor.machine import fit_together
from lockstep.errors import ConfigError
from lockstep.runtime.gpus import gpu_count
from lockstep.version import version_of


@dataclass(frozen=True)
class Combination:
    """A device family, a strategy and a launcher."""

    name: str
    overrides: tuple[str, ...]  # of the config, as for --set
    packages: tuple[str, ...] = ()  # that have to be installed
    gpus: int = 0  # that have to be here
    command: tuple[str, ...] = ("-m", "lockstep")  # after the Python interpreter, before `train` or `resume`
    env: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False  # compared with the first of these, in every bit
    refusal: str = ""  # what messages have that refuse a task which cannot run this way

    @property
    def alone(self) -> bool:
        """Whether nothing else may run meanwhile."""
        return bool(self.gpus or "ray" in self.packages)

    @property
    def plain(self) -> bool:
        """Whether a process that has run others may run it: on the CPU, by Lockstep's launcher."""
        return not (self.alone or self.packages or self.env or self.command != ("-m", "lockstep"))


def _torchrun(processes: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m", "lockstep")


# Resets what a config may say for one way of running alone.
_HERE = ("launch.type=local", "launch.hosts=[]", "launch.network=null")
_UNSHARDED = (
    "strategy.mesh=null",
    "strategy.meshes={}",
    "strategy.shard={}",
    "strategy.offload=false",
    "strategy.param_dtype=float32",
    "strategy.reduce_dtype=float32",
    "strategy.reshard_after_forward=true",
)
_ANY_DEVICES = ("devices=auto", "xla.chips=null")
_PLAIN = (*_HERE, *_ANY_DEVICES, *_UNSHARDED)
_CPU, _CUDA = ("runtime=cpu", *_PLAIN), ("runtime=cuda", *_PLAIN)
_XLA = ("runtime=xla", "xla.device=CPU", *_PLAIN)
_ON_RAY = "launch.type=ray"
_RAY = ("runtime=cpu", *_PLAIN, _ON_RAY)
# A config's rules for sharding stay; both meshes have the axes that rules name, data and model.
_XLA_MESH = ("runtime=xla", "xla.device=CPU", "xla.chips=null", *_HERE, "devices=4")
_SHARED, _SPMD = "launch.share_devices=true", "strategy.type=spmd"
_SINGLE, _DDP, _THREADS = "strategy.type=single", "strategy.type=ddp", "strategy.type=threads"
_ONE, _TWO, _THREE, _FOUR = "processes=1", "processes=2", "processes=3", "processes=4"
_MESH_2, _MESH_4 = "strategy.mesh={data: 2, model: 1}", "strategy.mesh={data: 4, model: 1}"
_MESH_1X2, _MESH_2X2 = "strategy.mesh={data: 1, model: 2}", "strategy.mesh={data: 2, model: 2}"
_CONTEXT_2 = "strategy.mesh={data: 1, context: 2, model: 1}"
_CONTEXT_2X2 = "strategy.mesh={data: 2, context: 2, model: 1}"
_MESH_ALL = "strategy.mesh={data: -1, model: 1}"
_FSDP, _HSDP = "strategy.type=fsdp", "strategy.type=hsdp"
# The same on a mesh of processes. Over one place of data, fsdp leaves the rules alone: a task may have none.
_OVER_CPUS = ("runtime=cpu", *_ANY_DEVICES, *_HERE)
_OVER_GPUS = ("runtime=cuda", *_ANY_DEVICES, *_HERE)
_TORCH_XLA: Any = {"packages": ("torch_xla",)}
# What a config may say for ddp, and train.exact does not need.
_EXACT = ("train.exact=8", "strategy.sync_batchnorm=false", "strategy.static_graph=false", "strategy.comm_hook=null",
          "strategy.gradient_as_bucket_view=null")  # fmt: skip
_NO_PARTS = "strategy.mesh: context"
# TF32 rounds what goes into a product to 11 bits, and convolutions use it by default: another arithmetic, not another
# order of the same one.
_NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
_GPU: Any = {"gpus": 1, "env": _NO_TF32}
_GPUS: Any = {"gpus": 2, "env": _NO_TF32}

# The first is what all others are compared with.
COMBINATIONS = (
    Combination("cpu-single", (*_CPU, _ONE, _SINGLE)),
    Combination("cpu-ddp-2", (*_CPU, _TWO, _DDP)),
    Combination("cpu-ddp-4", (*_CPU, _FOUR, _DDP)),
    Combination("cpu-torchrun-2", (*_CPU, _TWO, _DDP), command=_torchrun(2)),
    Combination("cpu-fsdp-2", (*_OVER_CPUS, _TWO, _MESH_2, _FSDP)),
    Combination("cpu-fsdp-3", (*_OVER_CPUS, _THREE, "strategy.mesh={data: 3, model: 1}", _FSDP)),
    Combination("cpu-fsdp-4", (*_OVER_CPUS, _FOUR, _MESH_4, _FSDP)),
    Combination("cpu-hsdp-2x2", (*_OVER_CPUS, _FOUR, "strategy.mesh={replica: 2, data: 2, model: 1}", _HSDP)),
    Combination("cpu-tensor-2", (*_OVER_CPUS, _TWO, _MESH_1X2, _FSDP)),
    Combination("cpu-fsdp-tensor-2x2", (*_OVER_CPUS, _FOUR, _MESH_2X2, _FSDP)),
    Combination("cpu-context-2", (*_OVER_CPUS, _TWO, _CONTEXT_2, _FSDP), refusal=_NO_PARTS),
    Combination("cpu-context-2x2", (*_OVER_CPUS, _FOUR, _CONTEXT_2X2, _FSDP), refusal=_NO_PARTS),
    Combination("cpu-torchrun-fsdp-2", (*_OVER_CPUS, _TWO, _MESH_ALL, _FSDP), command=_torchrun(2)),
    *(
        Combination(
            f"exact-{count}", (*_CPU, f"processes={count}", "strategy.type=auto", *_EXACT), exact=True, refusal="exact"
        )
        for count in (1, 2, 4, 8)
    ),
    Combination("cpu-ray-fsdp-2", (*_OVER_CPUS, _TWO, _MESH_ALL, _FSDP, _ON_RAY), packages=("ray",)),
    Combination("cpu-ray-2", (*_RAY, _TWO, _DDP), packages=("ray",)),
    Combination("xla-single", (*_XLA, _ONE, _SINGLE), **_TORCH_XLA),
    Combination("xla-ddp-2", (*_XLA, _TWO, _DDP), **_TORCH_XLA),
    Combination("xla-torchrun-2", (*_XLA, _TWO, _DDP), **_TORCH_XLA, command=_torchrun(2)),
    Combination("xla-threads-2", (*_XLA, _ONE, _THREADS, "devices=2"), **_TORCH_XLA),
    Combination("xla-threads-4", (*_XLA, _ONE, _THREADS, "devices=4"), **_TORCH_XLA),
    Combination("xla-spmd-4", (*_XLA_MESH, _ONE, _MESH_4, _SPMD), **_TORCH_XLA),
    Combination("xla-spmd-2x2", (*_XLA_MESH, _ONE, _MESH_2X2, _SPMD), **_TORCH_XLA),
    Combination("xla-fsdp-4", (*_XLA_MESH, _ONE, _MESH_4, _FSDP), **_TORCH_XLA),
    Combination("xla-fsdp-tensor-2x2", (*_XLA_MESH, _ONE, _MESH_2X2, _FSDP), **_TORCH_XLA),
    Combination("cuda-single", (*_CUDA, _ONE, _SINGLE), **_GPU),
    Combination("cuda-shared-2", (*_CUDA, _TWO, _DDP, _SHARED), **_GPU),
    Combination("cuda-fsdp-1", (*_OVER_GPUS, _ONE, "strategy.mesh={data: 1, model: 1}", _FSDP), **_GPU),
    Combination("cuda-shared-fsdp-2", (*_OVER_GPUS, _TWO, _MESH_2, _FSDP, _SHARED), **_GPU),
    Combination("cuda-shared-tensor-2", (*_OVER_GPUS, _TWO, _MESH_1X2, _FSDP, _SHARED), **_GPU),
    Combination("cuda-fsdp-2", (*_OVER_GPUS, _TWO, _MESH_2, _FSDP), **_GPUS),
    Combination("cuda-ddp-2", (*_CUDA, _TWO, _DDP), **_GPUS),
    Combination("cuda-torchrun-2", (*_CUDA, _TWO, _DDP), command=_torchrun(2), **_GPUS),
)
REFERENCE = COMBINATIONS[0]


# Before the user's overrides, which may change it: what makes a comparison exact and quick.
USUAL = ("train.precision=float32", "train.compile=false", "data.workers=0", "data.prefetch=null")


def halfway(steps: int) -> int:
    """Returns the step after which every run is saved: late enough that the next multiple is the end."""
    return (steps + 1) // 2


def needed(steps: int) -> tuple[str, ...]:
    """Returns what the comparison itself rests on, after the user's overrides."""
    return (
        "train.epochs=null",
        "train.tokens=null",
        f"train.steps={steps}",
        "early_stop=null",
        "log={every: 1 step, jsonl: true}",  # and no loggers
        f"checkpoint.every={halfway(steps)} steps",
        "checkpoint.keep.last=2",
        "checkpoint.keep.best=0",
        "launch.max_restarts=0",
        "launch.port=null",
        "timeouts.stop=10 s",
    )


def named(patterns: Iterable[str], option: str) -> set[str]:
    """Returns the names that match patterns like `cpu-*`; ConfigError if one matches none."""
    names = [each.name for each in COMBINATIONS]
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"{option} {pattern}: no combination has this name, {did_you_mean(pattern, names)}")
        found.update(matching)
    return found


def missing(combination: Combination) -> str | None:
    """Says what a combination lacks here; None if it can run."""
    for package in combination.packages:
        if version_of(package) is None:
            return f"{package} is not installed"
    torch, torch_xla = version_of("torch"), version_of("torch_xla")
    if "torch_xla" in combination.packages and not fit_together(torch, torch_xla):
        return f"torch_xla {torch_xla} does not fit torch {torch}"
    if combination.gpus and (present := gpu_count()) < combination.gpus:
        wanted = "a GPU" if combination.gpus == 1 else f"{combination.gpus} GPUs"
        return f"needs {wanted}, and torch sees {present or 'none'}"
    return None
