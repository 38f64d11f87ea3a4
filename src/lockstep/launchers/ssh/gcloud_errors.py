"""Explains why a command of gcloud failed, and what to do about it, from its output."""

from __future__ import annotations

import re
from typing import NamedTuple

from lockstep.config.pod import Pod
from lockstep.launchers.ssh.transport import Command
from lockstep.shown import in_a_line

_LINES, _LONGEST = 8, 400
_OURS = re.compile(r"^ERROR: \(gcloud[.\w-]*\)", re.MULTILINE)


class _Kind(NamedTuple):
    """A message of gcloud, the cloud or ssh, and what we say for it."""

    pattern: str
    text: str


# Of what gcloud says itself: a run on the hosts may print anything. The first that matches counts.
_OF_GCLOUD = (
    _Kind(
        r"active account selected|gcloud auth login|refreshing your current auth tokens|Reauthentication|"
        r"valid credentials",
        "gcloud is not logged in: run `gcloud auth login`, and try again",
    ),
    _Kind(
        r"required property \[(core/)?project\]|valid project",
        "gcloud does not know the project: set pod.project, or run `gcloud config set project PROJECT`",
    ),
    _Kind(
        r"required property \[(compute/)?zone\]|--zone\b.*must be specified|\[--zone\]",
        "gcloud does not know the zone: set pod.zone, or run `gcloud config set compute/zone ZONE`",
    ),
    _Kind(
        r"terminal state|state \"?(PREEMPTED|TERMINATED)",
        "the pod {name} was taken away (preempted): `lockstep pod resume {name}` makes it again and goes on from the "
        "newest checkpoint",
    ),
    _Kind(
        r"has state|cannot be currently connected to",
        "the pod {name} is not running: `lockstep pod resume {name}` starts it and goes on",
    ),
    _Kind(
        r"no more capacity|enough resources available|RESOURCE_POOL_EXHAUSTED|[Ii]nsufficient (reserved )?capacity",
        "there is no free {accelerator} in {zone} now, which has nothing to do with your quota: try again later, "
        "another pod.zone, or another pod.provisioning (it is {provisioning})",
    ),
    _Kind(
        r"[Qq]uota|QUOTA|RESOURCE_EXHAUSTED",
        "the quota of the project does not allow a {provisioning} {accelerator} in {zone}: ask for more of it in the "
        "cloud's console (IAM, Quotas: TPU), or take another pod.accelerator_type, pod.zone or pod.provisioning",
    ),
    _Kind(
        r"accelerator\S* .*(not found|not available|invalid)|accelerator_type|acceleratorType",
        "there is no {accelerator} in {zone}: `gcloud compute tpus accelerator-types list --zone={a_zone}` says what "
        "there is; set pod.accelerator_type or pod.zone",
    ),
    _Kind(
        r"[Rr]untime.?version|runtime_version|--version",
        "there is no runtime version {version} for a {accelerator} in {zone}: `gcloud compute tpus tpu-vm versions "
        "list --zone={a_zone}` says what there is; set pod.runtime_version",
    ),
    _Kind(
        r"denied on '?locations/|[Uu]nknown zone|[Zz]one .*not (found|valid|exist)|Location .*not",
        "the zone {zone} does not exist, or has no TPUs for this project: set pod.zone; `gcloud compute tpus locations "
        "list` says which there are",
    ),
    _Kind(
        r"SERVICE_DISABLED|has not been used in project|API .*not enabled",
        "the Cloud TPU API is not enabled in the project: run `gcloud services enable tpu.googleapis.com`",
    ),
    _Kind(
        r"PERMISSION_DENIED|does not have permission|Permission .*denied",
        "the account that gcloud is logged in with may not do this in the project: ask for the role TPU Admin, or log "
        "in with another (`gcloud auth login`)",
    ),
    _Kind(
        r"ALREADY_EXISTS|already exists",
        "there is a pod called {name} already: use another name, or `lockstep pod delete {name}` first",
    ),
    _Kind(
        r"NOT_FOUND|was not found",
        "there is no pod called {name} in {zone}: `lockstep pod create {name}` makes one; `gcloud compute tpus tpu-vm "
        "list` says which there are",
    ),
    _Kind(
        r"SSH [Kk]ey is not present in the SSH agent",
        "gcloud reaches several workers by a key that your SSH agent holds: run `ssh-add ~/.ssh/google_compute_engine` "
        "(with `eval $(ssh-agent)` before it where no agent runs); it is not forwarded to the hosts",
    ),
)
_OF_SSH = (
    _Kind(
        r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|No \S+ host key is known",
        "the key of the host is not the one that is known: if the pod was made anew, run `gcloud compute config-ssh "
        "--remove` and connect again; pod.host_keys: {host_keys} decides about keys that are not known",
    ),
    _Kind(
        r"Permission denied \(",
        "the host does not take the SSH key of gcloud: run `gcloud compute tpus tpu-vm ssh {name}` by hand once, which "
        "makes the key and brings it there; see pod.user",
    ),
    _Kind(
        r"",
        "the host cannot be reached by SSH: is the pod ready (`lockstep pod ps {name}`), and does the firewall of the "
        "network allow port 22?",
    ),
)
_OF_DOCKER = (
    _Kind(
        r"permission denied while trying to connect to the Docker", "docker is for root there: set pod.container.sudo"
    ),
    _Kind(r"Cannot connect to the Docker daemon|docker: (command )?not found", "docker does not run on the host"),
    _Kind(
        r"Conflict\. The container name|is already in use by container",
        "a container called {container} is running there: stop it by `lockstep pod stop {name}`",
    ),
    _Kind(
        r"pull access denied|manifest unknown|manifest for .* not found|Unable to find image .*\n.*denied",
        "the image {image} cannot be fetched: look at its name and tag, and at who may read it",
    ),
)
_FAILED_ON = re.compile(r"Command execution on worker (\d+) failed\s+with exit status (\d+)")


def explained(name: str, pod: Pod, command: Command, code: int, errors: str) -> str:
    """Returns what was tried and where, the cause and its remedy, and the last lines of the output."""
    where = "" if command.worker is None else f" on worker {command.worker}"
    tried = f"`{' '.join(command.argv[:5])} ...`{where} failed (exit status {code})"
    said = "".join(f"\n  {in_a_line(line)[:_LONGEST]}" for line in _last(errors))
    return f"{tried}: {_remedy(name, pod, code, errors)}{said}"


def _remedy(name: str, pod: Pod, code: int, errors: str) -> str:
    ours = _OURS.search(errors)
    own = errors[ours.start() :] if ours else ""
    if code == 127 and not own:
        return "there is no such command; gcloud or what it runs on the host is not installed"
    unreachable = "return code [255]" in own or (code == 255 and not own)
    looked_for = [(_OF_SSH, errors)] if unreachable else [(_OF_GCLOUD, own), (_OF_DOCKER, errors)]
    for kinds, text in looked_for:
        found = next((kind for kind in kinds if re.search(kind.pattern, text)), None)
        if found:
            return found.text.format(**_values(name, pod))
    failed: list[tuple[str, str]] = _FAILED_ON.findall(errors)
    if failed:
        return "the command failed on " + ", ".join(
            f"worker {worker} (exit status {status})" for worker, status in failed
        )
    return "gcloud, or the command that it ran, says why:"


def _values(name: str, pod: Pod) -> dict[str, str]:
    container = pod.container
    return {
        "name": name,
        "zone": pod.zone or "the zone of `gcloud config`",
        "a_zone": pod.zone or "ZONE",
        "accelerator": str(pod.accelerator_type),
        "version": pod.version,
        "provisioning": pod.provisioning,
        "host_keys": pod.host_keys,
        "container": container.name if container else "",
        "image": container.image if container else "",
    }


def _last(errors: str) -> list[str]:
    return [line.strip() for line in errors.splitlines() if line.strip()][-_LINES:]
