"""Whether a cluster has the capacity for the workers of a run, and for how many."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError, LaunchError

# How long the first try may take before the user is told that it takes time.
_AT_ONCE_SECONDS = 5.0


def per_worker(config: RunConfig) -> dict[str, float]:
    """What each worker asks for: a CPU, and a GPU where the run is to use one, unless the config says otherwise."""
    usual = {"CPU": 1.0, **({"GPU": 1.0} if config.runtime == "cuda" else {})}
    return {name: amount for name, amount in {**usual, **config.launch.ray.resources}.items() if amount > 0}


def scaling(
    workers: int,
    resources: Mapping[str, float],
    placement: str = "PACK",
    topology: str | None = None,
    accelerator: str | None = None,
) -> ScalingConfig:
    """What Ray is told of the workers. It wants GPUs and TPUs said once more, and for TPUs the slice that they form."""
    kinds: dict[str, Any] = {"use_gpu": True} if "GPU" in resources else {}
    if "TPU" in resources:
        if workers > 1 and not (topology and accelerator):
            raise ConfigError(
                f"{workers} workers with TPU chips form a slice, which Ray has to find: name its topology (such as "
                "2x2x2) and its accelerator (such as TPU-V4), in launch.ray or by --topology and --accelerator"
            )
        kinds = {"use_tpu": True, "topology": topology, "accelerator_type": accelerator}
    elif topology or accelerator:
        raise ConfigError(
            f"topology {topology} and accelerator {accelerator} are of a TPU slice, but the workers get no TPU: add "
            "TPU to launch.ray.resources (--tpus), or leave them out"
        )
    try:
        return ScalingConfig(
            num_workers=workers, resources_per_worker=dict(resources), placement_strategy=placement, **kinds
        )
    except ValueError as error:
        raise ConfigError(f"{workers} workers with {_amounts(resources)} each: Ray says: {error}") from None


def sizes(workers: int, fewest: int | None) -> list[int]:
    """The numbers of workers that a run may have, the wanted one first; any of them trains any batch size."""
    return [workers, *range(workers - 1, max(fewest or workers, 1) - 1, -1)]


def capacity(nodes: Iterable[Mapping[str, Any]], resources: Mapping[str, float]) -> int:
    """How many workers the living nodes of a cluster could hold if they had nothing else to do."""
    return sum(
        min(int(node["Resources"].get(name, 0.0) // amount) for name, amount in resources.items())
        for node in nodes
        if node["Alive"]
    )


def find(config: RunConfig, wanted: Sequence[int], resources: Mapping[str, float], limit: float | None = None) -> int:
    """The first of these numbers of workers that the cluster places; an error that says what is free where none is."""
    settings = config.launch.ray
    limit = settings.placement_timeout if limit is None else limit
    if _placed(wanted[0], resources, settings.placement, min(limit, _AT_ONCE_SECONDS)):
        return wanted[0]
    if limit > _AT_ONCE_SECONDS:
        print(
            f"lockstep: waiting for room for {_asked(wanted[0], resources, settings.placement)}; {_free(resources)}",
            file=sys.stderr,
            flush=True,
        )
        if _placed(wanted[0], resources, settings.placement, limit - _AT_ONCE_SECONDS):
            return wanted[0]
    for size in wanted[1:]:
        if _placed(size, resources, settings.placement, _AT_ONCE_SECONDS):
            print(
                f"lockstep: there is room for {size} of {wanted[0]} workers: going on with {size}",
                file=sys.stderr,
                flush=True,
            )
            return size
    raise LaunchError(
        f"launch.ray: the cluster has no room for {_asked(wanted[-1], resources, settings.placement)} in {limit:g} s "
        f"(launch.ray.placement_timeout): {_free(resources)}. Lower processes or launch.ray.resources, choose another "
        "launch.ray.placement, or wait until others are done"
    )


def _placed(workers: int, resources: Mapping[str, float], strategy: str, limit: float) -> bool:
    """Ask the cluster itself: it knows what is free where, and may grow when it is asked."""
    group = placement_group([dict(resources)] * workers, strategy=strategy)
    try:
        return bool(group.wait(timeout_seconds=max(limit, 0.1)))
    finally:
        remove_placement_group(group)


def _asked(workers: int, resources: Mapping[str, float], strategy: str) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''} with {_amounts(resources)} each ({strategy})"


def _free(resources: Mapping[str, float]) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    amounts = ", ".join(f"{name} {free.get(name, 0):g} of {total.get(name, 0):g}" for name in resources)
    return f"free are {amounts}, on {nodes} node{'s' if nodes > 1 else ''}"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
