"""Runs on a real SLURM: munged, slurmctld and two slurmd on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TASK_FILE, Finished, Project, Started, losses, steps_saved, summary, wait_until
from lockstep.distributed.batch import nodes
from slurm_cluster import SlurmCluster

TINY = f"{TASK_FILE}:Tiny"
SECRET = {"LOCKSTEP_SECRET": "known to the tasks of this job alone"}
SLOW = {"task": {"type": TINY, "sleep": 0.05}, "train": {"epochs": 6, "batch_size": 12}}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def srun(project: Project, slurm: SlurmCluster, *options: str, command: tuple[str, ...], **env: str) -> Finished:
    argv = ["srun", *options, sys.executable, "-m", "lockstep", *command]
    return Started(argv, project.folder, {**slurm.env, **env}).wait()


def submit(project: Project, slurm: SlurmCluster, *arguments: str, **values: Any) -> tuple[str, Path]:
    """Its number, and the run's folder."""
    asked, out = {"type": "slurm", **values.pop("launch", {})}, values.pop("out", "runs")
    finished = project.run("train", project.config(launch=asked, **values), *arguments, env=slurm.env)
    assert finished.code == 0, finished.text
    return finished.out.strip(), project.only_run(out)


def ended(slurm: SlurmCluster, job: str, limit: float = 90.0) -> dict[str, str]:
    wait_until(lambda: slurm.state(job)["JobState"] in ENDED, limit, f"the end of job {job}")
    return slurm.state(job)


def test_names_that_the_task_does_not_have_are_refused_before_the_queue(project: Project, slurm: SlurmCluster) -> None:
    config = project.config(launch={"type": "slurm"}, train={"epochs": 1, "batch_size": 12, "freeze": ["0.wieght"]})
    refused = project.run("train", config, env=slurm.env)
    assert refused.code == 2 and "train.freeze: 0.wieght: no parameter has a name like that" in refused.err
    assert not refused.out and not list((project.folder / "runs").glob("*")), "neither a job nor a folder"


def let_go_on(slurm: SlurmCluster, job: str, restarts: int = 1, limit: float = 60.0) -> None:
    """SLURM lets a job that was requeued wait for two minutes; whoever may can shorten it.

    Not to nothing: what was revoked and what is given out must not have the same second.
    """
    wait_until(lambda: _is(slurm.state(job), "PENDING", restarts), limit, "the job in the queue once more")
    time.sleep(2)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")


def _is(state: dict[str, str], name: str, restarts: int) -> bool:
    return (state["JobState"], state["Restarts"]) == (name, str(restarts))


def output(run: Path) -> str:
    return "\n".join(each.read_text() for each in sorted((run / "slurm").glob("*.out")))


@pytest.mark.requirement("X04")
def test_srun_over_two_nodes_trains_what_one_machine_does(project: Project, slurm: SlurmCluster) -> None:
    digits = ("train", str(ROOT / "examples" / "digits.yaml"), "--set", "train={steps: 12, batch_size: 64}")
    quick = (
        "--set",
        "log={every: 1 step}",
        "--set",
        "runtime=cpu",
        "--set",
        "early_stop=null",
        "--set",
        "validate.every=12 steps",
        "--set",
        "launch.threads=1",  # a node's one process would have both cores, and sum up otherwise
    )
    finished = srun(project, slurm, "-N2", "-n2", command=(*digits, *quick, "--out", "slurm"), **SECRET)
    assert finished.code == 0, finished.text
    alone = project.run(*digits, *quick, "--out", "alone")
    assert alone.code == 0, alone.text
    run, reference = project.only_run("slurm"), project.only_run("alone")
    assert losses(run) == losses(reference) and len(losses(run)) == 12
    topology = json.loads((run / "topology.json").read_text())
    assert [(each["host"], each["local_rank"]) for each in topology["ranks"]] == [("n1", 0), ("n2", 0)]


@pytest.mark.long
def test_nodes_may_have_different_numbers_of_tasks(project: Project, slurm: SlurmCluster) -> None:
    command = ("train", str(project.config(processes=3)), "--out", "slurm")
    finished = srun(project, slurm, "-N2", "-n3", command=command, **SECRET)
    assert finished.code == 0, finished.text
    run = project.only_run("slurm")
    topology = json.loads((run / "topology.json").read_text())
    assert [(each["host"], each["local_rank"]) for each in topology["ranks"]] == [("n1", 0), ("n1", 1), ("n2", 0)]
    assert losses(run) == pytest.approx(losses(project.train(processes=1)), rel=1e-6)


def test_what_srun_started_is_checked_before_anything_is_trained(project: Project, slurm: SlurmCluster) -> None:
    config = str(project.config(processes=2))
    finished = srun(project, slurm, "-N2", "-n3", command=("train", config), **SECRET)
    assert finished.code == 2
    assert "processes: 2, but there are 3 tasks of srun (2, 1 on 2 hosts): start 2 in all" in finished.err
    finished = srun(project, slurm, "-N2", "-n2", command=("train", config))
    assert finished.code == 3 and "Set LOCKSTEP_SECRET to the same text on all hosts" in finished.err
    assert not (project.folder / "runs").exists()


def test_one_task_starts_the_processes_of_its_host(project: Project, slurm: SlurmCluster) -> None:
    finished = srun(project, slurm, "-N1", "-n1", command=("train", str(project.config())))
    assert finished.code == 0, finished.text
    assert summary(project.only_run())["world_size"] == 2


@pytest.mark.long
def test_a_trained_model_is_evaluated_and_predicts_by_tasks_and_by_a_job(project: Project, slurm: SlurmCluster) -> None:
    run = project.train(task={"type": f"{ROOT / 'tests' / 'after_tasks.py'}:Useful"})
    here = json.loads(project.run("evaluate", run, "--json").out)
    finished = srun(project, slurm, "-N2", "-n2", command=("evaluate", str(run), "--json"), **SECRET)
    assert finished.code == 0, finished.text
    assert json.loads(finished.out)["metrics"] == here["metrics"]
    queued = project.run("evaluate", run, "--set", "launch={type: slurm, slurm: {nodes: 2}}", env=slurm.env)
    assert queued.code == 0 and str(run / "evaluations.jsonl") in queued.text, queued.text
    noted = wait_until(lambda: (run / "evaluations.jsonl").read_text().splitlines()[2:], 60, "what the job found")
    assert json.loads(noted[0])["metrics"] == here["metrics"]
    out = [project.folder / f"{name}.parquet" for name in ("here", "tasks")]
    assert project.run("predict", run, "--data", "test", "--out", out[0], "-n", "1").code == 0
    command = ("predict", str(run), "--data", "test", "--out", str(out[1]))
    finished = srun(project, slurm, "-N2", "-n2", command=command, **SECRET)
    assert finished.code == 0, finished.text
    assert out[0].read_bytes() == out[1].read_bytes()


OWN_LOOP = """
import os
import lockstep

def main(run):
    host = run._engine.topology.place.host
    print("rank", run.rank, "of", run.world_size, "told", os.environ["RANK"], host, flush=True)
    run.barrier("done")
    return run.rank

if __name__ == "__main__":
    lockstep.launch(main, runtime="cpu", log={"jsonl": False})
"""


def test_a_script_with_its_own_loop_needs_no_secret_on_one_node(project: Project, slurm: SlurmCluster) -> None:
    (project.folder / "own_loop.py").write_text(OWN_LOOP)
    finished = Started(["srun", "-N1", "-n2", sys.executable, "own_loop.py"], project.folder, slurm.env).wait()
    assert finished.code == 0, finished.text
    (node,) = re.findall(r"rank 0 of 2 told 0 (n[12])\b", finished.out)
    assert f"rank 1 of 2 told 1 {node}" in (project.only_run() / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize("text", ["n[1-2,07-09],gpu4", "rack[1-2]-n[1,3]", "n[098-101],n5"])
def test_node_lists_are_what_scontrol_says(text: str, slurm: SlurmCluster) -> None:
    assert nodes(text) == slurm.command("scontrol", "show", "hostnames", text).split()


# launch: slurm


def test_a_job_saves_when_it_is_told_queues_again_and_goes_on(project: Project, slurm: SlurmCluster) -> None:
    job, run = submit(project, slurm, launch={"slurm": {"nodes": 2}}, **SLOW)
    wait_until(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) > 8, what="the eighth step")
    slurm.command("scancel", "--signal=TERM", job)  # what --signal=TERM@120 sends, to the ranks and not to the script
    let_go_on(slurm, job)
    assert summary(run)["status"] == "preempted"
    (saved, *_) = reversed(steps_saved(run))
    end = ended(slurm, job)
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("COMPLETED", "1", "0:0"), output(run)
    assert summary(run)["status"] == "completed"
    assert f"saved at step {saved}" in (run / "logs" / "rank-0.log").read_text()
    undisturbed = project.train(out="undisturbed", **SLOW)
    assert losses(run) == losses(undisturbed)
    assert_no_secret(run, slurm, job)


def assert_no_secret(run: Path, slurm: SlurmCluster, job: str) -> None:
    """The ranks of two nodes had one, that nobody was told."""
    script = (run / "slurm" / "job.sh").read_text()
    shown = slurm.command("scontrol", "show", "job", job) + slurm.command("scontrol", "write", "batch_script", job, "-")
    assert "LOCKSTEP_SECRET" not in script + shown + output(run)


@pytest.mark.long
def test_a_job_that_is_cancelled_saves_and_does_not_come_back(project: Project, slurm: SlurmCluster) -> None:
    job, run = submit(project, slurm, processes=1, **SLOW)
    wait_until(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) > 4, what="the fourth step")
    slurm.command("scancel", job)
    end = ended(slurm, job)
    wait_until(lambda: not slurm.command("squeue", "-h", "--job", job, check=False).strip(), what="the job's end")
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0")
    assert summary(run)["status"] == "preempted" and steps_saved(run)
    planned = project.run("resume", run, "--dry-run")
    assert "sbatch --parsable --requeue --job-name=tiny" in planned.out and f"run={run}" in planned.out
    again = project.run("resume", run, env=slurm.env)
    assert again.code == 0, again.text
    assert ended(slurm, again.out.strip())["JobState"] == "COMPLETED", output(run)
    assert summary(run)["status"] == "completed" and len(losses(run)) == max(losses(run))


@pytest.mark.long
def test_a_job_that_is_requeued_from_outside_goes_on(project: Project, slurm: SlurmCluster) -> None:
    """As by preemption: SLURM signals the whole job, the script included, and queues it again itself."""
    job, run = submit(project, slurm, processes=1, **SLOW)
    wait_until(lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) > 4, what="the fourth step")
    slurm.command("scontrol", "requeue", job)
    let_go_on(slurm, job)
    end = ended(slurm, job)
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), output(run)
    assert summary(run)["status"] == "completed" and len(losses(run)) == max(losses(run))


@pytest.mark.long
def test_a_run_that_fails_ends_the_job_with_its_exit_code(project: Project, slurm: SlurmCluster) -> None:
    failing = {"type": TINY, "fail_at": {"rank": 1, "step": 3, "how": "exception"}}
    job, run = submit(project, slurm, task=failing)
    end = ended(slurm, job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "5:0", "0"), output(run)
    assert summary(run)["status"] == "failed"
    assert "lockstep: rank 1 of 2 on n1 failed: ValueError: this example cannot be right" in output(run)


@pytest.mark.long
def test_the_time_limit_itself(project: Project, slurm: SlurmCluster) -> None:
    """SLURM counts in minutes."""
    slow = {"task": {"type": TINY, "sleep": 0.5}, "train": {"epochs": 30, "batch_size": 12}}
    asked = {"slurm": {"nodes": 2, "time": "2:00", "signal_before": "30 s"}}
    job, run = submit(project, slurm, launch=asked, timeouts={"stop": "20 s"}, **slow)
    for restarts in range(1, 5):
        wait_until(lambda n=restarts: slurm.state(job)["JobState"] in ENDED or _is(slurm.state(job), "PENDING", n), 180)
        if slurm.state(job)["JobState"] in ENDED:
            break
        assert summary(run)["status"] == "preempted"
        assert f"saved at step {steps_saved(run)[-1]} and leaving: SIGTERM" in (run / "logs/rank-0.log").read_text()
        let_go_on(slurm, job, restarts)
    end = ended(slurm, job, 10)
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) > 0, output(run)
    assert sorted(losses(run)) == list(range(1, 211))


# What is refused


def test_what_sbatch_refuses_is_told_in_its_words(project: Project, slurm: SlurmCluster) -> None:
    config = project.config(launch={"type": "slurm", "slurm": {"partition": "$(nobody) has"}})
    finished = project.run("train", config, env=slurm.env)
    assert finished.code == 2 and "invalid partition specified: $(nobody) has" in finished.err
    assert not list((project.folder / "runs").iterdir()), "nothing was begun"


def test_without_sbatch(project: Project, tmp_path: Path) -> None:
    config = project.config(launch="slurm")
    finished = project.run("train", config, env={"PATH": str(tmp_path)})
    assert finished.code == 2 and "launch: slurm needs sbatch, which is not on this machine" in finished.err
    assert not list((project.folder / "runs").iterdir())


def test_a_dry_run_prints_what_can_be_pasted(project: Project) -> None:
    config = project.config(launch={"type": "slurm", "slurm": {"nodes": 2, "account": "a b"}})
    finished = project.run("train", config, "--dry-run")
    assert finished.code == 0, finished.text
    assert "--ntasks=2 --signal=TERM@120" in finished.out and "'--account=a b'" in finished.out
    assert '-P -m lockstep resume "$run"' in finished.out and f"run={project.folder}/runs/RUN_DIR" in finished.out
    assert not (project.folder / "runs").exists()
    script = finished.out[finished.out.index("#!/bin/bash") : finished.out.index("# submitted with")]
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=10, env=dict(os.environ)).returncode == 0
