"""Builds the documentation site: python scripts/docs [--out site]"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from commands_page import commands_page
from config_keys import with_types
from python_pages import python_pages
from staging import Mistake, Pages, nav_of

from lockstep.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = """
## The schema

[lockstep.schema.json](lockstep.schema.json) is the output of `lockstep schema`. Editors use it to complete and check
configs.
"""


def build(out: Path) -> None:
    pages = Pages(ROOT)
    pages.texts["index.md"] = f"---\nhide: [navigation, toc]\n---\n\n{pages.texts['index.md']}"
    pages.texts["config.md"] = with_types(pages.texts["config.md"]) + SCHEMA
    pages.texts["commands.md"] = commands_page()
    pages.texts.update(python_pages(ROOT / "src" / "lockstep"))
    pages.files["lockstep.schema.json"] = json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2).encode()
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config["nav"] = nav_of(config["nav"], pages)
    with tempfile.TemporaryDirectory(prefix="lockstep-docs-") as folder:
        staged = Path(folder)
        pages.write(staged / "docs")
        (staged / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
        built = subprocess.run(command, cwd=staged, capture_output=True, text=True)
        if built.returncode or not (staged / "site" / "index.html").is_file():
            raise Mistake(f"zensical build --strict failed:\n{built.stdout}{built.stderr}")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(staged / "site", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="where the site goes; what is there is removed")
    out: Path = parser.parse_args().out
    if out.exists() and any(out.iterdir()) and not (out / "search.json").is_file():
        sys.exit(f"{out}: is not empty, and no site: name another folder with --out")
    try:
        build(out)
    except Mistake as mistake:
        sys.exit(f"docs: {mistake}")
    print(f"docs: open {out / 'index.html'}")


if __name__ == "__main__":
    main()
