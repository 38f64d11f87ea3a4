"""The commands of gcloud for Cloud TPU VMs, why they fail, and the start-up script of their hosts.

gcloud passes `--command` to the user's shell on every worker, so it is quoted for that shell. gcloud has an SSH key
(~/.ssh/google_compute_engine) and forwards no agent.
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

from lockstep.config.pod import Bucket, Pod, pod_name
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh.ssh import Command, Ssh
from lockstep.shown import brief, in_a_line

_TPU_VM = ("gcloud", "compute", "tpus", "tpu-vm")
_PROVISIONING = {"spot": ["--spot"], "reserved": ["--reserved"], "on-demand": []}

STATE = "/var/lib/lockstep"
_SOURCE = "https://packages.cloud.google.com/apt"
_KEYRING = "/usr/share/keyrings/cloud.google.asc"
_LIST = "/etc/apt/sources.list.d/gcsfuse.list"
# A host that has just started often updates itself, and holds this lock meanwhile.
_APT = "apt-get -o DPkg::Lock::Timeout=300"

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
    """A Cloud TPU, by its name. Like Ssh, every method returns the commands to run, and runs nothing."""

    name: str
    pod: Pod
    startup_script: Path | None = None  # for `create`

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
                *([f"--metadata-from-file=startup-script={script}"] if script else []),
                *([f"--network={pod.network}"] if pod.network else []),
                *([f"--service-account={pod.service_account}"] if pod.service_account else []),
            )
        ]  # fmt: skip

    def delete(self) -> list[Command]:
        return [self._command("delete", self.name, "--quiet")]

    def start(self) -> list[Command]:
        """Starts hosts that were stopped, with their disks as they were."""
        return [self._command("start", self.name)]

    def describe(self) -> list[Command]:
        return [self._command("describe", self.name, "--format=json")]

    def run(self, argv: Sequence[str], worker: int | None = None) -> list[Command]:
        """Without a worker, one command runs on all of them at once, and their outputs come mixed."""
        if not argv or argv[0].startswith("-"):
            raise ConfigError(f"not a command to run on a worker: {brief(shlex.join(argv))!r}")
        options = [f"--worker={self._worker(worker)}", f"--command={shlex.join(argv)}"]
        return [self._command("ssh", self._target, *self._host_keys, *options, worker=worker)]

    def copy(self, file: Path, to: str, worker: int | None = None) -> list[Command]:
        where = f"{self._target}:{_remote(to)}"
        return [
            self._command("scp", *self._host_keys, f"--worker={self._worker(worker)}", str(file), where, worker=worker)
        ]

    def explain(self, command: Command, code: int, errors: str) -> str:
        """Returns what was tried and where, the cause and its remedy, and the last lines of the output."""
        where = "" if command.worker is None else f" on worker {command.worker}"
        tried = f"`{' '.join(command.argv[:5])} ...`{where} failed (exit status {code})"
        lines = [line.strip() for line in errors.splitlines() if line.strip()][-_LAST_LINES:]
        own = errors[errors.index(_OF_GCLOUD) :] if _OF_GCLOUD in errors else ""
        if code == 255 or "return code [255]" in own:
            own += errors  # of ssh
        values = {"name": self.name, "accelerator": self.pod.accelerator_type, "zone": self.pod.zone or "that zone"}
        remedy = next((text.format(**values) for pattern, text in _REMEDIES if re.search(pattern, own, re.I)), "")
        return f"{tried}: {remedy}" + "".join(f"\n  {in_a_line(line)[:_LONGEST_LINE]}" for line in lines)

    @property
    def _host_keys(self) -> list[str]:
        return ["--strict-host-key-checking=yes"] if self.pod.host_keys == "known" else []

    @property
    def _target(self) -> str:
        return f"{self.pod.user}@{self.name}" if self.pod.user else self.name

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


Transport = Ssh | Gcloud


def require_gcloud() -> None:
    if shutil.which("gcloud") is None:
        raise LaunchError(
            "gcloud is not installed, or not on the PATH: a pod of type gcloud is reached by it. Install the Google "
            "Cloud CLI, run `gcloud init`, and try again; --dry-run works without it"
        )


_LAST_LINES, _LONGEST_LINE = 8, 400
_OF_GCLOUD = "ERROR: (gcloud"  # a run on the hosts may print anything
_REMEDIES = (
    (r"active account|gcloud auth login|auth tokens|reauthentication|valid credentials",
     "gcloud is not logged in: run `gcloud auth login`"),
    (r"property \[(core/)?project\]|valid project", "set pod.project, or run `gcloud config set project PROJECT`"),
    (r"property \[(compute/)?zone\]|\[--zone\]", "set pod.zone, or run `gcloud config set compute/zone ZONE`"),
    (r"PREEMPTED|TERMINATED", "the pod was taken away: `lockstep pod resume {name}` makes it again and goes on"),
    (r"has state|currently connected to", "the pod is not running: `lockstep pod resume {name}` starts it"),
    (r"capacity|enough resources|RESOURCE_POOL_EXHAUSTED",
     "there is no free {accelerator} in {zone} now: try later, another pod.zone or another pod.provisioning"),
    (r"quota|RESOURCE_EXHAUSTED",
     "the project's quota allows no {accelerator} in {zone}: ask for more (IAM, Quotas: TPU), or take another"),
    (r"PERMISSION_DENIED|does not have permission",
     "the account may not do this in the project, or the zone has no TPUs: ask for the role TPU Admin"),
    (r"ALREADY_EXISTS", "there is a pod called {name} already: `lockstep pod delete {name}` first"),
    (r"nodes/\S+ was not found|NOT_FOUND", "there is no such pod, or accelerator, in {zone}: `lockstep pod create`"),
    (r"SSH key is not present in the SSH agent", "run `ssh-add ~/.ssh/google_compute_engine`"),
    (r"host key verification failed|HOST IDENTIFICATION HAS CHANGED",
     "the host's key is not the known one: if the pod was made anew, run `gcloud compute config-ssh --remove`"),
    (r"return code \[255\]|permission denied \(|connect to host",
     "the host cannot be reached by SSH: try `gcloud compute tpus tpu-vm ssh {name}` by hand, which makes the key"),
)  # fmt: skip

Step = Literal["use", "wait", "start", "recreate"]
_STEPS: dict[str, Step] = {
    "READY": "use",
    "STOPPED": "start",
    # A spot TPU that was taken away stays in the list until it is deleted, and never comes back by itself. Nothing
    # else is deleted: its disks may have what nobody has copied.
    "PREEMPTED": "recreate",
    "TERMINATED": "recreate",
}


def next_step(described: str) -> tuple[str, Step]:
    """Returns the state in the output of `describe`, and what the pod needs before a run can be resumed there."""
    try:
        state = str(json.loads(described)["state"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise LaunchError(f"gcloud did not say what state the pod is in, but {brief(described.strip())!r}") from None
    return state, _STEPS.get(state, "wait")


def _remote(path: str) -> str:
    # Some versions of scp have the path read by a shell on the host, where nothing else is safe.
    if not re.fullmatch(r"[\w./+=@%-]+", path, re.ASCII):
        raise ConfigError(
            f"{brief(path)!r} cannot be a path on the hosts of a pod: use letters, digits and . _ - + = @ % alone"
        )
    return path


def startup_script(pod: Pod) -> str:
    """Returns the script that every host runs when it starts: image, bucket, and pod.setup, every value quoted.

    It may run again where a host restarts. Its exit status goes to a file, which `wait_for_startup` reads.
    """
    parts = [_BEGINNING]
    if pod.container is not None:
        parts.append(f"# The image that ranks run in\ndocker pull {shlex.quote(pod.container.image)}\n")
    if pod.bucket is not None:
        parts.append(_mounted(pod.bucket))
    if pod.setup:
        parts.append("# pod.setup\n" + "".join(f"{shlex.join(argv)}\n" for argv in pod.setup))
    return "\n".join(parts)


def wait_for_startup(seconds: float) -> list[str]:
    """Returns a command for a host that ends with the start-up script, with its last lines where it failed."""
    return ["sh", "-c", _WAIT, "sh", str(max(1, round(seconds)))]


_BEGINNING = f"""#!/bin/bash
# Written by Lockstep from the pod section of a config. Every host runs it when it starts.
set -eux
set -o pipefail
mkdir -p {STATE}
rm -f {STATE}/startup.code
exec >{STATE}/startup.log 2>&1
trap 'code=$?; echo "$code" >{STATE}/startup.new; mv {STATE}/startup.new {STATE}/startup.code' EXIT
"""

_INSTALL = f"""# Install gcsfuse
if ! command -v gcsfuse; then
  export GCSFUSE_REPO=gcsfuse-`lsb_release -c -s`
  curl -fsS --retry 5 -o {_KEYRING} {_SOURCE}/doc/apt-key.gpg
  echo "deb [signed-by={_KEYRING}] {_SOURCE} $GCSFUSE_REPO main" | tee {_LIST}
  {_APT} update
  {_APT} install -y fuse gcsfuse --no-install-recommends
fi
"""


def _mounted(bucket: Bucket) -> str:
    name, folder = shlex.quote(bucket.name), shlex.quote(bucket.mount)
    return f"""{_INSTALL}
# Mount the bucket, and see that it can be written to
mkdir -p {folder}
mountpoint -q {folder} || gcsfuse {name} {folder}
probe={folder}/.lockstep-`hostname`
echo ready >"$probe"
rm "$probe"
"""


_WAIT = f"""
left=$1
until [ -e {STATE}/startup.code ]; do
  left=$((left - 1))
  if [ "$left" -lt 0 ]; then
    echo "the start-up script is not through after $1 s; its last lines:" >&2
    tail -n 5 {STATE}/startup.log >&2
    exit 1
  fi
  sleep 1
done
code=$(cat {STATE}/startup.code)
if [ "$code" != 0 ]; then
  echo "the start-up script ended with exit status $code; its last lines:" >&2
  tail -n 20 {STATE}/startup.log >&2
  exit 1
fi
"""
