"""The doctor's policies, as tables; and a process that hangs, crashes or babbles costs an answer, not the asker."""

from __future__ import annotations

import json
import math
import re
import resource
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from lockstep.doctor import check as report
from lockstep.doctor import installed, machine, runtimes
from lockstep.doctor.ask import Answer, Question, unanswered
from lockstep.doctor.check import GIB, MIB, Check, duration, exit_code, overall, size
from lockstep.launchers.local import limits

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# Verdicts


@pytest.mark.parametrize(
    ("verdicts", "expected", "code"),
    [
        ([], "ok", 0),
        (["ok", "none"], "ok", 0),
        (["none"], "ok", 0),
        (["ok", "warn", "none"], "warn", 0),
        (["fail", "warn", "ok"], "fail", 1),
    ],
)
def test_the_gravest_verdict_is_that_of_all(verdicts: list[Any], expected: str, code: int) -> None:
    checks = [Check("a check", each, "") for each in verdicts]
    assert (overall(checks), exit_code(checks)) == (expected, code)


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


def test_the_supported_versions_are_those_of_the_package() -> None:
    assert PROJECT["requires-python"] == str(installed.PYTHON)
    assert f"torch{installed.TORCH}" in PROJECT["dependencies"]


def test_the_dependencies_are_those_of_the_package() -> None:
    assert sorted(installed.REQUIREMENTS.values()) == sorted(PROJECT["dependencies"])


def test_an_error_is_blamed_on_the_package_that_is_missing_or_raised_it() -> None:
    import click

    def raised(action: Any) -> BaseException:
        with pytest.raises(Exception) as caught:
            action()
        return caught.value

    assert installed.culprit(raised(lambda: __import__("pydantic.not_there"))) == "pydantic"
    assert installed.culprit(raised(lambda: click.Choice(["a"]).convert("b", None, None))) == "click"
    assert installed.culprit(raised(lambda: 1 // 0)) == ""
    other = runtimes.judge("cpu", Answer(None, "loading pydantic: ...", module="pydantic"), asked=True)
    assert [check.remedy for check in other] == ["pip install --force-reinstall 'pydantic>=2'"]


def test_every_optional_package_is_named_by_its_extra() -> None:
    for package, extra in installed.EXTRAS.items():
        named = [re.match(r"[\w-]+", each) for each in PROJECT["optional-dependencies"][extra]]
        assert any(each and each[0] == package for each in named), package


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.8.1", "fail"), ("2.9.0", "ok"), ("2.15.3+cu130", "ok"), ("2.16.0a0+git1", "warn"), ("10.0", "warn")],
)
def test_torch_has_to_be_in_range(version: str, verdict: str) -> None:
    check = installed.torch(version)
    assert (check.verdict, bool(check.remedy)) == (verdict, verdict != "ok")


@pytest.mark.parametrize(("version", "verdict"), [("3.10.14", "fail"), ("3.11.0", "ok"), ("3.14.0rc1", "warn")])
def test_python_has_to_be_in_range(version: str, verdict: str) -> None:
    assert installed.python(version).verdict == verdict


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
    assert installed.extras(found, asked).verdict == verdict


# The machine


def test_no_variable_is_shown_but_those_that_matter() -> None:
    check = machine.variables({"OMP_NUM_THREADS": "4", "AWS_SECRET_ACCESS_KEY": "hunter2"})
    assert (check.found, check.data) == ("OMP_NUM_THREADS=4", {"OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize(
    ("usable", "limit", "count", "verdict"),
    [(8, None, 8, "ok"), (8, None, 9, "warn"), (8, 8.0, 2, "ok"), (8, 1.5, 1, "warn"), (8, 0.5, 1, "warn")],
)
def test_cores(usable: int, limit: float | None, count: int, verdict: str) -> None:
    assert machine.cores(usable, 16, limit, count).verdict == verdict


@pytest.mark.parametrize(
    ("available", "limit", "count", "verdict"),
    [
        (8 * GIB, None, 4, "ok"),
        (None, None, 4, "ok"),
        (1 * GIB, None, 4, "warn"),
        (8 * GIB, 1 * GIB, 4, "warn"),
        (8 * GIB, 1 * GIB, 2, "ok"),
    ],
)
def test_memory(available: int | None, limit: int | None, count: int, verdict: str) -> None:
    assert machine.memory(16 * GIB, available, limit, count).verdict == verdict


@pytest.mark.parametrize(
    ("total", "free", "problem", "verdict"),
    [
        (None, 0, "", "none"),
        (8 * GIB, 8 * GIB, "", "ok"),
        (64 * MIB, 64 * MIB, "", "warn"),
        (8 * GIB, 1000, "", "fail"),
        (8 * GIB, 8 * GIB, "cannot be written: Permission denied", "fail"),
    ],
)
def test_shared_memory(total: int | None, free: int, problem: str, verdict: str) -> None:
    assert machine.shared_memory(total, free, problem).verdict == verdict


@pytest.mark.parametrize(
    ("soft", "hard", "count", "verdict"),
    [
        (1024, 4096, 2, "ok"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2, "ok"),
        (256, 4096, 2, "warn"),  # the default of macOS
        (59, 4096, 2, "fail"),
        (1024, 1024, 300, "fail"),
    ],
)
def test_open_files(soft: int, hard: int, count: int, verdict: str) -> None:
    check = machine.open_files(soft, hard, count)
    assert check.verdict == verdict
    assert ("administrator" in check.remedy) == (verdict != "ok" and hard < 4096)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"free": 5 * GIB, "seconds": 0.01, "problem": ""}, "ok"),
        ({"free": 100 * MIB, "seconds": 0.01, "problem": ""}, "warn"),
        ({"free": 5 * GIB, "seconds": 3.0, "problem": ""}, "warn"),
        ({"free": 5 * GIB, "seconds": None, "problem": "Read-only file system"}, "fail"),
        (None, "fail"),
    ],
)
def test_disk(facts: dict[str, Any] | None, verdict: str) -> None:
    value = None if facts is None else {"folder": "/data", "total": 9 * GIB, **facts}
    assert machine.judge_disk(Answer(value, "writing did not end within 60 s")).verdict == verdict


def test_a_folder_that_is_yet_to_be_made_is_judged_by_where_it_will_be(tmp_path: Path) -> None:
    found = machine.write_to_disk(lambda name: None, str(tmp_path / "a" / "b"))
    assert (found["folder"], found["problem"]) == (str(tmp_path), "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert machine.write_to_disk(lambda name: None, str(tmp_path / "file"))["problem"] == "Not a directory"


@pytest.mark.parametrize(
    ("problem", "chosen", "verdict"),
    [
        ("", None, "ok"),
        ("", "eth0,lo", "ok"),
        ("", "ib0", "fail"),
        ("Connection timed out", None, "fail"),
    ],
)
def test_ports(monkeypatch: pytest.MonkeyPatch, problem: str, chosen: str | None, verdict: str) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert machine.ports(problem, ["lo", "eth0"], chosen).verdict == verdict


def test_a_port_of_this_machine_opens_and_a_name_that_nobody_has_is_a_warning() -> None:
    assert machine.port_problem() == ""
    assert machine.hostname("here", Answer(machine.look_up(lambda name: None, "127.0.0.1"))).verdict == "ok"
    foreign = machine.hostname("here", Answer(machine.look_up(lambda name: None, "192.0.2.1")))
    assert (foreign.verdict, foreign.found) == (
        "warn",
        "here is 192.0.2.1: 192.0.2.1 is not an address of this machine",
    )
    assert machine.hostname("here", Answer(None, "looking up did not end within 60 s")).verdict == "warn"


@pytest.mark.parametrize(
    ("installed_at", "jump", "verdict"), [(0.0, 0.0, "ok"), (9e8, 0.1, "ok"), (2e9, 0.0, "warn"), (0.0, -3.0, "warn")]
)
def test_clock(installed_at: float, jump: float, verdict: str) -> None:
    assert machine.judge_clock(1e9, installed_at, jump).verdict == verdict
    assert machine.clock(machine.clock_offset()).verdict == "ok"


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
    assert (limits.core_limit(*where), limits.memory_limit(*where)) == (1.5, GIB)
    assert limits.core_limit(tmp_path, tmp_path / "nowhere") is None


def test_sizes_and_times() -> None:
    assert [size(each) for each in (12, 1536, 64 * MIB, 23.5 * GIB, 1022 * GIB)] == [
        "12 bytes", "1.5 KiB", "64 MiB", "23.5 GiB", "1022 GiB",
    ]  # fmt: skip
    assert [duration(each) for each in (12.34, 0.0123, 42e-6)] == ["12.3 s", "12.3 ms", "42 µs"]


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
    assert checks[1].found == "GPU-1, H200, 79 GiB of 80 GiB free, loss 2.0000 then 1.5000 in 100 ms"
    alone = list(runtimes.judge("cuda", Answer({"devices": [STEP], "collectives": False}), asked=False))
    assert (alone[0].verdict, "NCCL" in alone[0].remedy) == ("warn", True)


@pytest.mark.parametrize(
    ("driver", "built_for", "visible", "asked", "verdict"),
    [
        (False, None, None, False, "none"),
        (False, "13.0", None, False, "none"),
        (True, "13.0", "", False, "none"),
        (True, "13.0", "-1", True, "fail"),
        (True, None, None, False, "warn"),  # auto would train on the CPU, and the GPU stay idle
        (True, "13.0", None, False, "warn"),
        (True, "13.0", "0", True, "fail"),
        (False, None, None, True, "fail"),
    ],
)
def test_no_gpu(driver: bool, built_for: str | None, visible: str | None, asked: bool, verdict: str) -> None:
    facts = {"devices": [], "torch": "2.13.0", "built_for": built_for, "driver": driver, "problem": "no driver"}
    check = runtimes.no_gpu(facts, visible, asked)
    assert (check.verdict, bool(check.remedy)) == (verdict, verdict != "none")


def test_xla_that_was_asked_for_and_torch_that_is_not_there() -> None:
    assert (runtimes.no_xla(False).verdict, runtimes.no_xla(True).verdict) == ("none", "fail")
    assert [check.verdict for check in runtimes.not_tried([])] == ["none"] * 3
    assert [(check.name, check.verdict) for check in runtimes.not_tried(["xla"])] == [("xla", "fail")]


# Processes


def rank(**changes: Any) -> dict[str, Any]:
    return {"correct": True, "latency": 1e-4, "barrier": 2e-4, "seconds": {str(MIB): 1e-3}, **changes}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(), rank(latency=3e-4)], ["ok", "ok", "ok"]),
        ([rank(), rank(barrier=0.5)], ["ok", "warn", "ok"]),
        ([rank(), rank(correct=False)], ["fail"]),
    ],
)
def test_what_ranks_measured(ranks: list[dict[str, Any]], expected: list[str]) -> None:
    checks = list(runtimes.judge_processes(Answer({"ranks": ranks, "seconds": 3.0}), 2, "cpu"))
    assert [check.verdict for check in checks] == expected


def test_bandwidth_is_that_of_the_slowest_rank() -> None:
    ranks = [rank(), rank(seconds={str(MIB): 2e-3})]
    *_, bandwidth = runtimes.judge_processes(Answer({"ranks": ranks, "seconds": 3.0}), 2, "cpu")
    assert bandwidth.data["gigabytes_per_second"] == {str(MIB): pytest.approx(0.524288)}


def test_a_launch_that_fails_is_told_in_its_own_words_and_more_time_is_offered_to_a_late_one() -> None:
    (failed,) = runtimes.judge_processes(Answer(None, "rank 1 of 2 on here failed: no"), 2, "cpu")
    assert (failed.verdict, failed.found) == ("fail", "rank 1 of 2 on here failed: no")
    (late,) = runtimes.judge_processes(Answer(None, "starting did not end within 60 s", late=True), 2, "cpu")
    assert "--limit" in late.remedy and "--limit" not in failed.remedy


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
