"""The script that every host of a Cloud TPU runs when it starts: the image, the bucket, and what the config adds.

Every value is quoted. It may run again (a host that restarts): what is there already is left alone. What it says goes
to a file, and its exit status to another, so that `wait` can tell when a host is ready and why it is not.
"""

from __future__ import annotations

import shlex

from lockstep.config.pod import Bucket, Pod

STATE = "/var/lib/lockstep"
_SOURCE = "https://packages.cloud.google.com/apt"
_KEYRING = "/usr/share/keyrings/cloud.google.asc"
_LIST = "/etc/apt/sources.list.d/gcsfuse.list"
# A host that has just started often updates itself, and holds this lock meanwhile.
_APT = "apt-get -o DPkg::Lock::Timeout=300"


def script(pod: Pod) -> str:
    """The start-up script of a config, for `--metadata-from-file=startup-script=FILE`."""
    parts = [_BEGINNING]
    if pod.container is not None:
        parts.append(f"# The image that ranks run in\ndocker pull {shlex.quote(pod.container.image)}\n")
    if pod.bucket is not None:
        parts.append(_mounted(pod.bucket))
    if pod.setup:
        parts.append("# pod.setup\n" + "".join(f"{shlex.join(argv)}\n" for argv in pod.setup))
    return "\n".join(parts)


def wait(seconds: float) -> list[str]:
    """A command for a host: comes back once the script is through, with what it said where it failed."""
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
