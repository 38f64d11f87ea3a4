"""Cloud TPU VMs through gcloud: every command as an argument list, and what to do where one fails.

gcloud hands `--command` to the shell of the user on every worker, so it is quoted for that shell. It uses an SSH key of
its own (~/.ssh/google_compute_engine); no agent is forwarded.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.config.pod import Pod, pod_name
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh.gcloud_errors import explained
from lockstep.launchers.ssh.transport import Command
from lockstep.shown import brief

_TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
_PROVISIONING = {"spot": ["--spot"], "reserved": ["--reserved"], "on-demand": []}

ONE_WORKER = (
    "this runs on one worker alone. A call of PyTorch/XLA there may hang: it waits for the other workers. Look at "
    "files and processes in this way, and run what uses the TPU on all workers"
)
NEW_HOST_KEYS = (
    "gcloud trusts the key that a new host shows on the first connection, and insists on it from then on; set "
    "pod.host_keys: known to be asked for keys that are known already"
)


@dataclass(frozen=True)
class Gcloud:
    """A Cloud TPU by its name; see Transport."""

    name: str
    pod: Pod
    startup_script: Path | None = None  # of startup.script, for `create`

    def __post_init__(self) -> None:
        try:
            pod_name(self.name)
        except ValueError as error:
            raise ConfigError(f"{brief(self.name)!r} is {error}") from None
        if self.pod.type != "gcloud":
            raise ConfigError("pod.type is ssh: set pod.type: gcloud, with pod.accelerator_type, for a Cloud TPU")

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"worker {number}" for number in range(self.pod.accelerator.hosts))

    def create(self) -> list[Command]:
        pod, script = self.pod, self.startup_script
        return [
            self._command(
                "create", self.name,
                *_PROVISIONING[pod.provisioning],
                f"--accelerator-type={pod.accelerator_type}",
                f"--version={pod.version}",
                *([f"--metadata-from-file=startup-script={_in_a_list(script)}"] if script else []),
                *([f"--network={pod.network}"] if pod.network else []),
                *([f"--service-account={pod.service_account}"] if pod.service_account else []),
            )
        ]  # fmt: skip

    def delete(self, *, asynchronous: bool = False) -> list[Command]:
        return [self._command("delete", self.name, *(["--async"] if asynchronous else []), "--quiet")]

    def start(self) -> list[Command]:
        """Start hosts that were stopped: their disks are as they were."""
        return [self._command("start", self.name)]

    def describe(self) -> list[Command]:
        """Print what `state` reads."""
        return [self._command("describe", self.name, "--format=json")]

    def listing(self) -> list[Command]:
        """All Cloud TPUs of the zone, as a table."""
        return [self._command("list")]

    def run(self, argv: Sequence[str], worker: int | None = None) -> list[Command]:
        """One command for all workers at once, whose outputs come mixed; give a worker to know whose it is."""
        if not argv or argv[0].startswith("-"):
            raise ConfigError(f"not a command to run on a worker: {brief(shlex.join(argv))!r}")
        if any("\0" in argument for argument in argv):
            raise ConfigError("an argument of a command cannot have a zero byte in it")
        options = [f"--worker={self._worker(worker)}", f"--command={shlex.join(argv)}"]
        return [self._command("ssh", self._target, *self._host_keys, *options, worker=worker)]

    def copy(self, file: Path, to: str, worker: int | None = None) -> list[Command]:
        where = f"{self._target}:{_remote(to)}"
        options = [*self._host_keys, f"--worker={self._worker(worker)}"]
        return [self._command("scp", *options, _local(file), where, worker=worker)]

    def fetch(self, path: str, to: Path, worker: int) -> list[Command]:
        where = f"{self._target}:{_remote(path)}"
        options = [*self._host_keys, f"--worker={self._worker(worker)}"]
        return [self._command("scp", *options, where, _local(to), worker=worker)]

    def explain(self, command: Command, code: int, errors: str) -> str:
        return explained(self.name, self.pod, command, code, errors)

    @property
    def _target(self) -> str:
        return f"{self.pod.user}@{self.name}" if self.pod.user else self.name

    @property
    def _host_keys(self) -> list[str]:
        return ["--strict-host-key-checking=yes"] if self.pod.host_keys == "known" else []

    def _worker(self, worker: int | None) -> str:
        if worker is None:
            return "all"
        if not 0 <= worker < len(self.workers):
            raise ConfigError(
                f"there is no worker {worker}: {self.pod.accelerator}, so that the last is {len(self.workers) - 1}"
            )
        return str(worker)

    def _command(self, verb: str, *arguments: str, worker: int | None = None) -> Command:
        pod = self.pod
        where = [*([f"--zone={pod.zone}"] if pod.zone else []), *([f"--project={pod.project}"] if pod.project else [])]
        return Command((*_TPU_VM, verb, *arguments, *where), worker)


def require_gcloud() -> None:
    """Before anything else is done for a Cloud TPU."""
    if shutil.which("gcloud") is None:
        raise LaunchError(
            "gcloud is not installed, or not on the PATH: a pod of type gcloud is reached by it. Install the Google "
            "Cloud CLI, run `gcloud init`, and try again; --dry-run works without it"
        )


Step = Literal["use", "wait", "start", "recreate"]
_STEPS: dict[str, Step] = {
    "READY": "use",
    **dict.fromkeys(("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING", "UNHIDING"), "wait"),
    **dict.fromkeys(("STOPPING", "DELETING", "HIDING", "HIDDEN", "UNKNOWN", "STATE_UNSPECIFIED"), "wait"),
    "STOPPED": "start",
    # A spot TPU that was taken away stays in the list until it is deleted, and never comes back by itself. Nothing
    # else is deleted: its disks may have what nobody has copied.
    "PREEMPTED": "recreate",
    "TERMINATED": "recreate",
}


def state(described: str) -> str:
    """The state of a Cloud TPU, from what `describe` printed."""
    try:
        found = json.loads(described)["state"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = None
    if not isinstance(found, str) or found not in _STEPS:
        raise LaunchError(f"gcloud did not say what state the pod is in, but {brief(described.strip())!r}")
    return found


def next_step(state: str) -> Step:
    """What a pod in this state needs before a run can go on there."""
    return _STEPS[state]


def _local(file: Path) -> str:
    text = str(file)
    # What has a colon is a path on some host to scp.
    if ":" in text or not text.isprintable():
        raise ConfigError(f"{brief(text)!r} cannot be copied by gcloud: its name has a colon, or a control character")
    return f"./{text}" if text.startswith("-") else text


def _remote(path: str) -> str:
    # Some versions of scp have the path read by a shell on the host, where nothing else is safe.
    if not re.fullmatch(r"[\w./+=@%-]+", path, re.ASCII):
        raise ConfigError(
            f"{brief(path)!r} cannot be a path on the hosts of a pod: use letters, digits and . _ - + = @ % alone"
        )
    return path


def _in_a_list(file: Path) -> str:
    text = str(file)
    # The option takes a list of KEY=FILE, with commas between; a leading ^ would change what is between.
    if "," in text or "^" in text or not text.isprintable():
        raise ConfigError(f"the start-up script cannot be at {brief(text)!r}: gcloud takes no comma and no ^ in it")
    return text
