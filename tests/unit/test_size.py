"""How much there is to read: the eight files that explain the whole, and everything."""

from __future__ import annotations

import re

from conftest import ROOT

SOURCE = ROOT / "src" / "lockstep"


def lines(name: str) -> int:
    return len((SOURCE / name).read_text().splitlines())


def test_the_files_to_read_first_stay_few_lines() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    first = re.findall(r"^\| `(\S+\.py)` \|", page.split("## Packages")[0], re.MULTILINE)
    assert len(first) == 8
    assert sum(map(lines, first)) <= 1_500


def test_no_file_is_long_and_there_are_not_too_many() -> None:
    names = [str(each.relative_to(SOURCE)) for each in SOURCE.rglob("*.py")]
    sizes = {name: lines(name) for name in names}
    assert len(sizes) <= 293
    assert {name: size for name, size in sizes.items() if size > 450} == {}
    assert sum(sizes.values()) <= 54_500
