"""docs/requirements.md says what is held and by which test; neither may say more than the other."""

from __future__ import annotations

import re

from conftest import ROOT

TESTS = ROOT / "tests"
LISTED = dict(re.findall(r"^\| ([RDPX]\d\d) \|.*\| (.*) \|$", (ROOT / "docs" / "requirements.md").read_text(), re.M))


def marked() -> dict[str, set[str]]:
    """Test files by the requirement that they are marked with."""
    found: dict[str, set[str]] = {}
    for file in TESTS.rglob("test_*.py"):
        for requirement in re.findall(r'mark\.requirement\("([A-Z]\d\d)"\)', file.read_text()):
            found.setdefault(requirement, set()).add(str(file.relative_to(TESTS)))
    return found


def test_every_line_is_listed() -> None:
    expected = {f"{letter}{number:02d}" for letter, last in zip("RDPX", (14, 18, 13, 12), strict=True)
                for number in range(1, last + 1)}  # fmt: skip
    assert set(LISTED) == expected


def test_every_test_that_is_named_exists() -> None:
    for requirement, text in LISTED.items():
        for file, _, name in re.findall(r"((?:unit|ranks|faults|e2e|xla|ray|pod|hosts)/test_\w+\.py)(::(\w+))?", text):
            assert (TESTS / file).is_file(), (requirement, file)
            assert not name or f"def {name}(" in (TESTS / file).read_text(), (requirement, name)


def test_what_is_held_names_a_marked_test_and_what_is_open_says_so() -> None:
    holding = marked()
    for requirement, text in LISTED.items():
        if text.startswith("open"):
            assert requirement not in holding, f"{requirement} is marked as tested, and listed as open"
        else:
            assert any(file in text for file in holding.get(requirement, ())), requirement
    assert set(holding) <= set(LISTED)
