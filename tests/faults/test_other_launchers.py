"""Ranks that somebody else started (torchrun, a batch system, by hand): they watch each other, without our launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import TASK_FILE, Project, losses, rank_pids, wait_until

TINY = f"{TASK_FILE}:Tiny"
TIMEOUTS = {"stall": "4 s", "first_step": "60 s"}


@dataclass
class Rank:
    process: subprocess.Popen[str]

    def end(self, limit: float = 40.0) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        _, err = self.process.communicate(timeout=limit)
        return self.process.returncode, err


@contextmanager
def ranks(
    project: Project,
    changes: list[dict[str, str]],
    prefixes: list[list[str]] | None = None,
    port: list[int] | None = None,
) -> Iterator[list[Rank]]:
    """One process per mapping of variables, each started as by a launcher that is not ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    if port is not None:
        port.append(number)
    started = []
    for rank, change in enumerate(changes):
        usual = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(changes)),
            "LOCAL_WORLD_SIZE": str(len(changes)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(number),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [*(prefixes[rank] if prefixes else []), sys.executable, "-m", "lockstep", "train", "config.yaml"]
        started.append(
            subprocess.Popen(
                command, cwd=project.folder, env={**os.environ, **usual, **change}, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        yield [Rank(each) for each in started]
    finally:
        for each in started:
            with suppress(ProcessLookupError):
                each.kill()
            each.communicate(timeout=10)


def run_folder(project: Project) -> Path:
    return Path(wait_until(lambda: list(project.folder.glob("runs/*/topology.json")), what="the roll call")[0]).parent


def test_an_endless_loop_is_found_by_the_other_ranks(project: Project) -> None:
    project.config(task={"type": TINY, "fail_at": {"rank": 1, "step": 3, "how": "hang"}}, timeouts=TIMEOUTS)
    with ranks(project, [{}, {}]) as (zero, one):
        code, err = zero.end()
        assert (code, one.end()[0]) == (4, 4)
    assert "rank 1: in loss of step 3, tasks.py:" in err
    assert "rank 0 waits in gradient reduction of step 3" in err
    log = (run_folder(project) / "logs" / "rank-1.log").read_text()
    assert "in _misbehave" in log, "the stacks are in the log of every rank"


def test_a_stopped_rank_0_takes_the_store_with_it_and_the_others_say_so(project: Project) -> None:
    project.config(task={"type": TINY, "sleep": 0.05}, train={"epochs": 500, "batch_size": 12}, timeouts=TIMEOUTS)
    with ranks(project, [{}, {}]) as (zero, one):
        run = run_folder(project)
        wait_until((run / "metrics.jsonl").exists, what="the first step")
        os.kill(rank_pids(run)[0], signal.SIGSTOP)
        code, err = one.end()
        assert code == 4
        assert "rank 1 has had no answer from the store for" in err
        assert "the network to rank 0's host is cut, or that host is gone" in err
        assert zero.process.poll() is None


# Two hosts: network namespaces that the test makes itself


def _namespaces_can_be_made() -> bool:
    made = subprocess.run(["ip", "netns", "add", "lockstep-try"], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", "lockstep-try"], check=True)
    return made


@pytest.fixture
def two_hosts() -> Iterator[Callable[[], None]]:
    """Namespaces lockstep-a (10.79.0.1) and lockstep-b (10.79.0.2), joined by a cable; gives what cuts it."""
    try:
        if os.geteuid() != 0 or not _namespaces_can_be_made():
            pytest.skip("making network namespaces needs root and iproute2")
    except FileNotFoundError:
        pytest.skip("making network namespaces needs iproute2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=10)

    try:
        for host in "ab":
            ip("netns", "add", f"lockstep-{host}")
        ip("link", "add", "ls-a", "netns", "lockstep-a", "type", "veth", "peer", "name", "ls-b", "netns", "lockstep-b")
        for host, address in (("a", "10.79.0.1/24"), ("b", "10.79.0.2/24")):
            ip("-n", f"lockstep-{host}", "addr", "add", address, "dev", f"ls-{host}")
            ip("-n", f"lockstep-{host}", "link", "set", "lo", "up")
            ip("-n", f"lockstep-{host}", "link", "set", f"ls-{host}", "up")
        yield lambda: ip("-n", "lockstep-a", "link", "set", "ls-a", "down")
    finally:
        for host in "ab":
            subprocess.run(["ip", "netns", "del", f"lockstep-{host}"], check=False, timeout=10)


ON_TWO_HOSTS = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.79.0.1"}


def test_ranks_on_two_hosts_need_a_secret_and_the_same(project: Project) -> None:
    """No network is needed for the first; the second is on one host, at the address of rank 0."""
    project.config(task={"type": TINY}, timeouts={"rendezvous": "5 s"})
    with ranks(project, [ON_TWO_HOSTS, ON_TWO_HOSTS]) as both:
        began = time.monotonic()
        found = [each.end() for each in both]
        assert [code for code, _ in found] == [3, 3]
        assert time.monotonic() - began < 30
        assert all("Set LOCKSTEP_SECRET to the same text on all hosts" in err for _, err in found)
    secrets = [{"LOCKSTEP_SECRET": f"secret number {number} of two"} for number in (1, 2)]
    with ranks(project, secrets) as (zero, one):
        code, err = one.end()
        assert code == 3 and "LOCKSTEP_SECRET must be the same on all hosts" in err
        code, err = zero.end()
        assert code == 3 and "rank 1 of 2 did not arrive" in err
        assert "secret number" not in err


def test_a_stranger_on_the_network_comes_to_nothing(project: Project) -> None:
    """Rank 0 listens at the address where ranks meet, to those that know the secret."""
    project.config(task={"type": TINY, "sleep": 0.02}, train={"epochs": 20, "batch_size": 12})
    port = []
    with ranks(project, [{"LOCKSTEP_SECRET": "the same on both hosts"}] * 2, port=port) as both:
        run = run_folder(project)
        wait_until((run / "metrics.jsonl").exists, what="the first step")
        for garbage in (b"", b"\0" * 4096, b"GET / HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port[0]), timeout=5) as stranger:
                stranger.sendall(garbage)
        assert [each.end()[0] for each in both] == [0, 0]
    log = (run / "logs" / "rank-0.log").read_text()
    assert log.count("the store of this run refused a connection from 127.0.0.1") == 1


def test_a_cut_network_between_two_hosts(project: Project, two_hosts: Callable[[], None]) -> None:
    project.config(task={"type": TINY, "sleep": 0.05}, train={"epochs": 500, "batch_size": 12}, timeouts=TIMEOUTS)
    alone = {**ON_TWO_HOSTS, "LOCKSTEP_SECRET": "the same on both hosts"}
    variables: list[dict[str, Any]] = [{**alone, "GLOO_SOCKET_IFNAME": f"ls-{host}"} for host in "ab"]
    prefixes = [["ip", "netns", "exec", f"lockstep-{host}"] for host in "ab"]
    with ranks(project, variables, prefixes) as (zero, one):
        run = run_folder(project)
        # Well into training: what a rank does for the first time may take longer, and so may its silence.
        wait_until(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) > 40, what="forty steps")
        two_hosts()
        cut = time.monotonic()
        (code_0, err_0), (code_1, err_1) = zero.end(), one.end()
        assert time.monotonic() - cut < 20
    assert (code_0, code_1) == (4, 4)
    assert "rank 1: no sign of life since" in err_0
    assert "rank 1 has had no answer from the store" in err_1
