"""Writes the tables of docs/verify.md: `lockstep verify` on the three examples, between the marks of the page.

    python scripts/verify_tables.py [--only NAME ...] [--example NAME ...] [--page FILE]

A combination that cannot run here keeps the row that another machine wrote; --only replaces the rows that it names.
An example that does not agree is not written, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = {"digits": [], "mnist": ["--set=task.examples=1024"], "gpt": []}
END = "<!-- end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--example", action="append", choices=EXAMPLES)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "verify.md")
    chosen = parser.parse_args()
    wrong = 0
    for example in chosen.example or EXAMPLES:
        table = measured(example, chosen.only)
        if table is None:
            wrong = 1
            continue
        text = chosen.page.read_text(encoding="utf-8")
        before, rest = text.split(f"<!-- {example} -->\n")
        known, after = rest.split(END, 1)
        lines = merged(table, known.strip().splitlines(), chosen.only)
        page = f"{before}<!-- {example} -->\n" + "\n".join(lines) + f"\n{END}{after}"
        chosen.page.write_text(page, encoding="utf-8")
    return wrong


def measured(example: str, only: list[str]) -> list[str] | None:
    """The lines of the table, with where they were measured; None where something does not agree."""
    command = [sys.executable, "-m", "lockstep", "verify", str(ROOT / "examples" / f"{example}.yaml"), "--markdown"]
    command += [*EXAMPLES[example], *(f"--only={name}" for name in only)]
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=3600, check=False)
    print(f"{example}\n{finished.stdout}", flush=True)
    if finished.returncode:
        return None
    head, rule, *rows = (line for line in finished.stdout.splitlines() if line.startswith("|"))
    return [f"{head} measured on |", f"{rule} --- |", *(f"{row} {where(row)} |" for row in rows)]


def where(row: str) -> str:
    machine = platform.machine()
    if name(row).startswith("cuda"):
        import torch

        machine = torch.cuda.get_device_name()
    return f"{machine}, torch {importlib.metadata.version('torch').split('+')[0]}"


def merged(table: list[str], known: list[str], only: list[str]) -> list[str]:
    """The new rows, but for those that say nothing new."""
    rows = {name(line): line for line in known[2:]}
    for line in table[2:]:
        if not only or any(fnmatch.fnmatch(name(line), pattern) for pattern in only) or name(line) not in rows:
            rows[name(line)] = line
    return [*table[:2], *rows.values()]


def name(line: str) -> str:
    return line.strip("| ").split(" | ")[0].strip()


if __name__ == "__main__":
    sys.exit(main())
