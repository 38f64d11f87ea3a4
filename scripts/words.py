"""Fails when a word that nobody in this field uses comes back: python scripts/words.py [FOLDER or FILE]...

Looks at README.md, docs and src unless others are named, and prints FILE:LINE, the word, and what to write instead.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("README.md", "docs", "src")
KINDS = {".md", ".py", ".yaml"}
INSTEAD = {
    r"errands?": "request",
    r"summons": "control sync",
    r"whereabouts": "position, or block tracker",
    r"chronicles?": "timeline",
    r"one'?s[ _]own": "custom, user",
    r"gets? on|getting on": "makes progress",
    r"at hand": "current, available",
    r"leave_word": "shard report",
    r"whole_sets?": "epoch_metrics",
}
WORDS = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in INSTEAD.items()}


def found_in(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        f"{file.relative_to(ROOT)}:{number}: {match.group()!r}: write {instead}"
        for number, line in enumerate(lines, start=1)
        for word, instead in WORDS.items()
        for match in word.finditer(line)
    ]


def main(places: list[str]) -> int:
    paths = [ROOT / place for place in places or PLACES]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    found = [line for file in files if file.suffix in KINDS for line in found_in(file)]
    print("\n".join(found) or "words: all in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
