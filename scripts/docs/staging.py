"""The pages of the site in one folder: docs/, what the top folder has, sources that pages link to, and generated pages.

Pages link to files of the checkout by relative paths, which work where the checkout is browsed. Here each such link is
turned into one to the page that the file has in the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# Pages that have their place at the top of the checkout, or in a folder of code.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples-list.md",
    "benchmarks/README.md": "benchmarks-list.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".ipynb": "json", "": "text"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


class Mistake(Exception):
    """A page that links to nothing, or that nobody would find."""


class Pages:
    """Markdown by its name in the site."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: dict[str, str] = {}
        self.files: dict[str, bytes] = {}
        self._names: dict[str, str] = {}  # of pages, by the file they come from
        docs = root / "docs"
        for path in sorted(each for each in docs.rglob("*") if each.is_file()):
            name = path.relative_to(docs).as_posix()
            if path.suffix == ".md":
                self._names[f"docs/{name}"] = name
            else:
                self.files[name] = path.read_bytes()
        self._names.update({source: name for source, name in ELSEWHERE.items() if (root / source).is_file()})
        for source in list(self._names):
            self._add(source)

    def title(self, name: str) -> str:
        return _heading(self.texts[name], name)

    def write(self, folder: Path) -> None:
        for name, content in {**{name: text.encode() for name, text in self.texts.items()}, **self.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _add(self, source: str) -> None:
        name, text = self._names[source], (self.root / source).read_text(encoding="utf-8")
        fenced = False
        lines = []
        for line in text.split("\n"):
            if line.startswith("```"):
                fenced = not fenced
            lines.append(line if fenced else LINK.sub(lambda link: self._linked(link, source, name), line))
        self.texts[name] = "\n".join(lines)

    def _linked(self, link: re.Match[str], source: str, name: str) -> str:
        shown, (target, hash_, anchor) = link.group(1), link.group(2).partition("#")
        if not target or ":" in target:
            return link.group(0)
        wanted = os.path.normpath((Path(source).parent / target).as_posix())
        if wanted.startswith("docs/") and wanted.removeprefix("docs/") in self.files:
            found = wanted.removeprefix("docs/")
        else:
            found = self._names.get(wanted) or self._source(wanted, source)
        if wanted.endswith(".md") and shown in (
            wanted,
            Path(wanted).name,
        ):  # the name of a file says little to a reader
            shown = _heading((self.root / wanted).read_text(encoding="utf-8"), wanted)
        relative = Path(os.path.relpath(found, Path(name).parent)).as_posix()
        return f"[{shown}]({relative}{hash_}{anchor})"

    def _source(self, wanted: str, linked_from: str) -> str:
        """A page that shows a file of the checkout."""
        path = self.root / wanted
        if not path.is_file() or path.suffix not in LANGUAGES:
            raise Mistake(f"{linked_from}: links to {wanted}, which is no page and no source file of the checkout")
        name = f"source/{wanted}.md"
        fence = f"````{LANGUAGES[path.suffix]}\n{path.read_text(encoding='utf-8').rstrip()}\n````\n"
        self.texts[name] = f"---\nsearch:\n  exclude: true\n---\n\n# {wanted}\n\n{fence}"
        self._names[wanted] = name
        return name


def _heading(text: str, name: str) -> str:
    found = re.search(r"^# (.+)$", text, re.M)
    if not found:
        raise Mistake(f"{name}: has no heading: begin it with '# Title'")
    return found.group(1).replace("`", "")


def nav_of(nav: list[Any], pages: Pages) -> list[Any]:
    """The navigation with folders (`decisions/`) replaced by their pages; every page must be there, once."""
    expanded = _expanded(nav, pages)
    listed = list(_leaves(expanded))
    missing = sorted(set(listed) - set(pages.texts))
    if missing:
        raise Mistake(f"mkdocs.yml: nav: there is no page {missing[0]}")
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if twice:
        raise Mistake(f"mkdocs.yml: nav: {twice[0]} is there twice")
    shown = {name for name in pages.texts if not name.startswith("source/")}
    forgotten = sorted(shown - set(listed))
    if forgotten:
        raise Mistake(f"mkdocs.yml: nav: {', '.join(forgotten)} is nowhere: add a line for every page")
    return expanded


def _expanded(entry: Any, pages: Pages) -> Any:
    if isinstance(entry, list):
        return [_expanded(each, pages) for each in entry]
    if isinstance(entry, dict):
        return {title: _expanded(below, pages) for title, below in entry.items()}
    if isinstance(entry, str) and entry.endswith("/"):
        return [{pages.title(name): name} for name in pages.texts if name.startswith(entry)]
    return entry


def _leaves(entry: Any) -> Any:
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _leaves(each)
