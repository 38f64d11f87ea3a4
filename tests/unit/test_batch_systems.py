"""Under srun or mpirun every command that would train says that each of the tasks would be a run of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.config.schema import RunConfig
from lockstep.doctor.ask import environment
from lockstep.record import run_folder


@pytest.fixture(autouse=True)
def one_of_two_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("class Mine: pass\n")
    (tmp_path / "config.yaml").write_text("task: task.py:Mine\n")
    (tmp_path / "run").mkdir()
    run_folder.write_config(tmp_path / "run", RunConfig.model_validate({"task": f"{tmp_path}/task.py:Mine"}))


@pytest.mark.parametrize("command", [["train", "config.yaml"], ["resume", "run"], ["verify", "config.yaml"]])
def test_what_trains_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2, result.output
    assert "process 1 of 2 that srun started" in result.output and "srun -n1" in result.output
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["schema"], ["init", "new"]])
def test_what_does_not_train_is_not(command: list[str]) -> None:
    assert CliRunner().invoke(main, command).exit_code == 0


def test_the_doctors_own_processes_stand_for_themselves() -> None:
    assert not {"SLURM_STEP_ID", "SLURM_PROCID"} & set(environment())
