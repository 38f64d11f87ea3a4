"""`launch: ray`: the same run on a cluster of our own or on somebody else's, as the command line starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from conftest import ROOT, Project, losses, rows, steps_saved, summary, wait_until
from lockstep.cli import main
from lockstep.config.schema import RayCluster
from lockstep.errors import LaunchError
from lockstep.ray.installed import RayMissing
from lockstep.runs.reader import read_run
from ray_cluster import Nodes
from ray_launching import LIMIT, OnRay, Places, assert_same_weights

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lockstep-train[ray]'")

ADDRESS_NOBODY_HAS = "127.0.0.1:1"


def test_names_that_the_task_does_not_have_are_refused_before_ranks_start(on_ray: OnRay) -> None:
    refused = on_ray.project.run("train", on_ray.config(optimizer={"type": "torch.optim.SGDD", "lr": 0.1}))
    assert refused.code == 2 and "torch.optim has no 'SGDD', did you mean SGD" in refused.err, refused.text
    assert not list((on_ray.project.folder / "runs").glob("*/logs/*")), "no rank was started"


def test_on_a_cluster_of_our_own_the_run_is_the_same_as_without_ray(on_ray: OnRay, undisturbed: Path) -> None:
    started = on_ray.start(on_ray.config())
    on_ray.run_folder()
    listening = {each.laddr.ip for process in started.members() for each in process.net_connections("inet")
                 if each.status == psutil.CONN_LISTEN}  # fmt: skip
    finished = started.wait(LIMIT)
    assert finished.code == 0, finished.text
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, "nothing beyond this machine"
    assert "it listens on 127.0.0.1 alone, to who has the token in" in finished.err
    assert Path(finished.err.partition("the token in ")[2].split()[0]).stat().st_mode & 0o077 == 0
    run = on_ray.project.only_run()
    assert_same_weights(run, undisturbed)
    assert losses(run) == losses(undisturbed)
    assert summary(run)["status"] == "completed" and summary(run)["world_size"] == 2
    assert steps_saved(run) == steps_saved(undisturbed)
    out = finished.out.splitlines()
    assert " roll call: all 2 ranks are here, in" in finished.out
    assert 0 < sum("train/loss" in line for line in out) <= sum("train/loss" in row for row in rows(run))
    last = rows(run)[-1]["step"]
    assert sum(f" step {last}/" in line and "examples/s" in line for line in out) == 1, "a row is shown once"
    assert f"the task is in {on_ray.folder} and has travelled" in finished.out, "what rank 0 prints is shown"
    assert finished.out.count("the task is in") == 1, "what other ranks print is in their logs"
    assert "the task is in" in (run / "logs" / "rank-1.log").read_text()
    assert "lockstep: completed: epoch 4" in finished.err
    assert "Traceback" not in finished.text and "raylet" not in finished.text
    assert not list(run.glob(".driver-*"))
    looked_at = read_run(run)  # by the driver and rank 0 together
    assert [each.kind for each in looked_at.timeline if each.kind != "save" and each.kind != "validate"] == [
        "start", "roll call", "train", "end",
    ]  # fmt: skip
    assert looked_at.live is not None and [each.rank for each in looked_at.live.ranks] == [0, 1]
    assert looked_at.lags and (run / "report.html").is_file()


@pytest.mark.long
def test_across_nodes_with_the_code_travelling_then_stopped_and_resumed(
    places: Places,
    on_ray: OnRay,
    undisturbed: Path,
) -> None:
    (on_ray.folder / ".env").write_text("SECRET=hidden\n")
    shared = on_ray.folder / "shared"
    task = {"type": "recorder.py:Recorder", "orders": str(on_ray.orders), "sleep": 0.1}
    settings = places.ray(placement="STRICT_SPREAD", storage=str(shared))
    started = on_ray.start(on_ray.config(task=task, ray=settings))
    (run,) = wait_until(lambda: [each.parent for each in shared.glob("*/metrics.jsonl")], 90, "the first step")
    wait_until(lambda: max(losses(run), default=0) >= 3, what="the third step")
    started.process.send_signal(signal.SIGTERM)
    finished = started.wait(LIMIT)
    assert finished.code == 75, finished.text
    assert "lockstep: SIGTERM: finishing the step, saving and leaving" in finished.err
    assert f"go on with: lockstep resume {run}" in finished.err
    assert summary(run)["status"] == "preempted"

    hosts = {each["host"] for each in json.loads((run / "topology.json").read_text())["ranks"]}
    assert len(hosts) == 2, "a rank on each node"
    for host in hosts:
        assert f"  {host}  " in finished.out, "the table of ranks and nodes is shown"
    (place,) = [line for line in finished.out.splitlines() if line.startswith("the task is in")]
    assert str(on_ray.folder) not in place, "the task's folder travelled"
    (beside,) = [line for line in finished.out.splitlines() if line.startswith("beside it:")]
    assert "neighbour.py" in beside and ".env" not in beside and "runs" not in beside
    wait_until(lambda: not places.workers(), 20, "all workers to be gone")
    assert _placement_groups(places.address) == [], "no placement group is left"

    resumed = on_ray.project.run("resume", run, limit=LIMIT)
    assert resumed.code == 0, resumed.text
    assert "restored step-" in resumed.out
    assert_same_weights(run, undisturbed)
    assert losses(run) == losses(undisturbed)


def _placement_groups(address: str) -> list[Any]:
    """Ask the cluster, from a process of its own."""
    import subprocess

    script = (
        "import json, logging, ray; from ray.util import placement_group_table as table\n"
        f"ray.init(address={address!r}, log_to_driver=False, logging_level=logging.ERROR)\n"
        "print(json.dumps([each for each in table().values() if each['state'] != 'REMOVED']))"
    )
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(asked.stdout.splitlines()[-1])  # type: ignore[no-any-return]


# Bad input


@pytest.mark.long
def test_a_trained_model_is_evaluated_and_predicts_on_the_nodes(places: Places, project: Project) -> None:
    run = project.train(task={"type": f"{ROOT / 'tests' / 'after_tasks.py'}:Useful"}, processes=1)
    on_nodes = ["--set", f"launch={json.dumps({'type': 'ray', 'ray': places.ray()})}", "-n", "2", "--json"]
    here, there = ({}, {})
    out = {name: project.folder / f"{name}.parquet" for name in ("here", "there")}
    for name, how, told in (("here", ["--json"], here), ("there", on_nodes, there)):
        for command in (["evaluate", run], ["predict", run, "--data", "test", "--out", out[name]]):
            finished = project.run(*command, *how)
            assert finished.code == 0, finished.text
            told[command[0]] = json.loads(finished.out)
    assert there["evaluate"]["world_size"] == there["predict"]["world_size"] == 2
    for name, value in here["evaluate"]["metrics"].items():
        assert there["evaluate"]["metrics"][name] == pytest.approx(value, rel=1e-6)
    assert out["here"].read_bytes() == out["there"].read_bytes()


def test_a_cluster_that_asks_nobody_for_a_token_or_has_no_room_is_refused(nodes: Nodes) -> None:
    from lockstep.ray import cluster, placement

    address = str(nodes.cluster.address)
    with pytest.raises(LaunchError, match=f"the Ray cluster at {address} asks nobody .*launch.ray.insecure: true"):
        cluster.require_authentication(address, insecure=False)
    cluster.require_authentication(address, insecure=True)
    settings = RayCluster(placement_timeout=1.0)
    with pytest.raises(LaunchError, match=r"no room for 64 workers with CPU 1 each \(PACK\) in 1 s .*free are CPU"):
        placement.find(settings, 64, {"CPU": 1.0})
    assert placement.find(settings, 1, {"CPU": 1.0}) == 1


def test_the_token_of_a_cluster_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.ray import cluster

    file = tmp_path / "deep" / "token"
    assert cluster.private_token(file).stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    assert len(token) == 64
    file.chmod(0o644)  # as Ray makes it
    cluster.private_token(file)
    assert file.stat().st_mode & 0o777 == 0o600 and file.read_text() == token
    if os.geteuid() == 0:
        os.chown(file, 64999, 64999)
        with pytest.raises(LaunchError, match="is not this user's"):
            cluster.private_token(file)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(LaunchError, match=r"launch\.ray\.insecure: true"), cluster.asking_for_tokens(insecure=False):
        pass
    with cluster.asking_for_tokens(insecure=True) as nothing:
        assert nothing is None


@pytest.mark.long
def test_a_task_that_cannot_be_imported_on_the_workers(places: Places, on_ray: OnRay) -> None:
    file = on_ray.folder / "recorder.py"
    file.write_text(
        "import a_module_of_the_laptop\n" + file.read_text().replace("from __future__", "# from __future__")
    )
    settings = places.ray()
    finished = on_ray.start(on_ray.config(ray=settings, launch={"max_restarts": 3})).wait(LIMIT)
    assert finished.code == 2, finished.text
    assert "the task's code cannot be imported on this worker: ModuleNotFoundError" in finished.err
    assert "a_module_of_the_laptop" in finished.err and "runtime_env" in finished.err
    assert "restarting" not in finished.err, "the same would happen again"


def test_an_address_where_nobody_answers(on_ray: OnRay) -> None:
    result = CliRunner().invoke(main, ["train", str(on_ray.config(ray={"address": ADDRESS_NOBODY_HAS}))])
    assert result.exit_code == 2, result.output
    assert f"launch.ray.address: nobody answers at {ADDRESS_NOBODY_HAS}" in result.output


def test_storage_that_cannot_be_written(on_ray: OnRay) -> None:
    (on_ray.folder / "file").touch()
    settings = {"storage": str(on_ray.folder / "file" / "below")}
    result = CliRunner().invoke(main, ["train", str(on_ray.config(ray=settings))])
    assert result.exit_code == 2, result.output
    assert "launch.ray.storage" in result.output and "the run's folder cannot be made there" in result.output


@pytest.mark.parametrize(
    ("ray", "message"),
    [
        ({"address": "ray://head:10001"}, "launch.ray.address: ray Client (ray://) cannot carry a training run"),
        ({"resources": {"CPU": -1}}, "launch.ray.resources.CPU: input should be greater than or equal to 0"),
        ({"placment": "PACK"}, "launch.ray.placment: unknown key, did you mean placement?"),
        ({"placement": "TIGHT"}, "launch.ray.placement: must be one of PACK, SPREAD"),
    ],
)
def test_settings_that_cannot_be(project: Project, ray: dict[str, Any], message: str) -> None:
    config = project.config(launch={"type": "ray", "ray": ray})
    result = CliRunner().invoke(main, ["train", str(config)])
    assert result.exit_code == 2
    assert message in result.output


def test_without_ray_the_command_says_what_to_install(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RayMissing("lockstep.ray needs Ray, which is not installed: pip install 'lockstep-train[ray]'")

    monkeypatch.setattr("lockstep.ray.installed.require_ray", missing)
    result = CliRunner().invoke(main, ["train", str(project.config(launch="ray"))])
    assert result.exit_code == 2
    assert "which is not installed" in result.output


def test_a_dry_run_says_what_would_be_asked_of_ray(project: Project) -> None:
    env = {"env_vars": {"TOKEN": "secret-word"}, "pip": ["einops"]}
    ray = {"address": "head:6379", "resources": {"GPU": 1}, "runtime_env": env}
    config = project.config(launch={"type": "ray", "ray": ray}, runtime="cuda")
    result = CliRunner().invoke(main, ["train", str(config), "--dry-run"])
    assert result.exit_code == 0, result.output
    described = result.output[result.output.index("ray: head:6379") :]
    assert "workers: 2, PACK, each with CPU 1, GPU 1" in described
    assert "pip ['einops']" in described and "variables TOKEN" in described and "secret-word" not in described
