"""A real SLURM of two nodes on this machine: munged, slurmctld and two slurmd of Debian's packages, on loopback.

Every daemon has its folders, its key and its ports for itself, and is ended by its process id.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

NODES = ("n1", "n2")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare")

_CONFIG = """
ClusterName=lockstep
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=3
InactiveLimit=0
MinJobAge=600
SlurmdTimeout=60
SlurmctldTimeout=30
MessageTimeout=30
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
"""


@dataclass
class SlurmCluster:
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What a command needs to talk to this cluster; gloo is to stay on loopback."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH, "GLOO_SOCKET_IFNAME": "lo"}

    def command(self, *argv: str, limit: float = 60.0, check: bool = True) -> str:
        """What one of SLURM's own commands prints."""
        done = subprocess.run(
            argv,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=limit,
            stdin=subprocess.DEVNULL,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """What SLURM says of a job."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(each.split("=", 1) for each in shown.split() if "=" in each)

    def logs(self) -> str:
        return "\n".join(f"{each.name}:\n{each.read_text()[-3000:]}" for each in self.folder.glob("*.log"))

    def _start(self, *argv: str) -> None:
        self.started.append(
            subprocess.Popen(
                argv, env={**os.environ, **self.env}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )
        )  # fmt: skip

    def start(self) -> None:
        folder = self.folder
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(mode=0o755 if name == "munge" else 0o700)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        ctld, *ports = _free_ports(1 + len(NODES))
        text = _CONFIG.format(folder=folder, ctld=ctld, user=getpass.getuser())
        for node, port in zip(NODES, ports, strict=True):
            text += f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN\n"
        text += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO\n"
        (folder / "slurm.conf").write_text(text)
        hosts = folder / "hosts"
        hosts.write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n")
        self._start(
            "munged", "--foreground", f"--socket={folder}/munge/socket", f"--key-file={key}", "--force",
            f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge/seed",
        )  # fmt: skip
        _wait_for((folder / "munge" / "socket").exists, "munged", self)
        self._start("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            # The name of a node leads to it, as it does in a cluster: in a mount namespace with other /etc/hosts.
            script = 'mount --bind "$1" /etc/hosts && exec slurmd -D -f "$2" -N "$3"'
            self._start("unshare", "--mount", "sh", "-c", script, "sh", str(hosts), str(folder / "slurm.conf"), node)
        _wait_for(self._ready, "two idle nodes", self)

    def _ready(self) -> bool:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return self.command("sinfo", "-h", "-o", "%t %D", limit=10).split() == ["idle", str(len(NODES))]
        return False

    def end(self) -> None:
        with contextlib.suppress(Exception):
            self.command("scancel", "--user", getpass.getuser(), check=False, limit=10)
            _wait_for(lambda: not self.command("squeue", "-h", check=False).strip(), "an empty queue", self, 15)
        left = [child for each in self.started for child in _family(each.pid)]
        for each in reversed(self.started):
            each.terminate()
        for each in reversed(self.started):
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(10)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for each in self.started:
            each.wait(10)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _free_ports(count: int) -> list[int]:
    """Below those that the system hands out: until a daemon takes it, nobody else is given one of them."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            each = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                each.bind(("127.0.0.1", secrets.randbelow(10_000) + 20_000))
                found.append(each.getsockname()[1])
        return found


def _wait_for(condition, what: str, cluster: SlurmCluster, limit: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit} s for {what}\n{cluster.logs()}")
        time.sleep(0.1)


def why_not() -> str | None:
    """What keeps this machine from being a cluster."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    missing = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
    return f"Debian's packages slurm-wlm and munge are needed: there is no {missing[0]}" if missing else None


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()
