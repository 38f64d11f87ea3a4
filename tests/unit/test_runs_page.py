"""The page of runs, as a real browser shows it."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from browser import measured, needs_browser
from lockstep.runs.reader import read_run
from lockstep.runs.report import report_page
from run_folders import completed, failed, lines


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_legible_at_a_desk_and_on_a_phone(dark: bool, tmp_path: Path) -> None:
    slow = read_run(completed(tmp_path / f"slow-{'x' * 60}", count=3000))
    broken = read_run(failed(tmp_path / "broken <i>&amp;"))
    empty = completed(tmp_path / "empty", count=1)
    for name in ("metrics.jsonl", "timeline.jsonl", "lags.jsonl", "topology.json", "config.yaml"):
        (empty / name).unlink()
    pages = {"slow": report_page([slow]), "both": report_page([slow, broken]), "broken": report_page([broken]),
             "empty": report_page([read_run(empty)])}  # fmt: skip
    found = {(each["name"], each["width"]): each for each in measured(pages, dark, tmp_path)}
    assert len(found) == 8
    for each in found.values():
        assert each["wide"] <= each["inner"], f"{each['name']} overflows at {each['width']}"
        assert each["page"] == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
        assert not each["small"] and not each["foreign"]
    for width in (1280, 390):
        one = found["slow", width]
        assert one["titles"] == ["loss", "learning rate", "gradient norm", "examples per second"] and one["plots"] == 4
        assert one["heat"] == 1 and one["sections"] == ["head", "charts", "timeline", "topology", "config"]
        assert "rank 2 on host-1 by 40 ms" in one["text"] and "lowest to the highest" in one["text"]
        wrong = found["broken", width]
        assert "failures" in wrong["sections"] and "<script>alert(1)</script> is no batch" in wrong["text"]
        assert "return x < 1 & y" in wrong["text"] and wrong["text"].startswith("broken <i>&amp;")
        assert "What differs in their configs" in found["both", width]["text"]
        assert "No metrics were written yet" in found["empty", width]["text"]


def test_its_colours_are_told_apart_from_the_page() -> None:
    style = resources.files("lockstep.runs").joinpath("static", "report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", part)) for part in style.split("* {")[0].split("@media"))
    for theme in (light, dark):
        for name in ("ink", "soft", "good", "bad", "note", "accent"):
            assert _contrast(theme[name], theme["page"]) >= 4.5, name


def _contrast(first: str, second: str) -> float:
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    plain = colour[1:] if len(colour) == 7 else "".join(each * 2 for each in colour[1:])
    channels = [int(plain[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
def test_many_metrics_and_numbers_that_are_none_are_drawn(tmp_path: Path) -> None:
    run = completed(tmp_path / "many", count=1)
    names = {f"layer.{at}/<b>": float(at) for at in range(300)}
    lines(run / "metrics.jsonl", *({"step": step, **names, "train/loss": None if step == 2 else 0.5,
                                    "examples_per_second": 1.0} for step in range(1, 5)))  # fmt: skip
    (wide, narrow) = measured({"many": report_page([read_run(run)])}, False, tmp_path)
    assert len(wide["titles"]) == 302 and wide["wide"] <= wide["inner"] and narrow["wide"] <= narrow["inner"]
    assert "train/loss was not a finite number at step 2" in wide["text"]
