"""Reading runs: whole ones, damaged ones, long ones, and those that are at work."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

import run_folders
from lockstep.errors import ConfigError
from lockstep.record.folder_lease import Holder
from lockstep.runs.data import Curve, merged, page_data, title_of
from lockstep.runs.data import thinned as thinned_curve
from lockstep.runs.findings import findings, verdict
from lockstep.runs.reader import LOST, read_run, status_of
from lockstep.runs.records import Entry, Lags, Span, live_of, seconds_by_kind, spans_of
from lockstep.runs.records import thinned_lags as thinned
from lockstep.runs.report import leave_report, report_page, write_report
from run_folders import BEGAN, completed, failed, lines, rows


def spans(*entries: Entry, until: float | None = None) -> list[tuple[str, float, float]]:
    return [(each.kind, each.begin, each.end) for each in spans_of(entries, until)]


def test_training_is_what_is_left_between_the_other_phases() -> None:
    found = spans(
        Entry(0, "start"), Entry(2, "roll call", 3), Entry(4, "train"), Entry(6, "validate", 7), Entry(7, "save", 8),
        Entry(10, "end", status="completed"),
    )  # fmt: skip
    assert found == [("start", 0, 2), ("roll call", 2, 3), ("start", 3, 4), ("train", 4, 6), ("validate", 6, 7),
                     ("save", 7, 8), ("train", 8, 10)]  # fmt: skip


def test_a_restart_lasts_until_training_goes_on_and_between_starts_there_is_nothing() -> None:
    found = spans(
        Entry(0, "start"), Entry(1, "train"), Entry(5, "restart"), Entry(6, "roll call", 7), Entry(8, "train"),
        Entry(9, "end"), Entry(20, "start"), Entry(21, "train"), until=25,
    )  # fmt: skip
    assert found == [("start", 0, 1), ("train", 1, 5), ("restart", 5, 6), ("roll call", 6, 7), ("restart", 7, 8),
                     ("train", 8, 9), ("start", 20, 21), ("train", 21, 25)]  # fmt: skip


def test_phases_that_overlap_count_once() -> None:
    found = spans_of([Entry(0, "train"), Entry(1, "validate", 4), Entry(2, "save", 3), Entry(3, "save", 6)], 8)
    assert seconds_by_kind(found) == {"train": 3, "validate": 3, "save": 2}


def test_what_is_too_short_to_be_seen_is_drawn_with_its_neighbours_and_nothing_is_lost() -> None:
    many = [Span("train" if at % 2 else "save", at, at + 1) for at in range(10_000)]
    drawn = merged(many, 100)
    assert len(drawn) <= 200 and (drawn[0].begin, drawn[-1].end) == (0, 10_000)
    assert merged(many[:50], 100) == many[:50]


@pytest.mark.parametrize(
    ("said", "kinds", "heard", "at_work", "status"),
    [
        ("running", ["start", "train"], 1.0, None, "running"),
        ("running", ["start", "train"], 900.0, None, LOST),
        ("running", ["start", "train"], 900.0, True, "running"),  # a fork server takes its time
        ("running", ["start", "train"], 1.0, False, LOST),
        ("running", ["start", "train", "end"], 900.0, False, "failed"),
        ("completed", ["start", "train", "end"], 900.0, None, "completed"),
        ("completed", ["start", "train", "end", "start"], 1.0, True, "running"),  # resumed
        ("completed", [], 900.0, None, "completed"),  # of before there were timelines
        ("preempted", ["start", "train"], 900.0, False, "preempted"),
    ],
)
def test_how_a_run_is(said: str, kinds: list[str], heard: float, at_work: bool | None, status: str) -> None:
    timeline = [Entry(1000 + at, kind, status="failed" if kind == "end" else "") for at, kind in enumerate(kinds)]
    live = live_of({"at": 2000 - heard, "ranks": []})
    assert status_of({"status": said}, timeline, live, 2000, at_work) == status


def test_a_process_that_holds_the_folder_is_at_work_and_one_that_is_gone_is_not(tmp_path: Path) -> None:
    run = completed(tmp_path / "run", status="running")
    lines(run / "timeline.jsonl", run_folders.entry(0, "start"))
    (run / ".lock").write_bytes(Holder("its launcher").encode())
    assert read_run(run).status == "running"
    assert read_run(run, over=True).status == LOST
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (run / ".lock").write_bytes(Holder("its launcher", pid=int(gone.stdout)).encode())
    assert read_run(run).status == LOST and verdict(read_run(run)).kind == "bad"


def test_thinning_keeps_the_highest_and_the_lowest() -> None:
    drawn = random.Random(0)
    values = [drawn.gauss(0, 1) for _ in range(100_000)]
    values[31_234], values[77_777] = 50.0, -50.0
    points = thinned_curve(Curve("loss", [float(at) for at in range(100_000)], values), 600)
    assert len(points["x"]) == 600 and points["x"][-1] == 99_999
    assert max(points["high"]) == 50.0 and min(points["low"]) == -50.0
    assert all(low <= mean <= high for low, mean, high in zip(points["low"], points["y"], points["high"], strict=True))
    few = thinned_curve(Curve("loss", [1.0, 2.0], [3.0, 4.0]), 600)
    assert few == {"x": [1.0, 2.0], "y": [3.0, 4.0]}


def test_charts_have_what_belongs_together() -> None:
    names = {
        "val/loss": "loss",
        "train/loss": "loss",
        "train/epoch_loss": "loss",
        "epoch_gradient_norm": "gradient norm",
        "val/night/loss": "loss",
        "lr": "learning rate",
        "lr/1": "learning rate",
        "gradient_norm": "gradient norm",
        "examples_per_second": "examples per second",
        "mine/x": "mine/x",
    }
    assert {name: title_of(name) for name in names} == names


def test_of_many_ranks_and_a_long_time_the_slowest_are_kept() -> None:
    behind = [[0.0] * 1024 for _ in range(1000)]
    behind[500][700] = 9.0
    lags = Lags(
        tuple(map(float, range(1000))), tuple(map(float, range(1, 1001))), tuple(range(1000)), tuple(map(tuple, behind))
    )
    small = thinned(lags, 30_000)
    assert sum(map(len, small.behind)) <= 30_000 and small.ranks_in_a_row == 8
    assert max(map(max, small.behind)) == 9.0 and max(small.behind[500 // small.merged]) == 9.0


def test_a_slow_rank_and_a_restart_are_told(tmp_path: Path) -> None:
    slow = read_run(completed(tmp_path / "slow"))
    assert verdict(slow).text == "completed at epoch 3, step 300 after 55.0 s of training"
    assert [each.text for each in findings(slow)] == [
        "behind the fastest rank in a step: rank 2 on host-1 by 40 ms; the others wait for it"
    ]
    again = read_run(failed(tmp_path / "again", restarted=True))
    assert verdict(again).text.endswith("after 1 restart")
    assert findings(again)[0].text.startswith("restarted after step ") and "<script>" in findings(again)[0].text
    broken = read_run(failed(tmp_path / "broken"))
    assert verdict(broken).text == (
        "failed after epoch 3, step 120: "
        "rank 1 of 2 on host-0 failed: ValueError: <script>alert(1)</script> is no batch"
    )


def test_a_folder_that_is_damaged_or_half_written_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = completed(tmp_path / "<b>&amp;'\"", count=10)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"step": 11, "train/loss": NaN, "examples_per_second": 1.0}\n[1]\n{"step": "x"}\n\xff\xfe\n{"step": 12, '
        )
    for name in ("summary.json", "topology.json", "live.json", "config.yaml"):
        (run / name).write_text('{"ranks": [1, {"rank": "a"}], "world_size": {"', encoding="utf-8")
    lines(run / "timeline.jsonl", "nothing", '{"at": "x"}', '{"at": 1e400, "kind": "train"}', '{"kind": 3}', "[" * 5000)
    lines(run / "lags.jsonl", '{"at": 1, "busy": []}', '{"at": 1, "busy": ["x", null]}')
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    found = read_run(run)
    assert list(found.curves["train/loss"].steps) == [*range(1, 11)] and found.step == 11
    assert not found.timeline and found.checkpoints[0].problem
    assert "train/loss was not a finite number at step 11" in [each.text for each in findings(found)]
    page = report_page([found])
    assert "<b>&amp;" not in page.replace("&lt;b&gt;", "") and "\\u003cb>" in page
    assert page.count("</script>") == 3 and "http-equiv" in page


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"neither config\.yaml nor summary\.json"):
        read_run(tmp_path)
    told: list[str] = []
    assert leave_report(tmp_path / "none", told.append) is None and "there is no such folder" in told[0]
    run = completed(tmp_path / "run", count=10)
    (run / "report.html").mkdir()
    assert leave_report(run, told.append) is None and told[1].startswith("no report.html: ")


def test_the_page_of_a_long_run_and_of_many_metrics_is_small(tmp_path: Path) -> None:
    long = completed(tmp_path / "long", count=100_000)
    many = completed(tmp_path / "many", count=1)
    names = {f"layer.{at}/gradient": float(at) for at in range(10_000)}
    lines(many / "metrics.jsonl", *({"step": step, **names, "examples_per_second": 1.0} for step in range(3)))
    began = time.process_time()
    write_report([long], tmp_path / "long.html")
    took = time.process_time() - began
    assert (tmp_path / "long.html").stat().st_size < 2_000_000
    assert took < 10  # two seconds, where others leave this process a core
    write_report([many], tmp_path / "many.html")
    text = (tmp_path / "many.html").read_text(encoding="utf-8")
    assert len(text) < 2_000_000 and '"left_out":9601' in text


def test_a_page_needs_nothing_from_anywhere(tmp_path: Path) -> None:
    page = report_page([read_run(failed(tmp_path / "run"))])
    assert "src=" not in page.split("<script>")[0] and "default-src &#x27;none&#x27;" in page
    assert "<script>alert(1)" not in page


def test_reading_runs_needs_no_torch() -> None:
    code = (
        "import sys, lockstep.runs.report, lockstep.runs.report, lockstep.runs.server; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}).returncode == 0


def test_several_runs_share_the_size_of_a_page(tmp_path: Path) -> None:
    found = [read_run(completed(tmp_path / str(at), count=5000)) for at in range(3)]
    data = page_data(found)
    assert len(data["runs"]) == 3 and len(json.dumps(data)) < 1_000_000
    assert data["charts"][0] == {"title": "loss", "names": ["train/epoch_loss", "train/loss", "val/loss"]}
    assert data["runs"][0]["timeline"]["spans"][0][1] == BEGAN
    assert len(rows(5000)) == 5050
    few = read_run(completed(tmp_path / "few", count=1))
    assert len(page_data([few] * 1501)["runs"]) == 1501
