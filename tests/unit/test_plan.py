"""A launch plan is data: what it prints is held here word for word."""

from __future__ import annotations

import shlex
import socket
from typing import Any

import pytest

from lockstep.distributed.topology import Topology
from lockstep.launchers.plan import LaunchPlan, available_cores, local_plan

GOLDEN = """\
rank 0 on box: GLOO_SOCKET_IFNAME=lo GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 \
LOCKSTEP_LAUNCHED=1 LOCKSTEP_WATCHED=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
NCCL_SOCKET_IFNAME=lo OMP_NUM_THREADS=4 RANK=0 ROLE_NAME=default ROLE_RANK=0 \
ROLE_WORLD_SIZE=2 \
TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=lockstep \
TORCHELASTIC_USE_AGENT_STORE=False WORLD_SIZE=2 python -m lockstep.worker 'runs/my run'
rank 1 on box: GLOO_SOCKET_IFNAME=lo GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 \
LOCKSTEP_LAUNCHED=1 LOCKSTEP_WATCHED=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
NCCL_SOCKET_IFNAME=lo OMP_NUM_THREADS=4 RANK=1 ROLE_NAME=default ROLE_RANK=1 \
ROLE_WORLD_SIZE=2 \
TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=lockstep \
TORCHELASTIC_USE_AGENT_STORE=False WORLD_SIZE=2 python -m lockstep.worker 'runs/my run'"""

ARGV = ["python", "-m", "lockstep.worker", "runs/my run"]


@pytest.fixture(autouse=True)
def on_a_known_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr("sys.platform", "linux")


def plan(processes: int = 2, **settings: Any) -> LaunchPlan:
    return local_plan(ARGV, processes, **{"cores": 8, "env": {}, **settings})


def test_the_plan_of_two_processes() -> None:
    assert plan(port=29500).render() == GOLDEN


def test_a_line_of_the_plan_can_be_given_to_a_shell() -> None:
    words = shlex.split(plan(port=29500).render().splitlines()[0].split(": ", 1)[1])
    assert words[-4:] == ARGV
    assert all("=" in word for word in words[:-4])


def test_a_port_that_nobody_named_is_left_open_until_the_launch() -> None:
    open_plan = plan()
    assert {each.env["MASTER_PORT"] for each in open_plan.processes} == {"auto"}
    known = open_plan.at(4321, attempt=2)
    assert {each.env["MASTER_PORT"] for each in known.processes} == {"4321"}
    assert {each.env["TORCHELASTIC_RESTART_COUNT"] for each in known.processes} == {"2"}
    assert open_plan == plan(), "a plan is data: knowing the port makes another one"


def test_every_process_finds_its_own_place_in_its_environment() -> None:
    known = plan(3).at(4321, attempt=1)
    found = [Topology.from_env(each.env) for each in known.processes]
    assert [each.place.rank for each in found] == [0, 1, 2]
    assert [each.place.local_rank for each in found] == [0, 1, 2]
    assert {(each.world_size, each.port, each.attempt, each.launcher_serves_store) for each in found} == {
        (3, 4321, 1, False)
    }


@pytest.mark.parametrize(
    ("processes", "cores", "env", "threads", "expected"),
    [
        (1, 8, {}, None, 8),
        (2, 8, {}, None, 4),
        (3, 8, {}, None, 2),
        (4, 2, {}, None, 1),  # never none
        (2, 8, {"OMP_NUM_THREADS": "3"}, None, 3),  # what the user set is respected
        (2, 8, {"OMP_NUM_THREADS": "3"}, 5, 5),  # and the config is nearer
        (2, 8, {"OMP_NUM_THREADS": "0"}, None, 4),
        (2, 8, {"OMP_NUM_THREADS": "many"}, None, 4),
        (2, 8, {"OMP_NUM_THREADS": ""}, None, 4),
    ],
)
def test_threads_are_the_cores_shared_out(
    processes: int, cores: int, env: dict[str, str], threads: int | None, expected: int
) -> None:
    made = plan(processes, cores=cores, env=env, threads=threads)
    assert made.threads == expected
    assert {each.env["OMP_NUM_THREADS"] for each in made.processes} == {str(expected)}


@pytest.mark.parametrize(("platform", "interface"), [("linux", "lo"), ("darwin", "lo0")])
def test_processes_of_one_host_meet_on_its_loopback_interface(
    monkeypatch: pytest.MonkeyPatch, platform: str, interface: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert {each.env["GLOO_SOCKET_IFNAME"] for each in plan().processes} == {interface}


def test_the_interface_that_the_user_chose_is_respected() -> None:
    assert plan(env={"GLOO_SOCKET_IFNAME": "eth1"}).processes[0].env["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_process_alone_needs_no_interface() -> None:
    (process,) = plan(1).processes
    assert "GLOO_SOCKET_IFNAME" not in process.env


def test_there_is_at_least_one_core() -> None:
    assert available_cores() >= 1
