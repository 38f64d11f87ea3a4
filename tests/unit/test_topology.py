"""Who takes part: out to the environment and back, and no contradiction believed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.distributed.topology import Place, Topology, launched
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
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not: start the script with torchrun"),
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
