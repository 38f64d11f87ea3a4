"""Prints what CHANGELOG.md says of a version: python scripts/release_notes.py [VERSION], else of the newest."""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"


def sections(text: str) -> dict[str, str]:
    """What is said of every version, the newest first."""
    parts = re.split(r"^## (\d\S*)(?: \(.*\))?$", text, flags=re.M)
    return {version: body.strip() for version, body in zip(parts[1::2], parts[2::2], strict=True)}


def main() -> None:
    found = sections(CHANGELOG.read_text(encoding="utf-8"))
    version = sys.argv[1].removeprefix("v") if len(sys.argv) > 1 else next(iter(found))
    if version not in found:
        sys.exit(f"CHANGELOG.md has no version {version}; it has {', '.join(found)}")
    print(f"# Lockstep {version}\n\n{found[version]}")


if __name__ == "__main__":
    main()
