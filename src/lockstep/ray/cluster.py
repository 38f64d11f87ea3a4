"""The cluster that a run uses: one that runs already, or a small one of our own that ends with the run."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from lockstep.config.schema import RunConfig
from lockstep.errors import LaunchError
from lockstep.ray.access import asking_for_tokens, asks_for_a_token, kept_to_loopback, require_authentication
from lockstep.ray.address import address_of
from lockstep.ray.placement import LOOPBACK
from lockstep.runtime import with_variables

# Tensors do not go through Ray's object store: words and numbers do.
_OBJECT_STORE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Cluster:
    """What a run needs to know of the cluster it is on."""

    address: str
    ours: bool  # started for this run on this machine, reachable from nowhere else, and ended with the run


@contextlib.contextmanager
def connected(config: RunConfig, resources: Mapping[str, float], runtime_env: Mapping[str, Any]) -> Iterator[Cluster]:
    """Connect to the cluster of a config, or start one of the run's size; leave, or end it, at the end."""
    if ray.is_initialized():  # by a program of the user's own
        with environment(config):
            yield Cluster(ray.get_runtime_context().gcs_address, ours=False)
        return
    address = address_of(config.launch.ray)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    insecure = config.launch.ray.insecure
    tokens = contextlib.nullcontext() if address else asking_for_tokens(insecure)
    with environment(config), tokens as token:
        if address is None:
            cluster = _start(_total(int(config.processes), resources), dict(runtime_env), quiet)
            print(f"lockstep: {listens(cluster, token)}", file=sys.stderr, flush=True)
        else:
            cluster = _connect(address, dict(runtime_env), quiet, insecure)
        try:
            yield cluster
        finally:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints once more what it had to say
                ray.shutdown()


def _total(workers: int, resources: Mapping[str, float]) -> dict[str, float]:
    """What a cluster of our own must have."""
    return {name: math.ceil(amount * workers) for name, amount in resources.items()}


def _start(total: Mapping[str, float], runtime_env: dict[str, Any], quiet: dict[str, Any]) -> Cluster:
    custom = {name: amount for name, amount in total.items() if name not in ("CPU", "GPU", "memory")}
    accelerators = {"num_gpus": int(total["GPU"])} if "GPU" in total else {}
    try:
        with kept_to_loopback():
            ray.init(
                address="local",
                num_cpus=int(total.get("CPU", 1)),
                resources=custom or None,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                runtime_env=runtime_env or None,
                _node_ip_address="127.0.0.1",  # nobody but this machine has to reach it
                **({"_memory": int(total["memory"])} if "memory" in total else {}),
                **accelerators,
                **quiet,
            )
    except (RuntimeError, OSError, ValueError) as error:
        raise LaunchError(f"launch.ray: a cluster could not be started on this machine: {_reason(error)}") from None
    return Cluster(ray.get_runtime_context().gcs_address, ours=True)


def listens(cluster: Cluster, token: Path | None) -> str:
    """What is true of who can reach a cluster of our own, and use it."""
    host = cluster.address.rpartition(":")[0]
    where = "on 127.0.0.1 alone" if host == LOOPBACK else f"at all addresses of this host (the node is {host})"
    who = f"to who has the token in {token}" if token else "to who has the token in RAY_AUTH_TOKEN"
    if not asks_for_a_token(cluster.address):
        who = "to every process that reaches it (launch.ray.insecure)"
    return f"a Ray cluster was started for this run; it listens {where}, {who}"


def _connect(address: str, runtime_env: dict[str, Any], quiet: dict[str, Any], insecure: bool) -> Cluster:
    named = address.rpartition(":")[2].isdigit()
    if named:  # before any code of the user's goes there
        require_authentication(address, insecure)
    try:
        ray.init(address=address, runtime_env=runtime_env or None, **quiet)
    except ValueError as error:  # a runtime_env that Ray does not take
        raise LaunchError(f"launch.ray.runtime_env: {_reason(error)}") from None
    except (ConnectionError, RuntimeError, OSError) as error:
        raise LaunchError(
            f"launch.ray.address: there is no Ray cluster to be used at {address!r}: {_reason(error)}. Start one with "
            "`ray start --head`, correct the address, or leave it out to train on this machine"
        ) from None
    if not named:
        try:
            require_authentication(ray.get_runtime_context().gcs_address, insecure)
        except LaunchError:
            ray.shutdown()
            raise
    return Cluster(address, ours=False)


def environment(config: RunConfig) -> contextlib.AbstractContextManager[None]:
    """Variables that Ray reads in the process that starts a training, unless the user has set them: see each."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",  # a training run does not call home
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the task's folder
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what a task prints comes to the terminal by our own way
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # a report waits for this, and so does the end of a run
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # nor is every report a line on it
        "RAY_AIR_NEW_OUTPUT": "0",  # a sweep has a table of our own
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns about its own future otherwise
    }
    changed = {name: value for name, value in wanted.items() if name not in os.environ}
    changed["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{config.launch.ray.placement_timeout:g}"  # of a restart, too
    return with_variables(changed)


def _reason(error: BaseException) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
