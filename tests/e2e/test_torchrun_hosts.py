"""torchrun with two agents, as on two hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Project, losses

SECRET = {"LOCKSTEP_SECRET": "the same on both of the hosts"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def together(folder: Path, commands: list[tuple[list[str], dict[str, str]]]) -> list[str]:
    """What each of them printed; all must end well."""
    started = [
        subprocess.Popen(
            argv, cwd=folder, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for argv, env in commands
    ]  # fmt: skip
    try:
        said = [each.communicate(timeout=90)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.communicate(timeout=10)
    assert [each.returncode for each in started] == [0] * len(started), "\n".join(said)
    return said


@pytest.mark.requirement("X04")
def test_two_agents_of_torchrun_train_what_one_machine_does(project: Project) -> None:
    config, port = project.config(), free_port()
    agents = [
        (
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}",
                "-m", "lockstep", "train", str(config), "--out", "both",
            ],
            SECRET,
        )
        for node in range(2)
    ]  # fmt: skip
    together(project.folder, agents)
    run, alone = project.only_run("both"), project.train(out="alone")
    assert losses(run) == losses(alone)
