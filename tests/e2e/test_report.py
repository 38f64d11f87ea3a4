"""What is seen of runs afterwards, and while they are at work: real ones, in a real browser."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from browser import measured, needs_browser, run_browser
from conftest import ROOT, Project, rank_pids, summary, wait_until
from lockstep.cli.runs import report
from lockstep.runs.findings import findings, verdict
from lockstep.runs.reader import read_run
from lockstep.runs.records import read_live, seconds_by_kind
from lockstep.runs.server import RunsFolder, Server
from run_folders import completed, failed

# Ranks of one's own speed, of which one fails where it is told to.
TASK = """
import os, time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

class Uneven(lockstep.Task):
    def __init__(self, slow: float = 0.0, fails: int = 0):
        self.slow, self.fails, self.calls = slow, fails, 0
    def model(self):
        return nn.Linear(8, 2)
    def train_data(self):
        inputs = torch.randn(480, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())
    def loss(self, model, batch):
        inputs, labels = batch
        rank = int(os.environ["RANK"])
        if model.training:
            self.calls += 1
            time.sleep(0.01 + (self.slow if rank == 2 else 0.0))
            if rank == 1 and self.calls == self.fails:
                raise ValueError("no <b>labels</b> in this batch")
        return F.cross_entropy(model(inputs), labels)
"""


def uneven(project: Project, steps: int, processes: int, **task: Any) -> Path:
    (project.folder / "uneven.py").write_text(TASK, encoding="utf-8")
    return project.config(
        task={"type": "uneven.py:Uneven", **task}, processes=processes, train={"steps": steps, "batch_size": 48},
        log={"every": "2 steps", "gradient_norm": True}, checkpoint={"every": "20 steps"},
    )  # fmt: skip


def seen(runs: list[Path], folder: Path) -> list[dict[str, Any]]:
    """The pages that these runs ended with, at both widths, light and dark; none overflows, all charts are drawn."""
    pages = {run.name: (run / "report.html").read_text(encoding="utf-8") for run in runs}
    found = [each for dark in (False, True) for each in measured(pages, dark, folder)]
    for each in found:
        assert each["wide"] <= each["inner"] and each["plots"] == len(each["titles"]) > 0 and not each["foreign"], each
    return found


def test_a_failed_run_ends_with_its_report_and_its_exit_code(project: Project) -> None:
    finished = project.run("train", uneven(project, 40, 2, fails=12))
    assert finished.code == 5, finished.text
    run = project.only_run()
    found = read_run(run)
    assert verdict(found).text.startswith("failed after step ") and "rank 1 of 2" in verdict(found).text
    assert "no <b>labels</b> in this batch" in verdict(found).text and found.failures[0].traceback
    assert [each.kind for each in found.timeline][:3] == ["start", "roll call", "train"]
    assert found.timeline[-1].status == "failed" and found.live is not None and len(found.live.ranks) == 2
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "no \\u003cb>labels\\u003c/b> in this batch" in page and "<b>labels" not in page


def test_the_command_writes_one_page_of_several_runs(tmp_path: Path) -> None:
    first, second = completed(tmp_path / "first"), failed(tmp_path / "second")
    told = CliRunner().invoke(report, [str(first), str(second), "-o", str(tmp_path / "both.html")])
    assert told.exit_code == 0 and "2 runs" in told.output
    assert '"name":"second"' in (tmp_path / "both.html").read_text(encoding="utf-8")
    told = CliRunner().invoke(report, [str(first)])
    assert told.exit_code == 0 and (first / "report.html").is_file()
    assert "there is no such folder" in str(CliRunner().invoke(report, [str(tmp_path / "none")]).exception)
    (tmp_path / "taken").mkdir()
    told = CliRunner().invoke(report, [str(first), "-o", str(tmp_path / "no" / "page.html")])
    assert "cannot be written: No such file" in str(told.exception)


@needs_browser
@pytest.mark.long
def test_a_gpt_whose_rank_was_killed_tells_of_its_restart(project: Project) -> None:
    text = (ROOT / "examples" / "gpt.py").read_text(encoding="utf-8")
    (project.folder / "gpt.py").write_text(text, encoding="utf-8")
    started = project.start(
        "train", ROOT / "examples" / "gpt.yaml", "--set", "train.steps=40", "--set", "log.every=1 step",
        "--set", "checkpoint.every=10 steps", "--set", "validate.every=20 steps", "--set", "launch.max_restarts=1",
    )  # fmt: skip
    run = wait_until(lambda: next((project.folder / "runs").glob("gpt-*"), None), 120, "the run's folder")
    wait_until((run / "checkpoints" / "step-00000010").exists, 240, "a checkpoint")
    os.kill(rank_pids(run)[1], signal.SIGKILL)
    assert started.wait(400).code == 0
    found = read_run(run)
    assert verdict(found).text.endswith("after 1 restart")
    assert "rank 1 of 2" in findings(found)[0].text and "killed by SIGKILL" in findings(found)[0].text
    spent = seconds_by_kind(found.spans)
    assert {"start", "roll call", "train", "validate", "save", "restart"} <= spent.keys()
    for each in seen([run], project.folder):
        assert "restarted after step" in each["text"] and "killed by SIGKILL" in each["text"]
        assert each["sections"][:2] == ["head", "failures"] and each["heat"] == 1


@needs_browser
@pytest.mark.long
def test_a_slow_rank_is_named_and_digits_need_no_explaining(project: Project) -> None:
    finished = project.run("train", uneven(project, 60, 4, slow=0.08), "--out", "uneven", limit=300)
    assert finished.code == 0, finished.text
    slow = project.only_run("uneven")
    told = [each.text for each in findings(read_run(slow))]
    assert any(each.startswith("behind the fastest rank in a step: rank 2 by") for each in told), told
    finished = project.run("train", ROOT / "examples" / "digits.yaml", "--out", "digits", limit=300)
    assert finished.code == 0, finished.text
    digits = project.only_run("digits")
    for each in seen([slow, digits], project.folder):
        assert each["text"].splitlines()[2] == "completed" and "failures" not in each["sections"]
        assert ("rank 2 by" in each["text"]) == (each["name"] == slow.name)


@needs_browser
@pytest.mark.long
def test_a_run_at_work_is_followed_in_a_browser(project: Project) -> None:
    started = project.start("train", uneven(project, 4000, 2))
    run = wait_until(lambda: next((project.folder / "runs").glob("tiny-*"), None), 120, "the run's folder")
    with Server(RunsFolder(project.folder / "runs"), "127.0.0.1", 0) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:

            def shown() -> dict[str, Any]:
                with urllib.request.urlopen(f"{server.url}data.json?run={run.name}", timeout=30) as answer:
                    return json.loads(answer.read())["runs"][0]  # type: ignore[no-any-return]

            wait_until(lambda: len(shown()["series"].get("train/loss", {}).get("x", [])) > 3, 120, "rows")
            live = wait_until(
                lambda: (found := read_live(run)) and found.total_steps == 4000 and found, 60, "live.json"
            )
            assert live.age() < 30
            assert [each.rank for each in live.ranks] == [0, 1] and all(each.memory for each in live.ranks)
            before = shown()["series"]["train/loss"]["x"][-1]
            wait_until(lambda: shown()["series"]["train/loss"]["x"][-1] > before, 60, "another row")
            opened = run_browser(
                ["--virtual-time-budget=8000", "--dump-dom"], f"{server.url}run?run={run.name}", False, project.folder
            )
            assert "Ranks now" in opened.stdout and "running, at step" in opened.stdout and "all runs" in opened.stdout
            opened = run_browser(["--virtual-time-budget=4000", "--dump-dom"], server.url, False, project.folder)
            assert run.name in opened.stdout and "compare" in opened.stdout
        finally:
            started.process.send_signal(signal.SIGTERM)
            finished = started.wait(120)
            server.shutdown()
            serving.join(10)
    assert finished.code == 75, finished.text
    found = read_run(run)
    assert found.status == "preempted" and "preempt" in [each.kind for each in found.timeline]
    assert summary(run)["status"] == "preempted" and (run / "report.html").is_file()
