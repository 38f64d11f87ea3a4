"""Commands for docker on a host: to run something in the pod's container, to look at it, and to stop it.

All of them are argument lists. A variable is passed by its name, so that its value is in the environment of docker and
on no command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lockstep.config.pod import Container, Pod
from lockstep.errors import ConfigError

_TPU = {"PJRT_DEVICE": "TPU"}


def run(
    pod: Pod,
    argv: Sequence[str],
    *,
    workdir: str,
    variables: Sequence[str] = (),
    env_file: str | None = None,
    detached: bool = False,
    named: bool = True,
) -> list[str]:
    """Run a command in a new container, which goes away with it.

    Args:
        workdir: the working directory, where the config names none.
        variables: names of variables that docker has in its own environment, and the command gets.
        env_file: a file of the host with such variables and their values (see `env_lines`), for its owner alone.
        named: by the container's name, which one can have at a time; else by any, beside that one.
        detached: come back at once; else signals go to the command, and its exit status comes back.
    """
    container = _of(pod)
    values = {**_TPU, **container.env} if pod.type == "gcloud" else container.env
    passed = [name for name in dict.fromkeys(variables) if name not in values]
    return [
        *_docker(container, passed), "run",
        *(["-d"] if detached else []),
        *([f"--name={container.name}"] if named else []), "--rm",
        *(["--privileged"] if container.privileged else []),
        f"--net={container.network}", f"--ipc={container.ipc}",
        *(part for name, value in values.items() for part in ("-e", f"{name}={value}")),
        *(part for name in passed for part in ("-e", name)),
        *([f"--env-file={env_file}"] if env_file else []),
        *(part for mount in container.mounts for part in ("-v", mount)),
        "-w", container.workdir or workdir,
        container.image, *argv,
    ]  # fmt: skip


def env_lines(values: Mapping[str, str]) -> str:
    """What a file for `env_file` has in it."""
    several = [name for name, value in values.items() if "\n" in value or "\0" in value]
    if several:
        raise ConfigError(f"pod.env: the value of {several[0]} has several lines, which docker cannot pass on")
    return "".join(f"{name}={value}\n" for name, value in values.items())


def inside(pod: Pod, argv: Sequence[str]) -> list[str]:
    """Run a command in the container that is running."""
    container = _of(pod)
    return [*_docker(container), "exec", container.name, *argv]


def stop(pod: Pod, grace: float) -> list[str]:
    """Ask what is in the container to save and leave (SIGTERM), and end it where it has not after `grace` seconds."""
    container = _of(pod)
    # By its letter: newer versions of docker call the long form --timeout, older ones --time.
    return [*_docker(container), "stop", "-t", str(max(1, round(grace))), container.name]


def remove(pod: Pod) -> list[str]:
    """End the container at once, and forget it: for what a host that lost its power left behind."""
    container = _of(pod)
    return [*_docker(container), "rm", "-f", container.name]


def ps(pod: Pod) -> list[str]:
    """All containers of a host, as a table."""
    return [*_docker(_of(pod)), "ps", "-a"]


def running(pod: Pod) -> list[str]:
    """Print the id of the pod's container while it is running, and nothing otherwise."""
    container = _of(pod)
    return [*_docker(container), "ps", "--quiet", f"--filter=name=^{re.escape(container.name)}$"]


def _of(pod: Pod) -> Container:
    assert pod.container is not None, "only a pod with a container has commands for one"
    return pod.container


def _docker(container: Container, preserved: Sequence[str] = ()) -> list[str]:
    if not container.sudo:
        return ["docker"]
    # Never asks for a password, since nobody could answer; and keeps of the environment what was named.
    return ["sudo", "-n", *([f"--preserve-env={','.join(preserved)}"] if preserved else []), "docker"]
