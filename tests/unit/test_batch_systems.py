"""Processes that srun started find their places; those of mpirun and mpiexec are refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.cli import main
from lockstep.config.schema import RunConfig
from lockstep.distributed.batch import batch_task, nodes, tasks_per_node
from lockstep.distributed.topology import Topology, launched, without_place
from lockstep.doctor.ask import environment
from lockstep.errors import ConfigError, LockstepError, TopologyError
from lockstep.launchers.base import trains_here
from lockstep.launchers.rank import check_processes
from lockstep.record import run_folder

SRUN = {
    "SLURM_JOB_ID": "20417", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}  # fmt: skip
UNEVEN = {
    **SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"
}  # fmt: skip
ONE_NODE = {
    **SRUN, "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "gpu4",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-1@1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPIEXEC = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.requirement("X04")
@pytest.mark.parametrize(
    ("env", "place", "world", "address"),
    [
        (SRUN, (3, 1, 1), (4, 2, 2), "node07"),
        (UNEVEN, (2, 0, 1), (3, 1, 2), "node07"),
        (ONE_NODE, (1, 1, 0), (2, 2, 1), "127.0.0.1"),
        ({**SRUN, "MASTER_ADDR": "10.0.0.7"}, (3, 1, 1), (4, 2, 2), "10.0.0.7"),
        # srun may speak PMI itself.
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 1, 1), (4, 2, 2), "node07"),
    ],
)  # fmt: skip
def test_tasks_are_ranks_without_being_told(
    env: dict[str, str], place: tuple[int, ...], world: tuple[int, ...], address: str
) -> None:
    assert launched(env)
    topology = Topology.from_env(env)
    found = topology.place
    assert (found.rank, found.local_rank, found.host_index) == place
    assert (topology.world_size, topology.local_world_size, topology.host_count) == world
    assert topology.address == address
    assert 15_000 <= topology.port < 30_000
    assert not launched(without_place(env))


def test_a_place_that_was_given_by_torchrun_counts_more() -> None:
    env = {**SRUN, "RANK": "0", "WORLD_SIZE": "1"}
    assert Topology.from_env(env).world_size == 1


def test_the_port_is_that_of_the_job_and_the_step() -> None:
    ports = {
        Topology.from_env({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).port for job in "12" for step in "34"
    }
    assert len(ports) == 4
    assert Topology.from_env({**SRUN, "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}).port == Topology.from_env(SRUN).port
    assert Topology.from_env({**SRUN, "MASTER_PORT": "4242"}).port == 4242


def test_a_requeued_job_is_another_attempt_under_its_nodes_names() -> None:
    topology = Topology.from_env({**SRUN, "SLURM_RESTART_COUNT": "2", "LOCKSTEP_SECRET": "a secret of the job"})
    assert (topology.attempt, topology.place.host, topology.secret) == (2, "node08", "a secret of the job")


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "20417", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the shell of a batch script
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell is a step of one task
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_RANK": "?", "PMI_SIZE": "4"},
    ],
)
def test_a_task_that_is_alone_is_a_process_by_itself(env: dict[str, str]) -> None:
    assert not launched(env) and Topology.from_env(env).world_size == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PMIX_RANK": "1"}, "an MPI launcher started this process (PMIX_RANK=1)"),
        ({"PMI_RANK": "1"}, "does not read ranks from MPI: start it with srun or torchrun"),
        (MPIRUN, "OMPI_COMM_WORLD_RANK=3"),
        (MPIEXEC, "PMI_RANK=3"),
        # Both start servers with srun, in an allocation, whose variables their processes inherit.
        ({**ONE_NODE, **MPIRUN}, "OMPI_COMM_WORLD_RANK=3"),
        ({**ONE_NODE, **MPIEXEC}, "PMI_RANK=3"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", **MPIRUN}, "OMPI_COMM_WORLD_RANK=3"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS is not set"),
        ({**SRUN, "SLURM_NODEID": "x"}, "SLURM_NODEID='x' in the environment is not a whole number"),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[1-"}, "is not a list of nodes"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "does not say how many tasks every node has"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2"}, "contradict each other"),
        ({**SRUN, "SLURM_LOCALID": "2"}, "local rank 2 does not exist on a host with 2 processes"),
        ({**SRUN, "MASTER_PORT": "auto"}, "MASTER_PORT='auto'"),
    ],
)
def test_what_cannot_be_a_run_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(TopologyError) as refused:
        Topology.from_env(env)
    assert message in str(refused.value) and refused.value.exit_code == 2


# Short forms


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("n1", "n1"),
        ("n[1-2,07-09],gpu4", "n1 n2 n07 n08 n09 gpu4"),
        ("rack[1-2]-n[1,3]", "rack1-n1 rack1-n3 rack2-n1 rack2-n3"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a-1,b.c.d[3]", "a-1 b.c.d3"),
    ],
)
def test_node_lists(text: str, found: str) -> None:
    assert nodes(text) == found.split()


@pytest.mark.parametrize(
    "text", ["", "n[", "n[]", "n[1-]", "n]1[", "n[[1]]", "n[2-1]", "n[a-b]", "a,,b", "n[1-99999999]"]
)
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(TopologyError):
        nodes(text)


@pytest.mark.parametrize(("text", "found"), [("2(x2),1", [2, 2, 1]), ("4", [4]), ("1,3(x1)", [1, 3])])
def test_tasks_per_node(text: str, found: list[int]) -> None:
    assert tasks_per_node(text) == found


@settings(deadline=None)
@given(st.text(alphabet="n0123456789[],-(x)", max_size=30))
def test_whatever_the_variables_hold_is_read_or_refused(text: str) -> None:
    for read in (nodes, tasks_per_node):
        with contextlib.suppress(LockstepError):
            assert len(read(text)) < 2_000_000


# Against the config


def config(processes: int | str, launch: str = "local") -> RunConfig:
    return RunConfig.model_validate({"task": "a.b:C", "processes": processes, "launch": launch})


@pytest.mark.parametrize(
    ("env", "processes", "launch"),
    [
        (SRUN, "auto", "local"), (SRUN, 4, "local"), (SRUN, 2, "local"), (SRUN, 4, "slurm"), (UNEVEN, 3, "local"),
        (ONE_NODE, 2, "slurm"), ({"SLURM_JOB_ID": "1"}, 1, "slurm"), ({"SLURM_JOB_ID": "1"}, 8, "local"),
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, 9, "local"),
    ],
)  # fmt: skip
def test_processes_that_fit_the_tasks(env: dict[str, str], processes: int | str, launch: str) -> None:
    task = check_processes(config(processes, launch), env)
    assert task == (None if "RANK" in env else batch_task(env))


@pytest.mark.parametrize(
    ("env", "processes", "launch", "message"),
    [
        (
            SRUN,
            3,
            "local",
            "processes: 3, but there are 4 tasks of srun (2, 2 on 2 hosts): start 3 in all, or so many on",
        ),
        (SRUN, 2, "slurm", "processes: 2, but there are 4 tasks of srun (2, 2 on 2 hosts): start 2 in all; or set"),
        (UNEVEN, 2, "local", "processes: 2, but there are 3 tasks of srun (2, 1 on 2 hosts)"),
        (ONE_NODE, 4, "local", "processes: 4, but there are 2 tasks of srun: start 4"),
        ({"SLURM_JOB_ID": "7"}, 4, "slurm", "one process by itself in SLURM's job 7: start as many with srun"),
    ],
)
def test_processes_that_do_not_fit_the_tasks(env: dict[str, str], processes: int, launch: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_processes(config(processes, launch), env)
    assert message in str(refused.value)


def test_launch_slurm_means_the_allocation_where_there_is_one() -> None:
    asked = config(4, "slurm")
    assert not trains_here(asked, {})
    assert trains_here(asked, SRUN) and trains_here(asked, {"SLURM_JOB_ID": "7"})
    assert not trains_here(config(4), {"SLURM_JOB_ID": "7"}), "a plain command in a batch script starts its processes"


# Commands, as one of two tasks


@pytest.fixture
def one_of_two_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ONE_NODE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\nprocesses: 4\n")
    (tmp_path / "run").mkdir()
    given = RunConfig.model_validate({"task": f"{tmp_path}/task.py:Mine", "processes": 4})
    run_folder.write_config(tmp_path / "run", given)


@pytest.mark.usefixtures("one_of_two_tasks")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "config.yaml"], "processes: 4, but there are 2 tasks of srun"),
        (["train", "config.yaml", "--dry-run"], "processes: 4, but there are 2 tasks of srun"),
        (["resume", "run"], "processes: 4, but there are 2 tasks of srun"),
        (["verify", "config.yaml"], "run it by itself, not under a launcher"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_starts(command: list[str], message: str) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not Path("runs").exists()


@pytest.mark.usefixtures("one_of_two_tasks")
@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["schema"], ["init", "new"]])
def test_what_does_not_train_works_anywhere(command: list[str]) -> None:
    assert CliRunner().invoke(main, command).exit_code == 0


@pytest.mark.usefixtures("one_of_two_tasks")
def test_the_doctors_own_processes_stand_for_themselves() -> None:
    assert not {"SLURM_STEP_ID", "SLURM_PROCID"} & set(environment())
    assert not launched(environment())


def test_lockstep_train_from_python_does_not_submit() -> None:
    with pytest.raises(ConfigError, match="submit with `lockstep train`"):
        lockstep.train({"task": "collections:OrderedDict"}, launch="slurm")
