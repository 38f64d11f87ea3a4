"""lockstep.ray.TorchConfig on real Ray: a drop-in for Ray's own, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import wait_until
from ray_cluster import Fit, Nodes, notes, shown

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

import ray_bodies as bodies

import lockstep.ray
from lockstep.config.schema import RayCluster, RunSettings
from lockstep.errors import ConfigError, LaunchError, NonFiniteLoss, PeerLost, RankMissing, WorkerFailed
from lockstep.ray import TorchConfig
from lockstep.ray.backend import TorchBackend, XlaBackend, _resolved, answer
from lockstep.ray.failures import cause_of
from lockstep.ray.installed import RayMissing, require_ray, version_problem
from lockstep.ray.placement import WorkerInfo, device_index, rendezvous_address, scaling, topologies
from lockstep.ray.xla import mesh_shape, run_settings
from lockstep.runtime import pjrt

MISLEADING = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}


@pytest.mark.long
@pytest.mark.requirement("R01")
@pytest.mark.requirement("R02")
@pytest.mark.requirement("R03")
@pytest.mark.requirement("R06")
def test_what_works_with_rays_own_config_works(fit: Fit, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the environment says something else of ranks: they are passed as parameters."""
    misled = {"worker_runtime_env": {"env_vars": MISLEADING}}
    fit(bodies.plain, loop_config={"notes": str(tmp_path)}, run_config=misled)
    seen = notes(tmp_path)
    assert [seen[rank][0]["sum"] for rank in (0, 1)] == [3.0, 3.0]
    assert seen[0][0]["model"] == "DistributedDataParallel"
    for rank in (0, 1):
        environment = seen[rank][0]["environment"]
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")
        assert seen[rank][0]["world"] == [rank, 2, int(environment["LOCAL_RANK"])]
        assert (environment["MASTER_ADDR"], environment["NODE_RANK"]) == ("127.0.0.1", "0")
    assert seen[0][0]["environment"]["MASTER_PORT"] == seen[1][0]["environment"]["MASTER_PORT"] != "1"
    printed = shown(capfd, "Worker 1: CPU device initialized")
    for rank in (0, 1):
        assert f"Worker {rank}: CPU device initialized: cpu for worker rank {rank} (physical device " in printed
    table = [line for line in printed.splitlines() if "TrainController" in line]
    assert any("all 2 workers are here" in line for line in table)
    assert sum("/cpu/pid-" in line for line in table) == 2


@pytest.mark.long
@pytest.mark.requirement("R12")
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_without_torch_xla_an_import_error_says_what_to_install(fit: Fit) -> None:
    with pytest.raises(Exception, match="controller error") as failed:
        fit(bodies.plain, backend="xla_tpu", xla_spmd_config={"data_parallel_size": 2})
    cause = cause_of(failed.value)
    assert isinstance(cause, ImportError)
    assert "the worker on node" in str(cause)
    assert "pip install 'lockstep-train[xla]'" in str(cause)
    wait_until(_nothing_is_reserved, what="placement groups to be given back")


@pytest.mark.long
def test_task_code_that_a_worker_cannot_import(fit: Fit) -> None:
    with pytest.raises(Exception, match="controller error") as failed:
        fit(bodies.plain, task="no_such_module:Task")
    cause = cause_of(failed.value)
    assert isinstance(cause, ConfigError)
    assert re.match(
        r"rank [01] on \S+: the task's code cannot be imported on this worker: .*no_such_module", str(cause)
    )
    assert "runtime_env" in str(cause)


def test_waiting_for_workers_has_a_limit_and_prefers_the_cause(nodes: Nodes) -> None:
    @ray.remote(num_cpus=0)
    def work(kind: str) -> str:
        if kind == "lost":
            raise PeerLost("lost the connection to another rank")
        if kind == "bad":
            time.sleep(0.3)
            raise ConfigError("the setting is wrong")
        time.sleep(60 if kind == "slow" else 0)
        return kind

    assert answer([work.remote("a"), work.remote("b")], "answering", 60) == ["a", "b"]
    with pytest.raises(ConfigError, match="the setting is wrong"):
        answer([work.remote("lost"), work.remote("bad"), work.remote("a")], "answering", 60)
    slow = [work.remote("a"), work.remote("slow")]
    with pytest.raises(RankMissing, match=r"rank 1 of 2 took more than 2 s for answering"):
        answer(slow, "answering", 2)
    ray.cancel(slow[1], force=True)


@pytest.mark.parametrize("error", [NonFiniteLoss(3, 1, float("nan")), WorkerFailed(1, "host", "it was killed", 7)])
def test_errors_of_ours_come_back_whole(nodes: Nodes, error: Any) -> None:
    @ray.remote(num_cpus=0)
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as failed:
        answer([fail.remote()], "failing", 60)
    assert (str(failed.value), failed.value.exit_code) == (str(error), error.exit_code)


# What is refused before anything is started


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "mpi"}, "backend='mpi' is not known; it is one of auto, gloo, nccl, xla, xla_tpu"),
        ({"join_timeout_s": 0}, "join_timeout_s=0 must be a number greater than 0"),
        ({"timeout_s": "long"}, "timeout_s='long' must be a number"),
        ({"backend": "xla", "xla_memory_fraction": 1.5}, "xla_memory_fraction=1.5 must be .* at most 1"),
        ({"backend": "gloo", "xla_spmd_config": {}}, "xla_spmd_config is for backend='xla' or 'xla_tpu', not 'gloo'"),
        ({"backend": "xla", "xla_spmd_config": {"data": 2}}, "'data' is not known; the keys are mesh_shape"),
        ({"backend": "xla", "xla_spmd_config": {"data_parallel_size": 0}}, "data_parallel_size=0 must be a whole"),
        ({"backend": "xla", "xla_spmd_config": {"mesh_shape": [2]}}, r"mesh_shape=\[2\] must be two whole numbers"),
        ({"settings": {"sed": 1}}, "sed"),
        ({"settings": {"processes": 4}}, r"settings\['processes'\]: Ray's ScalingConfig says"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused_at_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchConfig(**values)


def test_the_backend_that_auto_stands_for() -> None:
    assert _resolved("auto", {"CPU": 1}) == "gloo"
    assert _resolved("auto", {"CPU": 1, "GPU": 1}) == "nccl"
    assert _resolved("auto", {"TPU": 4}) == "xla"
    with pytest.raises(ConfigError, match=r"backend='nccl' needs GPUs.*use_gpu=True"):
        _resolved("nccl", {"CPU": 1})


@pytest.mark.requirement("R08")
def test_an_xla_worker_sees_only_the_devices_that_ray_gave_it() -> None:
    """Ray changes CUDA_VISIBLE_DEVICES for backends that share it among the workers of a node."""
    assert TorchConfig(backend="xla_tpu").backend_cls is XlaBackend
    assert TorchConfig(backend="xla").backend_cls is XlaBackend
    assert XlaBackend.share_cuda_visible_devices is False
    assert TorchConfig(backend="nccl").backend_cls is TorchBackend
    assert TorchBackend.share_cuda_visible_devices is True


def test_ray_is_told_of_gpus_and_of_the_slice_that_tpu_workers_form() -> None:
    assert not scaling(RayCluster(), 2, {"CPU": 1.0}).use_gpu
    assert scaling(RayCluster(), 2, {"CPU": 1.0, "GPU": 0.5}).use_gpu
    assert scaling(RayCluster(), 1, {"CPU": 1.0, "TPU": 4.0}).use_tpu
    slice_of_two = scaling(RayCluster(topology="2x2x2", accelerator="TPU-V4"), 2, {"TPU": 4.0})
    assert (slice_of_two.topology, slice_of_two.accelerator_type) == ("2x2x2", "TPU-V4")
    with pytest.raises(ConfigError, match=r"2 workers with TPU 4 each: `topology` must be specified"):
        scaling(RayCluster(), 2, {"TPU": 4.0})


@pytest.mark.requirement("R09")
@pytest.mark.requirement("R13")
def test_xla_settings_follow_from_what_ray_gave_the_workers() -> None:
    """Memory limits go by names that PJRT reads; one backend serves TPUs and other PJRT devices."""
    found = run_settings(RunSettings(), None, (0.8, False), _info("a", "one", tpus=4), 2)
    assert found.runtime == "xla"
    assert pjrt.variables(found, {}) == {
        "PJRT_DEVICE": "TPU",
        "PJRT_ALLOCATOR_FRACTION": "0.8",
        "PJRT_ALLOCATOR_PREALLOCATE": "false",
    }
    for more, family in (({"gpus": ("0",)}, "CUDA"), ({}, "CPU")):
        found = run_settings(RunSettings(), None, (None, None), _info("a", "one", **more), 2)
        assert pjrt.variables(found, {}) == {"PJRT_DEVICE": family}


@pytest.mark.requirement("R11")
def test_the_mesh_of_an_spmd_config() -> None:
    spmd = {"data_parallel_size": 2, "model_parallel_size": 4}
    on_tpu = run_settings(RunSettings(), spmd, (None, None), _info("a", "one", tpus=4), 2)
    assert (on_tpu.strategy.type, on_tpu.strategy.mesh) == ("spmd", {"data": 2, "model": 4})
    alone = run_settings(RunSettings(), spmd, (None, None), _info("a", "one"), 1)
    assert (alone.strategy.type, alone.devices) == ("spmd", 8)
    apart = run_settings(RunSettings(), {"data_parallel_size": 2}, (None, None), _info("a", "one"), 2)
    assert (apart.strategy.type, apart.strategy.mesh) == ("ddp", {"data": 2, "model": 1})
    with pytest.raises(ConfigError, match="on PJRT CPU no mesh spans the 2 workers"):
        run_settings(RunSettings(), {"model_parallel_size": 2}, (None, None), _info("a", "one"), 2)


@pytest.mark.requirement("R11")
def test_a_mesh_must_fit_the_devices() -> None:
    assert mesh_shape({"data_parallel_size": 2}, 2) == (2, 1)
    assert mesh_shape({"data_parallel_size": 2}, 8) == (2, 4)
    assert mesh_shape({"model_parallel_size": 2}, 8) == (4, 2)
    assert mesh_shape({"mesh_shape": [4, 2], "data_parallel_size": 4}, 8) == (4, 2)
    assert mesh_shape({}, 4) == (4, 1)
    with pytest.raises(ConfigError, match=r"3 x 2 \(data x model\) is a mesh of 6 devices, but the workers have 8"):
        mesh_shape({"mesh_shape": [3, 2]}, 8)
    with pytest.raises(ConfigError, match="mesh of 3 devices, but the workers have 2"):
        mesh_shape({"data_parallel_size": 3}, 2)
    with pytest.raises(ConfigError, match="contradicts model_parallel_size=1"):
        mesh_shape({"mesh_shape": [4, 2], "model_parallel_size": 1}, 8)


def test_a_ray_that_does_not_fit_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [version_problem(each) for each in ("2.52.0", "2.55.1", "2.60.0", "2.60.1rc0")] == [None] * 4
    for version in ("2.51.2", "2.61.0", "3.0.0", "1.13.0", "what"):
        assert f"Ray {version} is installed; lockstep.ray works with Ray 2.52 to 2.60" in str(version_problem(version))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(RayMissing, match=r"pip install 'lockstep-train\[ray\]'"):
        require_ray()
    assert issubclass(RayMissing, ImportError) and RayMissing.exit_code == 2


def test_the_run_is_there_only_where_it_can_be() -> None:
    with pytest.raises(LaunchError, match="inside the training function of a TorchTrainer"):
        lockstep.ray.run()


# Where the workers are


def _info(node: str, host: str, address: str = "10.0.0.1", port: int = 4000, **more: Any) -> WorkerInfo:
    return WorkerInfo(node, host, address, port, **more)


@pytest.mark.requirement("R04")
def test_topologies_from_where_ray_put_the_workers() -> None:
    workers = [_info("aaaaaaaaaa", "one"), _info("bbbbbbbbbb", "two", "10.0.0.2"), _info("aaaaaaaaaa", "one")]
    assert rendezvous_address(workers) == ("10.0.0.1", 4000)
    found = topologies(workers, *rendezvous_address(workers))
    assert [each.place.rank for each in found] == [0, 1, 2]
    assert [each.place.local_rank for each in found] == [0, 0, 1]
    assert [each.local_world_size for each in found] == [2, 1, 2]
    assert [each.place.host_index for each in found] == [0, 1, 0]
    assert {(each.world_size, each.host_count) for each in found} == {(3, 2)}


def test_workers_of_one_machine_meet_on_loopback_and_nodes_are_told_apart() -> None:
    workers = [_info("aaaaaaaaaa", "one"), _info("bbbbbbbbbb", "one")]
    assert rendezvous_address(workers) == ("127.0.0.1", 4000)
    assert [each.place.host for each in topologies(workers, "127.0.0.1", 1)] == ["one/aaaaaaaa", "one/bbbbbbbb"]


@pytest.mark.requirement("R05")
def test_a_worker_uses_the_gpu_that_ray_gave_it() -> None:
    shared = {"visible_gpus": ("4", "6")}
    assert device_index(_info("a", "one", gpus=("6",), **shared), 0) == 1
    assert device_index(_info("a", "one", gpus=("4",), **shared), 1) == 0
    assert device_index(_info("a", "one"), 3) == 3
    with pytest.raises(LaunchError, match="Ray gave GPU 5 on one"):
        device_index(_info("a", "one", gpus=("5",), **shared), 0)


def _nothing_is_reserved() -> bool:
    return all(each["state"] == "REMOVED" for each in ray.util.placement_group_table().values())
