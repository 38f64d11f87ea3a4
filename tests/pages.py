"""What the pages of the documentation say to type, and typing it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [(language, text) for language, text in found if language in languages]


def run_page(page: Path, folder: Path, shell: dict[str, str]) -> str:
    """Every command and snippet of a page, in order, in a folder; what all of them said."""
    said = []
    for number, (language, text) in enumerate(blocks(page, "sh", "python")):
        if language == "python":
            (folder / f"snippet_{number}.py").write_text(text)
            text = f"python snippet_{number}.py"
        finished = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=shell,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert finished.returncode == 0, f"{text}\n{finished.stdout}\n{finished.stderr}"
        said.append(finished.stdout + finished.stderr)
    return "".join(said)
