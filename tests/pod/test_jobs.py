"""Jobs on hosts, and what a laptop is told of them: with real files and processes, and without any host."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.load import load_python
from lockstep.errors import ConfigError, LaunchError
from lockstep.launchers.ssh import agent, code, host, launcher
from lockstep.launchers.ssh import pod as pods
from lockstep.launchers.ssh import record as records
from lockstep.launchers.ssh.folder import Job, PodFolder
from lockstep.launchers.ssh.record import Host, Order, Record
from lockstep.launchers.ssh.ssh import CONSOLE, Command, Done, encoded, execute

TASK = Path(__file__).parents[1] / "tasks.py"
OLD, NEW = "20261025-025900-aaaaaa", "20261025-021000-bbbbbb"  # the new one was started after the end of summer time


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodFolder:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = PodFolder(".lockstep", "demo")
    made.make()
    return made


def test_a_job_at_work_is_the_newest_whatever_its_name(folder: PodFolder) -> None:
    old, new = folder.job(OLD), folder.job(NEW)
    for each in (old, new):
        each.path.mkdir()
    old.has_ended(0, "completed")
    assert (folder.newest_job() or new).name == OLD
    new.hold()
    new.has_begun()
    assert host.inspect(folder, {"network": None})["running"] == NEW
    assert host.ps(folder, {})["alive"]
    with pytest.raises(LaunchError, match="still at work here"):
        host.delete(folder, {})


def test_a_claim_of_a_clock_that_was_ahead_keeps_nobody_out(folder: PodFolder) -> None:
    for ahead, expected in ((-5.0, OLD), (3600.0, None)):
        (folder.path / "claim.json").write_text(json.dumps({"job": OLD, "time": time.time() + ahead}))
        assert folder.claim(NEW) == expected


def order(**values: Any) -> Order:
    hosts = (Host(name="anna", address="127.0.0.1", first=0, count=1),)
    base = {"pod": "demo", "job": NEW, "index": 0, "port": 4000, "secret": "s" * 20, "folder": "/tmp/x"}
    return Order(**{**base, "hosts": hosts, "config": {"task": f"{TASK}:Tiny"}, **values})


def test_a_job_that_is_stopped_before_it_begins_does_not_begin(folder: PodFolder) -> None:
    """Ctrl-C while agents start: on some hosts the request comes before the agent, or before the code."""
    assert host.stop(folder, {"job": NEW}) == {"job": NEW, "pid": None}
    code.pack(folder.archive, None, order().model_dump_json())
    with pytest.raises(LaunchError, match=f"job {NEW} was stopped before it began"):
        host.prepare(folder, {"index": 0})
    started = agent.Agent(order(), folder.job(NEW))
    started._say_it_has_begun()
    assert (started._signals.count, started._signals.name) == (1, "lockstep pod stop")


def test_ranks_of_a_host_keep_the_network_and_threads_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(agent, "interface_of", lambda address: "eth0")
    made = agent.Agent(order(), Job(Path("/nowhere")))
    env = agent._plan(order(), 0, made._threads).processes[0].env
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    assert [env[name] for name in names] == ["ib0", "eth0", "3"]


def test_a_host_without_an_address_that_others_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "2001:db8::1 50000 2001:db8::2 22")  # a login over IPv6
    monkeypatch.setattr(host, "interfaces", lambda: {"lo": "127.0.0.1", "docker0": "172.17.0.1"})
    monkeypatch.setattr(socket.socket, "connect", lambda self, place: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("10.0.0.11", 40000))
    assert host.network_address(None) == "10.0.0.11", "that of the default route"
    monkeypatch.setattr(host, "interfaces", lambda: {"lo": "127.0.0.1"})
    monkeypatch.setattr(socket.socket, "connect", lambda self, place: self.bind(("192.0.2.1", 0)))
    assert host.network_address(None) == "127.0.0.1"
    found = {
        **dict.fromkeys(("lockstep", "torch", "path", "host", "running"), None), "lockstep": pods.installed(),
        "torch": "2", "writable": True, "devices": {}, "address": "127.0.0.1", "addresses": [],
    }  # fmt: skip
    assert list(pods._problems(found, [], 1)) == []
    assert "no IPv4 address that other hosts reach" in next(pods._problems(found, [], 2))


# What comes back from a host: the folder of a run


def packed(run: Path, everything: bool = True) -> bytes:
    argv = {"directory": ".lockstep", "pod": "demo", "run": str(run), "everything": everything}
    program = [sys.executable, "-P", "-m", "lockstep.launchers.ssh.host", "pack", json.dumps(argv)]
    (done,) = execute([Command(tuple(program), 0, writes=run.parent / "packed")], 60)
    assert (done.code, done.errors) == (0, "")
    return (run.parent / "packed").read_bytes()


def unpack(data: bytes, out: Path, everything: bool = True) -> set[str]:
    (out.parent / "arrived").write_bytes(data)
    answer = json.loads(data.decode(errors="replace").rpartition("\x1e")[2])
    return {
        str(each.relative_to(out)) for each in code.unpack_run(out.parent / "arrived", out, "run", answer, everything)
    }


def test_a_run_comes_whole_although_a_shell_talks_and_gcloud_repeats_the_command(
    tmp_path: Path, folder: PodFolder
) -> None:
    run = tmp_path / "run"
    for name in (
        "logs/rank-0.log",
        "checkpoints/step-1/manifest.json",
        "profile/proc_0/x",
        ".partial/x",
        "config.yaml",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    (run / "link").symlink_to("/etc/passwd")
    data = packed(run)
    cut_off = data[:1500]
    expected = {
        "run/logs/rank-0.log",
        "run/checkpoints/step-1/manifest.json",
        "run/profile/proc_0/x",
        "run/config.yaml",
    }
    assert unpack(b"Welcome" + cut_off + b"Welcome" + data, tmp_path / "here") == expected
    assert (tmp_path / "here" / "run" / "profile" / "proc_0" / "x").read_text() == "profile/proc_0/x"
    (run / "logs" / "rank-1.log").write_text("of another host")
    assert unpack(packed(run, everything=False), tmp_path / "here", everything=False) == {"run/logs/rank-1.log"}
    assert not list(folder.path.glob("*.tar")), "no second copy of the run stays on the host"


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        (run / f"step-{step}").mkdir(parents=True)
        (run / f"step-{step}" / "model").write_bytes(b"x" * 30_000)
    add = tarfile.TarFile.add

    def remove(self: tarfile.TarFile, name: Path, *rest: Any) -> None:
        if "step-2" in str(name):
            name.unlink()
        add(self, name, *rest)

    monkeypatch.setattr(tarfile.TarFile, "add", remove)
    out = io.BytesIO()
    size = code.pack_run(run, True, out)
    assert size == len(out.getvalue())
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        assert tar.getnames() == ["run/step-1/model"]


def test_a_command_that_sends_on_has_no_limit_in_all(tmp_path: Path) -> None:
    slow = ("sh", "-c", 'for i in 1 2 3 4; do echo $i; sleep 0.2; done; [ -n "$0" ] || exec sleep 60', "done")
    (done,) = execute([Command(slow, writes=tmp_path / "file")], 0.5)
    assert (done.code, (tmp_path / "file").read_text()) == (0, "1\n2\n3\n4\n")
    (done,) = execute([Command((*slow[:3], ""), writes=tmp_path / "file")], 0.5)
    assert (done.code, done.errors) == (124, "no answer within 0.5 s")


# The console of a run


class Following:
    """A pod whose host is a shell that prints, one text after the other."""

    name, config = "demo", None

    def __init__(self, folder: Path, *texts: bytes, then: str = "exit 1") -> None:
        self.folder, self.texts, self.then, self.asked = folder, list(texts), then, list[int]()
        self.transport = SimpleNamespace(workers=("anna",), explain=lambda command, code, errors: f"code {code}")

    def following(self, worker: int, offset: int, job: str, follow: bool) -> list[Command]:
        self.asked.append(offset)
        file = self.folder / str(len(self.asked))
        file.write_bytes(self.texts.pop(0) if self.texts else b"")
        return [Command(("sh", "-c", f"cat {file}; {self.then}"), worker)]


LINES = b"".join(b"step %d\n" % step for step in range(4))
END = encoded({"exit_code": 75}).encode()


@pytest.mark.parametrize(
    ("texts", "asked"),
    [
        ([CONSOLE + LINES + END], [0]),
        # A lost connection: what gcloud says with exit code 1, and a client that was killed.
        ([CONSOLE + LINES[:16], CONSOLE + LINES[14:] + END], [0, 14]),
        # gcloud itself makes it again, from where it began.
        ([CONSOLE + LINES[:16] + CONSOLE + LINES[:23] + CONSOLE + LINES + END], [0]),
        (
            [b"Welcome\n" + CONSOLE + LINES[:14], b"no console", CONSOLE + LINES[14:] + b"no line end" + END],
            [0, 14, 14],
        ),
    ],
)
def test_every_line_of_a_console_is_shown_once_and_its_end_is_not_taken_from_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, texts: list[bytes], asked: list[int]
) -> None:  # fmt: skip
    monkeypatch.setattr(launcher, "_RETRY_SECONDS", 0.01)
    pod = Following(tmp_path, *texts, then="kill -9 $$")
    assert launcher.follow(pod, SimpleNamespace(job="j"), stops=False) == 75  # type: ignore[arg-type]
    assert pod.asked == asked
    assert capsys.readouterr().out.encode().removesuffix(b"no line end\n") == LINES


def test_a_console_that_cannot_be_reached_or_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(launcher.HeadLost, match="out of reach: code 1"):
        launcher.follow(Following(tmp_path), SimpleNamespace(job="j"), stops=False)  # type: ignore[arg-type]
    pod = Following(tmp_path, encoded({"error": "no job was started here"}).encode() + b"\n")
    assert launcher.follow(pod, SimpleNamespace(job="j"), stops=False) == 2  # type: ignore[arg-type]
    assert capsys.readouterr().out == "lockstep: no job was started here\n"


def test_the_end_of_a_console_has_the_exit_code_of_the_run(folder: PodFolder, capfdbinary: Any) -> None:
    job = folder.job(NEW)
    job.path.mkdir()
    job.console.write_bytes(LINES)
    job.has_begun()
    job.has_ended(75, "preempted")
    assert host.follow(folder, {"job": NEW, "offset": 14}) == 75
    assert capfdbinary.readouterr().out == CONSOLE + LINES[14:] + END


# A start that is interrupted


@pytest.mark.parametrize("reached", [True, False])
def test_ctrl_c_while_agents_start_ends_them_and_forgets_the_job_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "ssh").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    asked: list[tuple[str, str]] = []

    def carried_out(commands: Sequence[Command], limit: float) -> list[Done]:
        found = []
        for command in commands:
            verb = re.search(r"ssh\.host (\w+) '(.*)'", command.argv[-1]) if "ssh.host" in command.argv[-1] else None
            asked.append((verb[1] if verb else "copy", command.argv[-1]))
            if asked[-1][0] == "start":
                assert records.read("demo").job is not None, "nobody could stop it"
                raise KeyboardInterrupt
            inspected = {
                "lockstep": pods.installed(), "torch": "2", "host": f"host {command.worker}", "running": None,
                "address": f"10.0.0.{command.worker}", "addresses": [], "port": 4000, "writable": True, "saved": None,
                "path": "/home/me/.lockstep/demo", "devices": {"runtime": "cpu", "processes": 1}, "claimed": None,
            }  # fmt: skip
            lost = asked[-1][0] == "stop" and not reached
            found.append(Done(command, 255 if lost else 0, encoded(inspected), ""))
        return found

    monkeypatch.setattr(pods, "execute", carried_out)
    values = {"task": f"{TASK}:Tiny", "processes": 2, "launch": {"type": "ssh", "hosts": ["anna", "bert"]}}
    config = load_python(values, {}, "test").model_copy(update={"name": "demo"})
    before = Record(name="demo", config=records.plain(config), job=OLD, folder="/runs/demo")
    records.write(before)
    with pytest.raises(KeyboardInterrupt):
        pods.Pod("demo", config).start(Path())
    assert [verb for verb, _ in asked[-4:]] == ["stop", "stop", "release", "release"]
    assert (records.read("demo") == before) is reached
    records.forget("demo")
    with pytest.raises(KeyboardInterrupt):
        pods.Pod("demo", config).start(Path("/shared/runs"))
    if reached:
        with pytest.raises(ConfigError, match="there is no pod 'demo' here"):
            records.read("demo")
    else:
        known = records.read("demo")
        assert known.folder == f"/shared/runs/demo-{known.job}"
        then = time.mktime(time.strptime(str(known.job)[:15], "%Y%m%d-%H%M%S")) - time.mktime(time.gmtime())
        assert abs(then) < 60, "in UTC"
