"""The doctor's policies, as tables; and a process that hangs, crashes or babbles costs an answer, not the asker."""

from __future__ import annotations

import json
import math
import re
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import ROOT
from lockstep.doctor import check as report
from lockstep.doctor import machine, runtimes
from lockstep.doctor.ask import Answer, Question, unanswered
from lockstep.doctor.check import Check, overall
from lockstep.launchers.local import limits

GIB = 2**30
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Verdicts


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "ok"),
        (["ok", "none"], "ok"),
        (["none"], "ok"),
        (["ok", "warn", "none"], "warn"),
        (["fail", "warn", "ok"], "fail"),
    ],
)
def test_the_gravest_verdict_is_that_of_all(verdicts: list[Any], expected: str) -> None:
    checks = [Check("a check", each, "") for each in verdicts]
    assert overall(checks) == expected


def test_a_check_is_a_line_and_its_remedy_another() -> None:
    check = Check("disk", "fail", "full", "make room")
    assert report.text(check).replace("\x1b[31m", "").replace("\x1b[0m", "") == (
        "fail  disk               full\n      remedy: make room"
    )
    assert report.conclusion([check, Check("cpu", "ok", "")]) == "does not work: disk"
    assert report.conclusion([Check("cpu", "warn", "")]) == "everything works; worth a look: cpu"


def test_the_json_is_json_also_where_a_loss_is_not_a_number() -> None:
    text = report.as_json([Check("cpu", "fail", "", data={"losses": [math.nan]})])
    assert json.loads(text, parse_constant=pytest.fail)["checks"][0]["data"] == {"losses": [None]}


# What is installed


def test_the_dependencies_are_those_of_the_package() -> None:
    named = [re.match(r"[\w-]+", each) for each in PROJECT["dependencies"]]
    assert sorted(machine.DEPENDENCIES.values()) == sorted(each[0] for each in named if each and each[0] != "torch")


@pytest.mark.parametrize(
    ("found", "asked", "verdict"),
    [
        ({}, [], "ok"),
        ({"torch": "2.13.0"}, [], "ok"),
        ({"torch": "2.9.0+cpu", "torch_xla": "2.9.1"}, ["xla"], "ok"),
        ({"torch": "2.13.0", "torch_xla": "2.9.0"}, [], "warn"),
        ({"torch": "2.13.0", "torch_xla": "2.9.0"}, ["xla"], "fail"),
    ],
)
def test_torch_xla_has_to_fit_torch(found: dict[str, str], asked: list[str], verdict: str) -> None:
    assert machine.optional(found, asked).verdict == verdict


# The machine


def test_no_variable_is_shown_but_those_that_matter() -> None:
    check = machine.variables({"OMP_NUM_THREADS": "4", "AWS_SECRET_ACCESS_KEY": "hunter2"})
    assert (check.found, check.data) == ("OMP_NUM_THREADS=4", {"OMP_NUM_THREADS": "4"})


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is yet to be made is judged by where it will be."""
    found = machine.write_to_disk(lambda name: None, str(tmp_path / "a" / "b"))
    assert (found.data["folder"], list(tmp_path.iterdir())) == (str(tmp_path), [])
    for free, verdict in ((5 * GIB, "ok"), (GIB // 10, "warn")):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert machine.write_to_disk(lambda name: None, str(tmp_path)).verdict == verdict
    (tmp_path / "file").touch()
    found = machine.write_to_disk(lambda name: None, str(tmp_path / "file"))
    assert found.verdict == "fail" and "cannot be written: Not a directory" in found.found


def test_a_port_of_this_machine_opens() -> None:
    assert machine.port().verdict == "ok"


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("4:memory:/box/inner\n1:cpu,cpuacct:/elsewhere\n0::/slice/inner\n")
    for name, text in {
        "cpu.max": "max 100000", "slice/cpu.max": "150000 100000", "slice/inner/cpu.max": "400000 100000",
        "slice/memory.max": "max", "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/box/memory.limit_in_bytes": str(GIB), "memory/box/inner/memory.limit_in_bytes": str(2 * GIB),
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    where = (tmp_path, tmp_path / "membership")
    assert limits.core_limit(*where) == 1.5
    assert limits.core_limit(tmp_path, tmp_path / "nowhere") is None


# Runtimes

STEP = {"device": "cuda:0", "identity": "GPU-1", "losses": [2.0, 1.5], "finite": True, "changed": True, "seconds": 0.1}


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({}, ""),
        ({"losses": [2.0, math.nan]}, "not finite"),
        ({"finite": False}, "not finite"),
        ({"changed": False}, "changed no weight"),
        ({"losses": [2.0, 2.0]}, "did not go down"),
        ({"error": "CUDA error: uncorrectable ECC error"}, "ECC"),
    ],
)
def test_a_step_has_to_do_what_a_step_does(changes: dict[str, Any], trouble: str) -> None:
    found = runtimes.step_problem({**STEP, **changes})
    assert trouble in found and bool(trouble) == bool(found)


def test_one_broken_gpu_fails_its_family_and_the_other_is_still_described() -> None:
    broken = {"device": "cuda:1", "identity": "GPU-2", "error": "uncorrectable ECC error"}
    facts = {"devices": [{**STEP, "name": "H200", "memory": 80 * GIB, "free_memory": 79 * GIB}, broken]}
    checks = list(runtimes.judge("cuda", Answer({**facts, "collectives": True}), asked=False))
    assert [(check.name, check.verdict) for check in checks] == [("cuda", "fail"), ("cuda:0", "ok"), ("cuda:1", "fail")]
    assert checks[0].found == "cuda:1: uncorrectable ECC error"
    assert checks[1].found == "GPU-1, H200, 84.8 GB of 85.9 GB free, loss 2.0000 then 1.5000 in 100 ms"
    alone = list(runtimes.judge("cuda", Answer({"devices": [STEP], "collectives": False}), asked=False))
    assert (alone[0].verdict, "NCCL" in alone[0].remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("driver", "visible", "asked", "verdict"),
    [
        (False, None, False, "none"),
        (True, "", False, "none"),
        (True, "-1", True, "fail"),
        (True, None, False, "warn"),  # auto would train on the CPU, and the GPU stay idle
        (True, "0", True, "fail"),
        (False, None, True, "fail"),
    ],
)
def test_no_gpu(driver: bool, visible: str | None, asked: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = runtimes.no_gpu({"devices": [], "driver": driver, "problem": "no driver"}, asked)
    assert (check.verdict, bool(check.remedy)) == (verdict, verdict != "none")


def test_xla_that_was_asked_for() -> None:
    for asked, verdict in ((False, "none"), (True, "fail")):
        (check,) = runtimes.judge("xla", Answer({"devices": []}), asked)
        assert check.verdict == verdict


# Processes


def test_what_ranks_found() -> None:
    for correct, verdict in ((True, "ok"), (False, "fail")):
        assert runtimes.judge_processes([{"correct": True}, {"correct": correct}], 3.0, "cpu").verdict == verdict


# Questions


@pytest.mark.parametrize(
    ("code", "stages", "errors", "expected"),
    [
        (None, [], "", "starting Python did not end within 5 s"),
        (None, ["loading torch", "opening cuda:3"], "", "opening cuda:3 did not end within 5 s"),
        (-11, ["loading torch"], "", "loading torch: the process ended: killed by SIGSEGV, exit code -11"),
        (1, [], "a\nb\n\nc\nd\n", "starting Python: the process ended: exit code 1 (b | c | d)"),
    ],
)
def test_why_there_is_no_answer(code: int | None, stages: list[str], errors: str, expected: str) -> None:
    assert unanswered(code, 5.0, stages, errors) == expected


@pytest.mark.parametrize(
    ("library", "limit", "trouble"),
    [
        ("import time; time.sleep(600)", 1.5, "loading torch_xla did not end within 1.5 s"),
        ("import os; os.abort()", 30, "loading torch_xla: the process ended: killed by SIGABRT, exit code -6"),
        ("raise ImportError('undefined symbol')", 30, "runtime: xla: torch_xla does not load with torch"),
        ("print('{not an answer}'); raise SystemExit(3)", 30, "loading torch_xla: the process ended: exit code 3"),
    ],
)
def test_a_runtime_that_hangs_or_crashes_is_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, limit: float, trouble: str
) -> None:
    (tmp_path / "torch_xla.py").write_text(library)
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with Question("runtime", "xla", limit=limit) as question:
        answer = question.answer()
    assert answer.problem.startswith(trouble)
    assert question._process.returncode is not None
    assert time.monotonic() - began < 20
    (check,) = runtimes.judge("xla", answer, asked=False)
    assert check.verdict == "fail"


def test_a_rank_of_this_shell_is_not_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_xla.py").write_text("import os; raise ImportError(os.environ.get('RANK', 'no rank'))")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "1")
    with Question("runtime", "xla", limit=30) as question:
        assert question.answer().problem.count(": no rank.") == 1
