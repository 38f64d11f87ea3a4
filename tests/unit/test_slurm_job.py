"""The batch job of `launch: slurm` as data: what sbatch is given, the script, and what is refused before it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.config.load import validate, with_values
from lockstep.config.schema import RunConfig
from lockstep.config.sweep import Sweep
from lockstep.errors import ConfigError
from lockstep.launchers import slurm as jobs
from lockstep.record import run_folder, trials

PYTHON = shlex.join([sys.executable, "-P", "-m", "lockstep"])


def config(processes: int | str = "auto", grace: float = 60, **slurm: Any) -> RunConfig:
    launch = {"type": "slurm", "slurm": slurm}
    raw = {"name": "digits", "task": "a.b:C", "processes": processes, "launch": launch, "timeouts": {"stop": grace}}
    return jobs.resolved(validate(RunConfig, raw, {}, "config.yaml"))


def test_the_command_and_the_script_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked = config(
        nodes=2, tasks_per_node=4, gpus_per_node=4, cpus_per_task=8, partition="gpu", account="me & you", qos="high",
        time="12:00:00",
        extra={"mem": "64G", "exclusive": True, "mail-type": "END", "constraint": "$(a) 'b\"", "no-kill": False},
    )  # fmt: skip
    found = jobs.of_run(asked, Path("/runs/a run"))
    assert list(found.argv) == [
        "sbatch", "--parsable", "--requeue", "--job-name=digits", "--partition=gpu", "--account=me & you", "--qos=high",
        "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8", "--gpus-per-node=4", "--time=12:00:00",
        "--signal=TERM@120", f"--chdir={tmp_path}", "--export=ALL", "--open-mode=append", "--mem=64G", "--exclusive",
        "--mail-type=END", "--constraint=$(a) 'b\"", "--output=/runs/a run/slurm/%j.out", "/runs/a run/slurm/job.sh",
    ]  # fmt: skip
    assert shlex.split(found.render().splitlines()[-1]) == list(found.argv)
    assert (
        found.script
        == f"""\
#!/bin/bash
# Written by Lockstep: starts the run, and goes on with it when the job was requeued.
run='/runs/a run'
told=
trap 'told=1' TERM
srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=8 \\
    {PYTHON} resume "$run"
code=$?
if [ "$code" -eq 75 ] && [ -z "$told" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit "$code"
    echo "lockstep: the job could not be requeued; go on with: lockstep resume $run" >&2
fi
exit "$code"
"""
    )


@pytest.mark.parametrize("name", ["two words", "$(touch x)", "it's", 'a"b', "-x", "a;b", "`id`", "*", "50%"])
def test_folders_arrive_as_they_are(name: str, tmp_path: Path) -> None:
    """By a shell, with srun, scontrol and the interpreter replaced by what writes down its arguments."""
    found = jobs.of_run(config(nodes=1), tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("srun", "scontrol"):
        (tools / tool).write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {tools}/said-by-{tool}\nexit 75\n')
        (tools / tool).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "12"}
    done = subprocess.run(
        ["bash", "-c", found.script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 75
    assert (tools / "said-by-srun").read_text().split("\0")[-2] == str(tmp_path / name)
    assert (tools / "said-by-scontrol").read_text() == "requeue\0" + "12\0"
    assert str(tmp_path / name) in done.stderr, "the refused requeue says how to go on"
    assert not (tmp_path / "x").exists()
    (output,) = (each for each in found.argv if each.startswith("--output="))
    assert output.replace("%%", "%") == f"--output={tmp_path}/{name}/slurm/%j.out"


def test_a_folder_that_slurm_cannot_name_is_refused() -> None:
    for name in ("a\nb", "a\\b", "a\x1bb"):
        with pytest.raises(ConfigError, match="name another one with --out"):
            jobs.of_run(config(), Path("/runs") / name)


@pytest.mark.parametrize(
    ("processes", "slurm", "tasks"),
    [
        ("auto", {}, 1), ("auto", {"nodes": 3}, 3), ("auto", {"nodes": 2, "tasks_per_node": 4}, 8),
        ("auto", {"nodes": 2, "gpus_per_node": 8}, 16), (3, {"nodes": 2}, 3), (8, {"nodes": 2, "tasks_per_node": 4}, 8),
        (4, {"nodes": 2, "gpus_per_node": 4}, 4),
    ],
)  # fmt: skip
def test_how_many_tasks(processes: int | str, slurm: dict[str, int], tasks: int) -> None:
    assert config(processes, **slurm).processes == tasks


@pytest.mark.parametrize(
    ("processes", "slurm", "message"),
    [
        (6, {"nodes": 2, "tasks_per_node": 4}, "2 nodes with 4 tasks on each, which are 8 tasks"),
        (1, {"nodes": 2}, "every node needs a process at least"),
        (1, {"time": 90}, "launch.slurm.time: input should be a valid string"),
        (1, {"partition": "a\nb"}, "must be text in one line"),
        (1, {"extra": {"signal": "KILL@1"}}, "signal is not for extra: Lockstep sets it"),
        (1, {"extra": {"--mem": "1G"}}, "write it without dashes before it"),
        (1, {"extra": {"mem=1;x": "1G"}}, "is no long option of sbatch"),
        (1, {"extra": {"comment": "a\nb"}}, "must be text in one line"),
        (1, {"extra": {"comment": ["a"]}}, "must be text, a whole number, or true"),
        (1, {"tasks": 3}, "unknown key"),
    ],
)
def test_what_is_refused_before_anything_is_submitted(processes: int, slurm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(processes, grace=300, **slurm)
    assert message in str(refused.value)


def test_the_warning_is_long_enough_to_save() -> None:
    assert jobs.warning(config(grace=300)) == 300
    assert jobs.warning(config(signal_before="10 minutes")) == 600


def test_the_table_is_what_the_runs_say(tmp_path: Path) -> None:
    asked = Sweep.model_validate({"metric": "val/loss", "space": {"seed": {"grid": [1, 2, 3, 4]}}})
    found = [trials.Trial(number, {"seed": number + 1}, "queued", None, None) for number in range(4)]
    for each in found:
        (tmp_path / each.folder).mkdir()
        run_folder.write_config(tmp_path / each.folder, with_values(config(), each.values))
    trials.write_sweep(tmp_path, asked)
    trials.write_trials(tmp_path, found)
    said = [
        {"status": "completed", "epoch": 2, "metrics": {"val/loss": 0.5}},
        {"status": "preempted", "epoch": 1, "metrics": {"val/loss": 0.1}},
        {"status": "completed", "epoch": 2, "metrics": {"val/loss": 0.25}},
    ]
    for number, summary in enumerate(said):
        (tmp_path / trials.trial_folder(number) / "summary.json").write_text(json.dumps(summary))
    shown = CliRunner().invoke(main, ["sweep", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "2 of 4 trials have not ended" in shown.output and "best: trial 2, val/loss 0.25 with seed=3" in shown.output
    assert "queued" in shown.output and "preempted" in shown.output
    assert "seed: 3" in (tmp_path / "best.yaml").read_text()


def test_what_is_no_sweep(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        shown = CliRunner().invoke(main, ["sweep", str(folder)])
        assert shown.exit_code == 2 and "is not the folder of a sweep" in shown.output
    (tmp_path / "sweep.yaml").write_text("space: {seed: {grid: [1]}}\n")
    for text in ("[", "[{}]", '[{"number": "x"}]', "{}3"):
        (tmp_path / "sweep.json").write_text(text)
        shown = CliRunner().invoke(main, ["sweep", str(tmp_path)])
        assert shown.exit_code == 2 and "does not list the trials" in shown.output
