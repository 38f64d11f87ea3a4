"""scripts/words.py finds the words that may not come back, and leaves ordinary ones alone."""

from __future__ import annotations

import importlib.util

import pytest

from conftest import ROOT

spec = importlib.util.spec_from_file_location("words", ROOT / "scripts" / "words.py")
assert spec and spec.loader
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a logger of one's own", ["one's own"]),
        ("Whereabouts of a rank that gets on", ["gets on", "Whereabouts"]),
        ("def send_errand(self): pass  # an errand", ["errand"]),
        ("the target on the host, a widget on a page", []),
        ("beforehand, it summarizes the whole set", []),
    ],
)
def test_words_are_found(line: str, found: list[str]) -> None:
    assert sorted((match.group() for word in words.WORDS for match in word.finditer(line)), key=str.lower) == found


def test_the_docs_have_none() -> None:
    assert words.main(["README.md", "docs"]) == 0
