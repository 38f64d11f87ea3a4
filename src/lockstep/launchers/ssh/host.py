"""Answers one command on a host of a pod: `python -P -m lockstep.launchers.ssh.host VERB JSON`.

It answers in JSON on standard output, or follows a console. It imports no torch, and each verb imports what only it
needs: most of the time of a short answer is the start of Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError, LockstepError
from lockstep.launchers.ssh.code import pack_run, unpack
from lockstep.launchers.ssh.folder import Job, PodFolder
from lockstep.launchers.ssh.ssh import CONSOLE, encoded
from lockstep.version import installed, version_of

# How long an agent may take to say that it is at work: a bucket whose writer died is waited for, for a minute.
_BEGIN_SECONDS = 150.0
# How long the container of an agent may take to appear.
_APPEAR_SECONDS = 20.0
_POLL_SECONDS = 0.1
_CHUNK = 64 * 1024
_SIOCGIFADDR = 0x8915


def inspect(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns what is to be known of this host before a run."""
    if asked.get("make"):  # what is copied here next needs a place
        with contextlib.suppress(OSError):
            folder.make()
    existing = next(each for each in (folder.path, *folder.path.parents) if each.is_dir())
    job = folder.newest_job()
    address, claimed = network_address(asked.get("network")), None
    with contextlib.suppress(OSError):  # the folder cannot be written, which is a problem by itself
        claimed = folder.claim(asked["claim"]) if asked.get("claim") else None
    return {
        "lockstep": installed(),
        "torch": version_of("torch"),
        "host": os.uname().nodename,
        "address": address,
        "addresses": sorted(interfaces().values()),
        "port": _free_port(address) if address else None,
        "writable": os.access(existing, os.W_OK),
        "path": str(folder.path),
        "running": job.name if job is not None and job.is_alive else None,
        "devices": _devices(asked.get("config")),
        "claimed": claimed,
        "saved": any(Path(asked["folder"]).glob("checkpoints/step-*")) if asked.get("folder") else None,
    }


def release(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Releases the claim of a job that was not started."""
    folder.release(str(asked["job"]))
    return {}


def push(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Unpacks the code that was copied here."""
    folder.make()
    unpack(folder.archive, folder.code)
    folder.archive.unlink(missing_ok=True)
    return {}


def prepare(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Unpacks the code and the order that were copied here."""
    from lockstep.launchers.ssh.record import Order  # and with it all of the config

    before = folder.newest_job()
    if before is not None and before.is_alive:
        raise LaunchError(f"job {before.name} is still at work here: `lockstep pod stop` has it save and leave")
    folder.make()
    order = Order.model_validate_json(unpack(folder.archive, folder.code))
    order = order.model_copy(update={"index": int(asked["index"])})
    folder.archive.unlink(missing_ok=True)
    job = folder.job(order.job)
    if job.stop.exists():
        raise LaunchError(f"job {job.name} was stopped before it began")
    job.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(job.order, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(order.model_dump_json())
    return {"job": job.name}


def start(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Prepares, and starts the agent of the order, detached from this login."""
    import subprocess

    from lockstep.distributed.topology import without_place

    job = folder.job(prepare(folder, asked)["job"])
    inherited = without_place(os.environ)
    for name in ("SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"):  # of this login, which ends
        inherited.pop(name, None)
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep.launchers.ssh.agent", str(job.path)], cwd=folder.code, env=inherited,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    return _begun(folder, job, lambda: agent.poll() is None)


def begun(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Waits for the agent of a job that a container runs."""
    job = _job(folder, asked)
    deadline = time.monotonic() + _APPEAR_SECONDS
    return _begun(folder, job, lambda: job.is_alive or time.monotonic() < deadline)


def _begun(folder: PodFolder, job: Job, is_there: Callable[[], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + _BEGIN_SECONDS
    while job.agent() is None:
        if not is_there() and job.agent() is None:
            said = job.console.read_text(encoding="utf-8", errors="replace").strip() if job.console.exists() else ""
            raise LaunchError(f"the agent could not begin: {said[-2000:] or 'it said nothing'}")
        if time.monotonic() > deadline:
            raise LaunchError(f"the agent did not begin within {_BEGIN_SECONDS:g} s; see {job.console}")
        time.sleep(_POLL_SECONDS)
    folder.release(job.name)  # from here on, that it is at work keeps others out
    return {"job": job.name, **(job.agent() or {})}


def follow(folder: PodFolder, asked: dict[str, Any]) -> int:
    """Prints the agent's console from an offset on until the run ends, and returns the exit code of the run.

    The code is printed, too: what ends without it was cut off.
    """
    job = _job(folder, asked)
    out, code = sys.stdout.buffer, None
    with job.console.open("rb") as console:
        out.write(CONSOLE)
        console.seek(int(asked.get("offset", 0)))
        while code is None:
            alive = job.is_alive  # before the last look: what it wrote in its last moment is seen
            while data := console.read(_CHUNK):
                out.write(data)
            ended = job.ended()
            if ended is not None and not alive:
                out.write(job.unsaid().encode())
                code = int(ended["exit_code"])
            elif not alive and job.agent() is not None:
                out.write(f"lockstep: the agent on {os.uname().nodename} ended without a message: it was killed, "
                          "or the host was restarted\n".encode())  # fmt: skip
                code = 5
            elif not asked.get("follow", True):
                code = 0
            else:
                out.flush()
                time.sleep(_POLL_SECONDS)
        out.write(encoded({"exit_code": code}).encode())
        out.flush()
    return code


def ps(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    job = folder.newest_job()
    if job is None:
        return {"job": None}
    return {"job": job.name, "alive": job.is_alive, "pid": job.pid(), **(job.ended() or {})}


def look(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    from lockstep.config.plain import finite
    from lockstep.runs.watching import look

    found = finite(look(Path(str(asked["run"]))).plain())
    assert isinstance(found, dict)
    return found


def stop(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Asks the job to save and leave, or to end at once; one that has not begun does not begin."""
    import signal

    job = folder.job(str(asked["job"])) if asked.get("job") else _job(folder, asked)
    job.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    job.stop.touch()
    pid = job.pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if asked.get("at_once") else signal.SIGTERM)
    return {"job": job.name, "pid": pid}


def pack(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    """Prints what this host has of a run as an archive; without `everything`, only its logs and profiles."""
    run = Path(str(asked["run"]))
    size = pack_run(run, bool(asked["everything"]), sys.stdout.buffer) if run.is_dir() else None
    sys.stdout.flush()
    return {"size": size}


def delete(folder: PodFolder, asked: dict[str, Any]) -> dict[str, Any]:
    import shutil

    job = folder.newest_job()
    if job is not None and job.is_alive:
        raise LaunchError(f"job {job.name} is still at work here: `lockstep pod stop` it first")
    shutil.rmtree(folder.path, ignore_errors=True)
    return {"deleted": not folder.path.exists()}


_VERBS: tuple[Callable[[PodFolder, dict[str, Any]], dict[str, Any] | int], ...] = (
    inspect, release, push, prepare, start, begun, follow, ps, look, stop, pack, delete,
)  # fmt: skip
VERBS = {verb.__name__: verb for verb in _VERBS}


def main(arguments: list[str]) -> int:
    verb, text = arguments
    asked = json.loads(text)
    try:
        folder = PodFolder(asked["directory"], asked["pod"])
        answer = VERBS[verb](folder, asked)
    except (LockstepError, OSError) as error:
        print(encoded({"error": str(error)}))
        return 2
    if isinstance(answer, int):
        return answer
    print(encoded(answer))
    return 0


def _job(folder: PodFolder, asked: dict[str, Any]) -> Job:
    job = folder.job(str(asked["job"])) if asked.get("job") else folder.newest_job()
    if job is None or not job.path.is_dir():
        raise LaunchError(f"no job was started here: {folder.path} has none")
    return job


def _devices(config: dict[str, Any] | None) -> dict[str, Any] | None:
    if config is None:
        return None
    from lockstep import runtime
    from lockstep.config.schema import RunSettings

    try:
        family, count = runtime.resolve(RunSettings.model_validate(config))
    except LockstepError as error:
        return {"error": str(error)}
    return {"runtime": family, "processes": count}


def interfaces() -> dict[str, str]:
    """Returns the IPv4 addresses of this host by interface; on Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def network_address(network: str | None) -> str:
    """Returns this host's address in a network, or else the one that the login came to."""
    mine = interfaces().values()
    if network is not None:
        import ipaddress

        wanted = ipaddress.ip_network(network, strict=False)
        inside = [each for each in mine if ipaddress.ip_address(each) in wanted]
        return inside[0] if inside else ""
    login = os.environ.get("SSH_CONNECTION", "").split()
    if len(login) == 4 and login[2] in mine:
        return login[2]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it finds the address of the default route
        return str(probe.getsockname()[0])
    return next((each for each in mine if not each.startswith("127.")), "127.0.0.1")


def interface_of(address: str) -> str | None:
    return next((name for name, each in interfaces().items() if each == address), None)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
