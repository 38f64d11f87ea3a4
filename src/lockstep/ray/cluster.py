"""The Ray cluster of a run: connects to one, or starts a small one that ends with the run; and who may use it.

Whoever reaches a cluster without authentication runs what they like there, as its owner.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import ray
from ray._private import services

from lockstep.config.objects import EXCLUDED, require_travelling
from lockstep.config.schema import RayCluster, RunConfig
from lockstep.errors import ConfigError, LaunchError
from lockstep.ray.installed import address_of
from lockstep.ray.placement import LOOPBACK
from lockstep.runtime import with_variables

raylet: Any = importlib.import_module("ray._raylet")

_OBJECT_STORE_BYTES = 128 * 1024 * 1024  # tensors do not go through it
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PROBE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_PROBE_SECONDS = 15.0


@dataclass(frozen=True)
class Cluster:
    address: str
    ours: bool  # started for this run on this machine, reachable from nowhere else, and ended with the run


@contextlib.contextmanager
def connected(
    settings: RayCluster, workers: int, resources: Mapping[str, float], runtime_env: Mapping[str, Any]
) -> Iterator[Cluster]:
    """Connects to the cluster that the settings name, or starts one for so many workers. Disconnects at the end."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(settings))
        if ray.is_initialized():  # by the user's program
            yield Cluster(ray.get_runtime_context().gcs_address, ours=False)
            return
        address = address_of(settings)
        if address is None:
            token = stack.enter_context(asking_for_tokens(settings.insecure))
            total = {name: math.ceil(amount * workers) for name, amount in resources.items()}
            cluster = _start(total, dict(runtime_env))
            alone = cluster.address.startswith(LOOPBACK)
            where = "on 127.0.0.1 alone" if alone else "at all addresses of this host"
            who = (
                "who reaches it (launch.ray.insecure)"
                if settings.insecure
                else f"who has the token in {token or _TOKEN}"
            )
            click.echo(f"lockstep: a Ray cluster was started for this run; it listens {where}, to {who}", err=True)
        else:
            cluster = _connect(address, dict(runtime_env), settings.insecure)
        try:
            yield cluster
        finally:
            with contextlib.redirect_stdout(io.StringIO()):  # it repeats what it printed before
                ray.shutdown()


def environment(settings: RayCluster) -> contextlib.AbstractContextManager[None]:
    """Sets the variables that Ray reads in the process that starts a training, unless the user has set them."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",  # a training run does not call home
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in the task's folder
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # what a task prints comes to the terminal through the mailbox
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # a report waits for this, and so does the end of a run
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # which prints a line for every report
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray warns about its future otherwise
    }
    changed = {name: value for name, value in wanted.items() if name not in os.environ}
    changed["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{settings.placement_timeout:g}"  # of a restart, too
    return with_variables(changed)


def _start(total: Mapping[str, float], runtime_env: dict[str, Any]) -> Cluster:
    custom = {name: amount for name, amount in total.items() if name not in ("CPU", "GPU", "memory")}
    optional = {"num_gpus": total.get("GPU"), "_memory": total.get("memory")}
    try:
        with kept_to_loopback():
            ray.init(
                address="local",
                num_cpus=int(total.get("CPU", 1)),
                resources=custom or None,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                runtime_env=runtime_env or None,
                _node_ip_address=LOOPBACK,
                **{name: int(amount) for name, amount in optional.items() if amount is not None},
                **_QUIET,
            )
    except (RuntimeError, OSError, ValueError) as error:
        raise LaunchError(f"launch.ray: a cluster could not be started on this machine: {_reason(error)}") from None
    return Cluster(ray.get_runtime_context().gcs_address, ours=True)


def _connect(address: str, runtime_env: dict[str, Any], insecure: bool) -> Cluster:
    named = address.rpartition(":")[2].isdigit()
    if named:  # before any of the user's code goes there
        require_authentication(address, insecure)
    try:
        ray.init(address=address, runtime_env=runtime_env or None, **_QUIET)
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


def _reason(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# Who may use it


def require_authentication(address: str, insecure: bool) -> None:
    """Raises LaunchError for a cluster that asks nobody for a token, unless the config allows it."""
    if not insecure and asks_for_a_token(address) is False:
        raise LaunchError(
            f"launch.ray.address: the Ray cluster at {address} asks nobody for a token, so that whoever reaches it can "
            "run anything there, on this run's workers too. Start it with RAY_AUTH_MODE=token ("
            "`ray get-auth-token --generate`), or set launch.ray.insecure: true where its network keeps others out"
        )


def asks_for_a_token(address: str) -> bool | None:
    """Whether a cluster refuses a call without a token; None if that cannot be found out here."""
    try:
        import grpc
    except ImportError:
        # A process without a token that was let in knows.
        return None if raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN else False
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(_PROBE)(b"", timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            return None if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) else False
    return False


@contextlib.contextmanager
def asking_for_tokens(insecure: bool) -> Iterator[Path | None]:
    """Has a cluster that is started within ask for a token that only this user can read; yields its file, if any."""
    if insecure:
        yield None
        return
    if os.environ.get(_MODE, "token").lower() != "token":
        raise LaunchError(
            f"launch.ray: {_MODE}={os.environ[_MODE]} in the environment: every user of this machine could run "
            "anything in a cluster that is started for this run. Unset it, or set launch.ray.insecure: true"
        )
    file = Path(os.environ.get(_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    token = None if os.environ.get(_TOKEN) else private_token(file)
    with with_variables({_MODE: "token"}):
        raylet.Config.initialize("")  # which read the variable when Ray was imported
        yield token


def private_token(file: Path) -> Path:
    """Creates a token that nobody else can read: Ray itself creates one as the umask says."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            status = file.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise LaunchError(f"launch.ray: {file}: is not this user's; remove it, or set {_TOKEN_PATH}") from None
            if status.st_mode & 0o077:
                file.chmod(0o600)
        else:
            with os.fdopen(made, "w") as opened:
                opened.write(secrets.token_hex(32))
    except OSError as error:
        raise LaunchError(f"launch.ray: {file}: no token for Ray can be kept there: {error.strerror}") from None
    return file


@contextlib.contextmanager
def kept_to_loopback() -> Iterator[None]:
    """Has Ray listen at 127.0.0.1 when asked to: it would replace it by another address of this host."""
    found = getattr(services, "resolve_ip_for_localhost", None)
    if found is None:
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = found


# The task's code


def runtime_env(config: RunConfig) -> tuple[dict[str, Any], str]:
    """Returns Ray's runtime_env, in which the task's folder or the user's working_dir travels, and the task's name
    there."""
    given = dict(config.launch.ray.runtime_env)
    module, _, name = config.task.type.rpartition(":") if ":" in config.task.type else config.task.type.rpartition(".")
    if not module.endswith(".py"):
        require_travelling(config.task)
        return given, config.task.type  # a module that is installed, or comes by the user's py_modules
    file = Path(module)
    if "working_dir" in given:
        folder = Path(str(given["working_dir"])).expanduser().resolve()
        if not file.is_relative_to(folder):
            raise ConfigError(
                f"launch.ray.runtime_env.working_dir: the task's file {file} is not in {folder}, so it would not "
                "travel to the workers; leave working_dir out and the task's folder travels"
            )
        return given, f"{file.relative_to(folder)}:{name}"
    excludes = [*EXCLUDED, *given.pop("excludes", [])]
    return {**given, "working_dir": str(file.parent), "excludes": excludes}, f"{file.name}:{name}"


def described_env(env: Mapping[str, Any]) -> str:
    """Says what travels, without the values of variables, which may be secrets."""
    parts = [f"{name} {value}" for name, value in env.items() if name in ("working_dir", "pip", "uv", "conda")]
    if "env_vars" in env:
        parts.append(f"variables {', '.join(sorted(env['env_vars']))}")
    return "; ".join(parts)
