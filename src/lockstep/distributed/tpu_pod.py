"""The TPU pod that this host belongs to: its variables say so, or the host's metadata where nobody set them.

On Kubernetes TPU_WORKER_ID and TPU_WORKER_HOSTNAMES are set. On Cloud TPU VMs they are not: there the metadata server
knows the same, and JAX and torch_xla ask it, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_SERVER, _OVERRIDE = "metadata.google.internal", "GCE_METADATA_HOST"  # the name that Google's own libraries have for it
_TIMEOUT, _LARGEST = 3.0, 1_000_000


class TpuPod(NamedTuple):
    worker: str  # its number, as it stands there
    hosts: list[str]


def tpu_pod(env: Mapping[str, str]) -> TpuPod | None:
    """The pod that a process with this environment is to use; none elsewhere, and where it is to use one host alone."""
    if not env.get("PJRT_DEVICE", "").upper().startswith("TPU") or _alone(env):
        return None
    if "TPU_WORKER_ID" in env:
        worker, named = env["TPU_WORKER_ID"], env.get("TPU_WORKER_HOSTNAMES", "")
    else:
        worker, named = _from_metadata(env.get(_OVERRIDE, "")) or ("", "")
    hosts = [host.strip() for host in named.split(",") if host.strip()]
    return TpuPod(worker, hosts) if len(hosts) > 1 else None


def _alone(env: Mapping[str, str]) -> bool:
    """Chips of this host were picked, as for one that is no part of a pod."""
    return env.get("TPU_PROCESS_BOUNDS") == "1,1,1" and bool(env.get("TPU_VISIBLE_CHIPS"))


@functools.cache
def _from_metadata(server: str) -> tuple[str, str] | None:
    if not server and not _on_compute_engine():
        return None
    worker = _attribute(server or _SERVER, "agent-worker-number")
    endpoints = _attribute(server or _SERVER, "worker-network-endpoints")
    if worker is None or endpoints is None or not worker.isdecimal():
        return None
    # NAME:PORT:ADDRESS of every worker, in their order.
    hosts = [endpoint.strip().split(":")[2:3] for endpoint in endpoints.split(",")]
    if not all(host and re.fullmatch(r"[\w.-]{1,255}", host[0], re.ASCII) for host in hosts):
        return None
    return worker, ",".join(host[0] for host in hosts)


def _on_compute_engine() -> bool:
    try:
        return Path("/sys/class/dmi/id/product_name").read_text().strip() == "Google Compute Engine"
    except OSError:
        return False


def _attribute(server: str, name: str) -> str | None:
    import urllib.request

    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy would be asked for a host that is this one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return str(answer.read(_LARGEST).decode())
    except (OSError, ValueError):
        return None  # not a host of a TPU pod, or nobody to ask
