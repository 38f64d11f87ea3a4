"""Hosts on this machine: each a network, mount, process and host name of its own, with a real sshd and its own disk.

They hang on a switch in yet another namespace, so nothing of the machine's own network is touched. The client, a
laptop, is one more of them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

_NAMESPACES = ("--net", "--mount", "--uts", "--pid", "--fork")
NEEDED = ("ip", "tc", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen")


def why_not() -> str | None:
    """Why hosts cannot be made here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "making hosts of network namespaces needs root on Linux"
    missing = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"there is no {', '.join(missing)} here (Debian: iproute2, openssh-server, openssh-client)"
    probe = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces can be made here: {probe.stderr.decode().strip()}"


_SLOW_LINK = Path(__file__).parent / "slow_link.py"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Host:
    """One of them: an init process in namespaces of its own, and what runs below it."""

    def __init__(self, network: Network, name: str, number: int) -> None:
        self.network, self.name, self.address = network, name, f"10.77.0.{number}"
        self.folder = network.folder / name
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True, exist_ok=True)
        # The first process there: it collects what others leave behind, as an init does.
        script = f"hostname {name} && mount --bind {shlex.quote(str(self.disk))} {shlex.quote(str(network.disk))} && "
        script += "echo up && while :; do sleep 1000 & wait; done"
        self._init = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--mount-proc", "--kill-child", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"up\n":
            raise RuntimeError(self._init.communicate()[1].decode())
        (child,) = psutil.Process(self._init.pid).children()
        self.pid = child.pid
        cable = f"c{network.tag}{number}"
        network.run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        network.run("ip", "link", "set", cable, "master", "switch", "up")
        self.cable = cable
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        # The same card as before, where the host is made anew: others remember it.
        self.run("ip", "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
        self.run("ip", "link", "set", "eth0", "up")
        self._relay: subprocess.Popen[bytes] | None = None

    def enter(self, *argv: str, folder: Path = Path("/")) -> list[str]:
        """A command that runs in this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", f"--wd={folder}", *argv]

    def run(self, *argv: str) -> str:
        return _run(self.enter(*argv))

    def start_sshd(self) -> None:
        key = self.folder / "host_key"
        if not key.exists():
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        config = self.folder / "sshd_config"
        config.write_text(
            f"ListenAddress {self.address}\nHostKey {key}\nPidFile {self.folder / 'sshd.pid'}\n"
            f"AuthorizedKeysFile {self.network.key}.pub\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\nMaxStartups 100\n"
            f"SetEnv PATH={self.network.programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin{_modules()}\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        self.run("/usr/sbin/sshd", "-f", str(config), "-E", str(self.folder / "sshd.log"))

    def stop_sshd(self) -> None:
        """The server, and not the connections that there are."""
        number = (self.folder / "sshd.pid").read_text().strip()
        self.run("kill", "-KILL", number)

    @property
    def public_key(self) -> str:
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def processes(self, words: str) -> list[psutil.Process]:
        """Those of this host whose command line has these words."""
        found = []
        for each in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(each.cmdline()):
                    found.append(each)
        return found

    def cut(self) -> None:
        """Pull the cable."""
        self.network.run("ip", "link", "set", self.cable, "down")

    def plug(self) -> None:
        self.network.run("ip", "link", "set", self.cable, "up")

    def slow_down(self, delay: float, loss: float) -> None:
        """Every frame so many seconds later, in both directions together; some of them never."""
        try:
            self.run("tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{delay * 1000:g}ms",
                     "loss", f"{loss * 100:g}%")  # fmt: skip
        except RuntimeError:  # a kernel without netem
            self._slow_down_by_hand(delay / 2, loss / 2)

    def _slow_down_by_hand(self, delay: float, loss: float) -> None:
        for host in self.network.everybody:
            host.run(sys.executable, str(_SLOW_LINK), "--without-offloads", "eth0")
        near, far = f"{self.cable}n", f"{self.cable}f"
        self.network.run("ip", "link", "set", self.cable, "nomaster")
        self.network.run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        for name in (near, far):
            self.network.run("ip", "link", "set", name, "up")
        self.network.run("ip", "link", "set", far, "master", "switch")
        argv = [sys.executable, str(_SLOW_LINK), self.cable, near, str(delay), str(loss)]
        self._relay = subprocess.Popen(self.network.enter(*argv), stdout=subprocess.PIPE)
        assert self._relay.stdout is not None and self._relay.stdout.readline() == b"up\n"

    def speed_up(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.run("tc", "qdisc", "del", "dev", "eth0", "root")
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait(10)
            self._relay = None
            self.network.run("ip", "link", "del", f"{self.cable}n")
            self.network.run("ip", "link", "set", self.cable, "master", "switch")

    @property
    def is_up(self) -> bool:
        return self._init.poll() is None

    def die(self) -> None:
        """Every process of this host at once, as when its power fails."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.wait(10)

    def die_silently(self) -> None:
        """And nobody hears of it."""
        self.cut()
        self.die()


class Network:
    """A switch, the hosts on it, and the client's side of SSH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tag = uuid.uuid4().hex[:6]
        self.disk = folder / "shared-name"  # the same path on every host, and another disk behind it
        self.disk.mkdir()
        self.programs = folder / "bin"  # of all hosts, before their own
        self.programs.mkdir()
        self.key = folder / "key"
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)])
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "100000"])
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self._switch.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.run("ip", "link", "add", "switch", "type", "bridge")
        self.run("ip", "link", "set", "switch", "up")
        self.hosts: dict[str, Host] = {}
        self._client: Host | None = None

    @property
    def everybody(self) -> list[Host]:
        return [*self.hosts.values(), *([self._client] if self._client else [])]

    def enter(self, *argv: str) -> list[str]:
        """A command in the switch's namespace."""
        return ["nsenter", f"--target={self._switch.pid}", "--net", *argv]

    def run(self, *argv: str) -> str:
        return _run(self.enter(*argv))

    def add(self, *names: str) -> None:
        for name in names:
            host = Host(self, name, 11 + len(self.hosts))
            host.start_sshd()
            self.hosts[name] = host

    def restore(self) -> None:
        """Every host as it was at first: those that died are made anew, with the disks that they had."""
        for number, (name, host) in enumerate(list(self.hosts.items())):
            if not host.is_up:
                host.die()
                self.run_quietly("ip", "link", "del", host.cable)
                self.hosts[name] = Host(self, name, 11 + number)
                self.hosts[name].start_sshd()
            else:
                host.plug()
                host.speed_up()

    def run_quietly(self, *argv: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.run(*argv)

    @property
    def client(self) -> Host:
        """A laptop on the same network: it knows the hosts by their keys."""
        if self._client is None:
            self._client = Host(self, "laptop", 10)
            self.write_ssh_config()
        return self._client

    def write_ssh_config(self, known: Sequence[str] | None = None) -> None:
        names = self.hosts if known is None else known
        known_hosts = self.folder / "known_hosts"
        known_hosts.write_text("".join(f"{self.hosts[each].address} {self.hosts[each].public_key}\n" for each in names))
        config = self.folder / "ssh_config"
        config.write_text(
            "".join(f"Host {name}\n  HostName {host.address}\n" for name, host in self.hosts.items())
            + f"Host *\n  User root\n  IdentityFile {self.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        assert self._client is not None
        self._client.run("mount", "--bind", str(config), "/etc/ssh/ssh_config")

    def close(self) -> None:
        for host in self.everybody:
            host.speed_up()
            host.die()
        self._switch.kill()
        self._switch.wait(10)


def _modules() -> str:
    """Where Python and its libraries look here, where variables say it: hosts are to look there too."""
    names = [name for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ]
    return "".join(f" {name}={os.environ[name]}" for name in names)


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": _PATH})
    if done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: {done.stderr.strip()}")
    return done.stdout
