"""Runs that older versions have begun go on (docs/versions.md): as those would have gone on themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import Project, losses

OLDER = Path(__file__).with_name("older")


@pytest.mark.parametrize("version", ["0.3", pytest.param("0.4", marks=pytest.mark.long), "0.5"])
def test_a_run_of_an_older_version_goes_on(project: Project, version: str) -> None:
    run = project.folder / "run"
    shutil.copytree(OLDER / version, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("small.py:Small", f"{OLDER / 'small.py'}:Small"))
    before = losses(run)
    whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in whole if json.loads(line)["step"] <= 16]
    (run / "metrics.jsonl").write_text("".join(kept))

    finished = project.run("resume", run)
    assert finished.code == 0, finished.text
    assert "restored step-00000016" in finished.text and "changed:" not in finished.text
    after = losses(run)
    assert after.keys() == before.keys() and 18 in after
    assert after == pytest.approx(before, rel=1e-5)
