"""Who may use a cluster: whoever reaches one without authentication runs what they like there, as its owner."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from lockstep.errors import LaunchError
from lockstep.runtime import with_variables

raylet: Any = importlib.import_module("ray._raylet")

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_PROBE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_PROBE_SECONDS = 15.0


def require_authentication(address: str, insecure: bool) -> None:
    """Refuse a cluster that takes orders from anybody, unless the config says that it may be used."""
    if not insecure and asks_for_a_token(address) is False:
        raise LaunchError(
            f"launch.ray.address: the Ray cluster at {address} asks nobody for a token, so that whoever reaches it can "
            "run anything there, on this run's workers too. Start it with RAY_AUTH_MODE=token (Ray 2.52 and later; "
            "`ray get-auth-token --generate`), or set launch.ray.insecure: true where its network keeps others out"
        )


def asks_for_a_token(address: str) -> bool | None:
    """Whether a cluster refuses who has no token: asked without one. None where that cannot be found out here."""
    try:
        import grpc
    except ImportError:
        # Who has no token himself and was let in knows.
        return None if _uses_tokens() else False
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
    """A cluster that is started within asks for a token that this user alone can read; yields its file, if any."""
    if insecure:
        yield None
        return
    if not _has_tokens():
        raise LaunchError(
            f"launch.ray: Ray {ray.__version__} has no authentication: every user of this machine could run anything "
            "in a cluster that is started for this run. Install Ray 2.52 or later, or set launch.ray.insecure: true"
        )
    if os.environ.get(_MODE, "token").lower() != "token":
        raise LaunchError(
            f"launch.ray: {_MODE}={os.environ[_MODE]} in the environment: every user of this machine could run "
            "anything in a cluster that is started for this run. Unset it, or set launch.ray.insecure: true"
        )
    file = None if os.environ.get(_TOKEN) else private_token(_token_file())
    with with_variables({_MODE: "token"}):
        raylet.Config.initialize("")  # which read the variable when Ray was imported
        yield file


def private_token(file: Path) -> Path:
    """A token for this user's clusters that nobody else can read: Ray itself makes one as the umask says."""
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
    """Have Ray listen at 127.0.0.1 where it is told to: it would take another address of this host for it."""
    found = getattr(services, "resolve_ip_for_localhost", None)
    if found is None:
        yield
        return
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = found


def _token_file() -> Path:
    return Path(os.environ.get(_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")


def _has_tokens() -> bool:
    return hasattr(raylet, "AuthenticationTokenLoader")


def _uses_tokens() -> bool:
    return _has_tokens() and bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)
