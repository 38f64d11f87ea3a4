"""Builds the source distribution, and from it the wheel: python scripts/distributions.py [--out dist]

From a copy of what belongs in them: a folder `build` of an earlier time would put files into the wheel that are gone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src")
NOT_OURS = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.py[cod]", ".*")


def copy_sources(folder: Path) -> None:
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=NOT_OURS)
        else:
            shutil.copy(ROOT / part, folder / part)


def build(kind: str, sources: Path, out: Path) -> Path:
    """A `sdist` or a `wheel` by the backend that pyproject.toml names, which is installed beside us."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    built = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=sources, capture_output=True, text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", "315532800")},
    )  # fmt: skip
    if built.returncode:
        sys.exit(f"building the {kind} failed:\n{built.stdout}{built.stderr}")
    return out / built.stdout.split()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out: Path = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-dist-") as folder:
        sources, unpacked = Path(folder, "sources"), Path(folder, "unpacked")
        sources.mkdir()
        copy_sources(sources)
        sdist = build("sdist", sources, out)
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (inside,) = unpacked.iterdir()
        wheel = build("wheel", inside, out)
    for path in (sdist, wheel):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
