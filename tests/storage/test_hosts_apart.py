"""Two hosts that share no disk: a name of its own and an own disk at the place of the runs' folder for each rank."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import TASK_FILE, Project, losses, steps_saved, summary, wait_until


def _hosts_can_be_made() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "-u", "sh", "-c", "hostname a && mount -t tmpfs none /mnt"], capture_output=True, timeout=10
    )
    return tried.returncode == 0


@pytest.fixture
def hosts(project: Project) -> Hosts:
    if not _hosts_can_be_made():
        pytest.skip("giving a rank a host name and a disk of its own needs root and unshare")
    return Hosts(project)


class Hosts:
    """Two of them, a rank on each. What each sees as `runs` is a folder of its own here."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.disks = [project.folder / f"disk-{number}" for number in range(2)]
        for each in (*self.disks, project.folder / "runs"):
            each.mkdir()

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = [self._start(rank, port, arguments) for rank in range(2)]
        try:
            yield started
        finally:
            for each in started:
                each.kill()
                each.communicate(timeout=10)

    def run(self, *arguments: str) -> list[tuple[int, str]]:
        """How each rank ended, and all that it said."""
        with self.start(*arguments) as ranks:
            return [ended(each) for each in ranks]

    def _start(self, rank: int, port: int, arguments: tuple[str, ...]) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            "LOCKSTEP_SECRET": "the same on both hosts",
        }  # fmt: skip
        script = 'hostname "$0" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
        return subprocess.Popen(
            ["unshare", "-m", "-u", "sh", "-c", script, f"host-{rank}", str(self.disks[rank]),
             str(self._project.folder / "runs"), sys.executable, "-m", *arguments],
            cwd=self._project.folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def ended(rank: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = rank.communicate(timeout=60)
    return rank.returncode, said


@pytest.mark.long
def test_a_resume_where_rank_0s_host_alone_has_the_folder(project: Project, hosts: Hosts) -> None:
    task = {"type": f"{TASK_FILE}:Tiny", "dropout": 0.2}
    settings = {"train": {"epochs": 4, "batch_size": 12}, "checkpoint": {"every": "4 steps"}}
    assert project.run("train", project.config(task=task, **settings), "--out", "local").code == 0
    reference = project.only_run("local")
    project.config(task={**task, "sleep": 0.1}, **settings)
    with hosts.start("lockstep", "train", "config.yaml") as ranks:
        disk = hosts.disks[0]
        wait_until(lambda: list(disk.glob("*/checkpoints/step-*")), what="a checkpoint")
        (run,) = disk.iterdir()
        ranks[1].send_signal(signal.SIGTERM)
        found = [ended(each) for each in ranks]
        assert [code for code, _ in found] == [75, 75], found
    other = hosts.disks[1] / run.name
    assert [each.name for each in other.rglob("*") if each.is_file()] == ["rank-1.log"]
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("sleep: 0.1", "sleep: 0.0"))  # waited long enough
    shutil.rmtree(other)  # another host in its place

    newest = max(steps_saved(run))
    found = hosts.run("lockstep", "resume", f"runs/{run.name}")
    assert [code for code, _ in found] == [0, 0], found
    assert f"step-{newest:08d} is not on the disk of the host of rank 1: it goes there from rank 0" in found[0][1]
    assert f"restored step-{newest:08d}" in found[0][1]
    assert losses(run) == losses(reference) and summary(run)["metrics"] == summary(reference)["metrics"]
    last = max(steps_saved(reference))
    weights = [each / "checkpoints" / f"step-{last:08d}" / "model.safetensors" for each in (run, reference)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (other / "checkpoints").exists() and (other / "logs" / "rank-1.log").is_file()


@pytest.mark.long
def test_the_command_that_launchers_of_ours_start_on_every_host(project: Project, hosts: Hosts) -> None:
    """The folder with its config is on rank 0's host alone from the first moment on."""
    made = project.run("train", project.config(), "--out", "elsewhere")
    assert made.code == 0, made.text
    run = hosts.disks[0] / "run"
    project.only_run("elsewhere").rename(run)
    found = hosts.run("lockstep.worker", "runs/run")
    assert [code for code, _ in found] == [0, 0], found
    assert "restored step-" in found[0][1]


def test_every_rank_is_told_how_the_run_ended(project: Project, hosts: Hosts) -> None:
    (project.folder / "program.py").write_text(f"""
import lockstep

done = lockstep.train(task="{TASK_FILE}:Tiny", processes=2, runtime="cpu", name="told", log={{"jsonl": False}})
import os
print("RANK", os.environ["RANK"], done["status"], done["step"], file=open("told-" + os.environ["RANK"], "w"))
""")
    found = hosts.run("program")
    assert [code for code, _ in found] == [0, 0], found
    assert [(project.folder / f"told-{rank}").read_text().split()[2:] for rank in range(2)] == [["completed", "4"]] * 2
