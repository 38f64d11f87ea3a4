"""Who takes part: out to the environment and back, and no contradiction believed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.distributed.topology import Place, Topology, batch_task, launched, without_place
from lockstep.errors import TopologyError


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    local_world_size, hosts = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    host_index, local_rank = draw(st.integers(0, hosts - 1)), draw(st.integers(0, local_world_size - 1))
    return Topology(
        place=Place(rank=host_index * local_world_size + local_rank, local_rank=local_rank, host_index=host_index),
        world_size=hosts * local_world_size,
        local_world_size=local_world_size,
        address=draw(st.sampled_from(["127.0.0.1", "10.0.0.7", "node-3.cluster"])),
        port=draw(st.integers(1, 65535)),
        attempt=draw(st.integers(0, 5)),
        launcher_serves_store=draw(st.booleans()),
        launched_by_us=draw(st.booleans()),
        watched=draw(st.booleans()),
    )


@settings(deadline=None)
@given(topology=topologies())
def test_a_topology_comes_back_from_its_environment(topology: Topology) -> None:
    assert Topology.from_env(topology.to_env()) == topology


def test_the_environment_is_what_torchrun_sets() -> None:
    topology = Topology(
        Place(rank=3, local_rank=1, host_index=1), 4, 2, "10.0.0.7", 29500, attempt=2, launched_by_us=True
    )
    assert topology.to_env() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "lockstep",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCKSTEP_LAUNCHED": "1",
    }


def test_without_any_variable_a_process_is_alone() -> None:
    topology = Topology.from_env({"PATH": "/bin"})
    assert (topology.place.rank, topology.world_size, topology.place.local_rank) == (0, 1, 0)


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, False), ({"MASTER_ADDR": "x"}, False), ({"RANK": "0"}, True), ({"WORLD_SIZE": "1"}, True)],
)
def test_a_process_with_a_rank_was_launched(env: dict[str, str], expected: bool) -> None:
    assert launched(env) is expected


def test_where_only_rank_and_world_size_are_set_all_processes_are_on_one_host() -> None:
    topology = Topology.from_env({"RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "29500"})
    assert (topology.place.local_rank, topology.local_world_size, topology.host_count) == (2, 4, 1)


@pytest.mark.requirement("D03")
def test_the_local_rank_is_told_apart_from_the_global_one() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "29500"}
    place = Topology.from_env(env).place
    assert (place.rank, place.local_rank, place.host_index) == (5, 1, 1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank 2 does not exist in a world of 2 \(ranks start at 0\)"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 does not exist in a world of 2"),
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not: start the script with torchrun or `lockstep run`"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set but RANK is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in the environment is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, r"WORLD_SIZE='2\.0' in the environment is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "auto"}, "MASTER_PORT='auto'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "the world size is 0; it must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "the world size is -2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "0 processes"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "0 processes"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "rank 1: local rank 1 does not exist on a host with 1 processes",
        ),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "3 processes in all cannot be 2 on every host"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "2 processes need a port to meet at, got 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "need a port to meet at, got 65536"),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Topology.from_env(env)


@pytest.mark.requirement("X04")
def test_the_hosts_of_a_pod_are_ranks_without_being_told() -> None:
    env = {"PJRT_DEVICE": "TPU", "TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "10.0.0.5, 10.0.0.6,10.0.0.7"}
    assert launched(env)
    topology = Topology.from_env(env)
    assert (topology.place.rank, topology.place.host_index, topology.place.local_rank) == (2, 2, 0)
    assert (topology.world_size, topology.host_count, topology.address, topology.port) == (3, 3, "10.0.0.5", 29500)
    assert Topology.from_env({**env, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1  # a launcher knows better


@pytest.mark.parametrize(
    "env",
    [
        {"PJRT_DEVICE": "CPU", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"},
        {"PJRT_DEVICE": "TPU", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a"},
        {"PJRT_DEVICE": "TPU"},
        # One chip of this host was picked.
        {
            "PJRT_DEVICE": "TPU",
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "a,b",
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_VISIBLE_CHIPS": "0",
        },
    ],
)
def test_one_host_is_no_pod(env: dict[str, str]) -> None:
    assert not launched(env) and Topology.from_env(env).world_size == 1


# Batch systems, which start several processes alike

SRUN = {
    "SLURM_JOB_ID": "20417", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (SRUN, "process 3 of 4 that srun started (SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4)"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "process 0 of 2 that srun started"),
        (MPIRUN, "process 3 of 4 that mpirun started (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)"),
        (MPIEXEC, "process 3 of 4 that mpiexec started (PMI_RANK=3, PMI_SIZE=4)"),
        ({"PMI_RANK": "1"}, "process 1 of 2 that mpiexec started"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **MPIRUN}, "process 3 of 4 that mpirun started"),  # in a step of one
    ],
)
def test_tasks_that_nobody_made_ranks_of_are_refused(env: dict[str, str], found: str) -> None:
    for ask in (launched, Topology.from_env):
        with pytest.raises(TopologyError) as refused:
            ask(env)
        assert found in str(refused.value)
        assert "each of them would train a run of its own" in str(refused.value)
        assert refused.value.exit_code == 2
    assert not launched(without_place(env))


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "20417", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the shell of a batch script
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell is a step of one task
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0"},
        {"PMI_RANK": "?", "PMI_SIZE": "4"},
    ],
)
def test_a_task_that_is_alone_is_not_refused(env: dict[str, str]) -> None:
    assert not launched(env) and Topology.from_env(env).world_size == 1


@pytest.mark.parametrize("env", [SRUN, MPIRUN, MPIEXEC], ids=["srun", "mpirun", "mpiexec"])
def test_the_line_of_the_refusal_makes_ranks_of_tasks(env: dict[str, str], tmp_path: Path) -> None:
    task = batch_task(env)
    assert task is not None and task.placing in task.refusal
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames node[07-08]' ] && printf 'node07\\nnode08\\n'\n")
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    shown = subprocess.run(
        f"{task.placing} env -0", shell=True, env={"PATH": path, **env}, capture_output=True, text=True, timeout=20
    )
    variables = dict(each.split("=", 1) for each in shown.stdout.split("\0") if each)
    topology = Topology.from_env(variables)
    assert (topology.place.rank, topology.place.local_rank, topology.place.host_index) == (3, 1, 1)
    assert (topology.world_size, topology.local_world_size, topology.host_count) == (4, 2, 2)
    expected = ("node07", 20417 % 20000 + 20000) if env is SRUN else ("FIRST_HOST", 29500)
    assert (topology.address, topology.port) == expected


def test_lockstep_launch_refuses_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TopologyError, match="process 3 of 4 that srun started"):
        lockstep.launch(print, processes=1, runtime="cpu", out=tmp_path)
    assert not list(tmp_path.iterdir())
