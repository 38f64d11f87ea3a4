"""Fails when a word that nobody in this field uses comes back into src, docs or the README: python scripts/words.py

Prints FILE:LINE, the word, and what to write instead.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTEAD = {
    r"errands?": "request",
    r"summons": "control sync",
    r"whereabouts": "position, or block tracker",
    r"chronicles?": "timeline",
    r"(?:of )?one's own": "custom, user",
    r"ones_own": "custom, user",
    r"gets? on|getting on": "makes progress",
    r"at hand": "current, available",
    r"leave_word": "shard report",
    r"whole_sets?": "epoch_metrics",
}
WORDS = re.compile(
    "|".join(rf"(?P<word_{number}>\b(?:{word})\b)" for number, word in enumerate(INSTEAD)), re.IGNORECASE
)


def files() -> list[Path]:
    sources = [path for kind in ("*.py", "*.yaml") for path in (ROOT / "src").rglob(kind)]
    return sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *sources])


def found_in(file: Path) -> list[str]:
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        for match in WORDS.finditer(line):
            instead = list(INSTEAD.values())[int(str(match.lastgroup).removeprefix("word_"))]
            lines.append(f"{file.relative_to(ROOT)}:{number}: {match.group()!r}: write {instead}")
    return lines


def main() -> int:
    found = [line for file in files() for line in found_in(file)]
    print("\n".join(found) or "words: all in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
