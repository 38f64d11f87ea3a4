"""Runs commands on hosts, several at once, by OpenSSH's client with the user's SSH config."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from lockstep import run_files
from lockstep.errors import LaunchError
from lockstep.shown import in_a_line

if TYPE_CHECKING:
    from lockstep.launchers.ssh.gcloud import Transport

# Never ask a question, trust no unknown host, forward nothing, and notice a dead connection.
_OPTIONS = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", "ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes",
    "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3",
)  # fmt: skip
_AT_ONCE, _LONGEST_ANSWER = 32, 4096
_PUT = 'umask 077 && mkdir -p -- "$1" && cat > "$2"'
SSH_FAILED, _NOT_FOUND, _NOT_RUNNABLE = 255, 127, 126

_REASONS = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is not the one that is known: it was installed anew, or "
     "somebody is in between. Find out which; only then remove the old key (ssh-keygen -R {name})"),
    ("Host key verification failed", "its host key is not known here, and is not accepted unseen. Log in once by hand "
     "(ssh {name}), compare the fingerprint that is shown, and say yes"),
    ("Permission denied", "the login was refused: a wrong user (write user@host, or set User in your SSH config) or a "
     "key that is not allowed there; `ssh {name}` must work without a password"),
    ("Could not resolve hostname", "there is no such host name: check launch.hosts, or your SSH config"),
    ("Connection refused", "nothing listens for SSH there: is sshd running, and is the port right?"),
    ("timed out", "it does not answer: is it up, and is there a way to it?"),
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of this machine for one worker, or for the pod as a whole."""

    argv: tuple[str, ...]
    worker: int | None = None  # whose output it is; None: of the pod as a whole, or of all workers at once
    reads: Path | None = None  # what it is given on standard input
    writes: Path | None = None  # where its standard output goes

    def render(self) -> str:
        """Quoted, ready to paste."""
        reads = f" < {shlex.quote(str(self.reads))}" if self.reads is not None else ""
        writes = f" > {shlex.quote(str(self.writes))}" if self.writes is not None else ""
        return shlex.join(self.argv) + reads + writes


class Ssh:
    """A list of hosts. Like Gcloud, every method returns the commands to run, and runs nothing."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers in messages, in order."""
        return self._hosts

    def create(self) -> list[Command]:
        return []  # they exist already

    def delete(self) -> list[Command]:
        return []

    def run(self, argv: Sequence[str], worker: int | None = None) -> list[Command]:
        """Runs a command on one worker or on all; every argument arrives unchanged."""
        return [Command(self._ssh(host, argv), index) for index, host in self._chosen(worker)]

    def copy(self, file: Path, to: str, worker: int | None = None) -> list[Command]:
        """Copies a file to one worker or to all; `to` is absolute, or relative to the home folder there."""
        argv = ["sh", "-c", _PUT, "sh", str(PurePosixPath(to).parent), to]
        return [Command(self._ssh(host, argv), index, reads=file) for index, host in self._chosen(worker)]

    def explain(self, command: Command, code: int, errors: str) -> str:
        """Returns why a command failed, and what to do about it."""
        name = self._hosts[command.worker or 0]
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        if code == SSH_FAILED:
            for sign, meaning in _REASONS:
                if sign.lower() in errors.lower():
                    return meaning.format(name=shlex.quote(name))
            return f"ssh failed: {last or 'it said nothing'}"
        if code in (_NOT_FOUND, _NOT_RUNNABLE):
            return f"the command was not found there ({last}): check pod.python, the interpreter to use on the hosts"
        if "No module named" in errors and "lockstep" in errors:
            return "Lockstep is not installed for pod.python there: pip install it, or name another interpreter"
        return last or f"the command ended with exit code {code}"

    def _ssh(self, host: str, argv: Sequence[str]) -> tuple[str, ...]:
        # The shell there gets one string, in which every argument is quoted.
        options = [part for option in _OPTIONS for part in ("-o", option)]
        return ("ssh", "-T", *options, "--", host, shlex.join(argv))

    def _chosen(self, worker: int | None) -> list[tuple[int, str]]:
        everyone = list(enumerate(self._hosts))
        return everyone if worker is None else [everyone[worker]]


def require_ssh() -> None:
    if shutil.which("ssh") is None:
        raise LaunchError("launch: ssh needs OpenSSH's client, and there is no `ssh` here: install openssh-client")


@dataclass(frozen=True)
class Done:
    """A command that has ended; its exit code is 124 where it took too long."""

    command: Command
    code: int
    out: str
    errors: str


def execute(commands: Sequence[Command], limit: float) -> list[Done]:
    """Runs all commands at once and returns how each of them ended, in their order.

    One whose output goes to a file has so many seconds for more of it to come.
    """
    if not commands:
        return []
    with ThreadPoolExecutor(min(len(commands), _AT_ONCE)) as pool:
        return list(pool.map(lambda command: _run(command, limit), commands))


def _run(command: Command, limit: float) -> Done:
    with contextlib.ExitStack() as stack:
        stdin = stack.enter_context(command.reads.open("rb")) if command.reads else subprocess.DEVNULL
        stdout = stack.enter_context(command.writes.open("wb")) if command.writes else subprocess.PIPE
        try:
            process = subprocess.Popen(command.argv, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            return Done(command, 127, "", f"{error.filename}: not found on this machine")
        with process:
            arrived = 0
            while True:
                try:
                    out, errors = process.communicate(timeout=limit)
                    break
                except subprocess.TimeoutExpired:
                    before, arrived = arrived, command.writes.stat().st_size if command.writes else 0
                    if arrived == before:
                        process.kill()
                        return Done(command, 124, "", f"no answer within {limit:g} s")
    # The answer of a host comes behind the data that it sent.
    out = run_files.read_end(command.writes, _LONGEST_ANSWER) if command.writes else out
    return Done(command, process.returncode, out.decode(errors="replace"), errors.decode(errors="replace"))


SEPARATOR = "\x1e"
CONSOLE = b"\x1elockstep: the console begins here\n"


def encoded(answer: dict[str, Any]) -> str:
    return f"{SEPARATOR}{json.dumps(answer)}"


def decoded(said: str) -> dict[str, Any] | None:
    """Returns the last answer in what a command printed, after whatever a shell printed at its start."""
    _, marked, text = said.rpartition(SEPARATOR)
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[0]) if marked and lines else None
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def answered(transport: Transport, done: Done) -> dict[str, Any]:
    """Returns the answer of a host to a command; raises LaunchError where it has none."""
    answer = decoded(done.out)
    if answer is not None and "error" in answer:
        raise LaunchError(str(answer["error"]))
    if done.code == 0 and answer is not None:
        return answer
    raise LaunchError(in_a_line(transport.explain(done.command, done.code, done.errors)))
