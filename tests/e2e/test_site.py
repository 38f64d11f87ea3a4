"""The documentation site: `make docs` builds it, all of it is found and read from disk, and no link leads nowhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import click
import pytest

import lockstep
from conftest import ROOT, wait_until
from lockstep.cli.commands import main
from lockstep.config.load import parse_yaml
from lockstep.config.schema import RunConfig

SCRIPTS = ROOT / "scripts" / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


class Html(HTMLParser):
    """What a page links to, what it loads by itself, and what in it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if "src" in values:
            self.loaded.append(values["src"])
        if "href" in values:
            (self.links if tag == "a" else self.loaded).append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="zensical is not installed: pip install 'lockstep-train[docs]'")
    out = tmp_path_factory.mktemp("built") / "site"
    built = subprocess.run([sys.executable, SCRIPTS, "--out", out], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, Html]:
    return {path: Html(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from script("staging", monkeypatch)


@pytest.fixture
def config_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from script("config_keys", monkeypatch)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module(name)
    sys.modules.pop(name)


def beside(page: Path, link: str) -> Path:
    return Path(os.path.normpath(page.parent / unquote(link))) if link else page


def test_every_link_and_anchor_leads_somewhere_on_the_disk(html: dict[Path, Html]) -> None:
    lost = []
    for page, content in html.items():
        for link in {*content.links, *content.loaded}:
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:", target):
                continue
            path = beside(page, target)
            if not (path in html or path.is_file()) or (
                anchor and path in html and unquote(anchor) not in html[path].ids
            ):
                lost.append(f"{page.name}: {link}")
    assert not lost


def test_no_page_loads_anything_from_another_server(site: Path, html: dict[Path, Html]) -> None:
    foreign = [f"{page.name}: {each}" for page, content in html.items() for each in content.loaded if "//" in each]
    styles = [
        path for path in site.rglob("*.css") if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())
    ]
    assert not foreign and not styles
    assert any("assets/iframe-worker.js" in each for each in html[site / "index.html"].loaded)


def test_every_page_is_reached_from_the_first(site: Path, html: dict[Path, Html]) -> None:
    first = site / "index.html"
    seen, waiting = {first}, [first]
    while waiting:
        page = waiting.pop()
        for link in set(html[page].links):
            path = beside(page, urldefrag(link)[0])
            if path in html and path not in seen:
                seen.add(path)
                waiting.append(path)
    assert not {path.name for path in set(html) - seen}


def test_the_reference_has_every_command_key_and_public_name(site: Path, html: dict[Path, Html]) -> None:
    def commands(group: click.Group, path: str) -> Iterator[str]:
        with click.Context(group) as context:
            for name in group.list_commands(context):
                yield f"{path}-{name}"
                below = group.get_command(context, name)
                if isinstance(below, click.Group):
                    yield from commands(below, f"{path}-{name}")

    assert set(commands(main, "lockstep")) <= html[site / "commands.html"].ids
    keys = re.findall(r"^\| `([\w.\[\]]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.M)
    assert {key.replace("[]", "") for key in keys} <= html[site / "config.html"].ids
    public = {name for name in lockstep.__all__ if not name.startswith("_")}
    assert {path.stem for path in (site / "python").glob("*.html")} == {*public, "ray", "testing"}
    tree = ast.parse((ROOT / "src" / "lockstep" / "engine" / "run.py").read_text())
    (run,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run"]
    methods = {each.name for each in run.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")}
    assert {f"Run.{name}" for name in methods} <= html[site / "python" / "Run.html"].ids


def test_every_public_name_says_what_it_is() -> None:
    for name in set(lockstep.__all__) - {"__version__"}:
        public = getattr(lockstep, name)
        assert public.__doc__, name
        for member, value in vars(public).items() if isinstance(public, type) else ():
            described = isinstance(value, property) or inspect.isfunction(value)
            assert member.startswith("_") or not described or value.__doc__, f"{name}.{member} has no docstring"


def test_the_search_knows_every_page_and_can_be_loaded_from_disk(site: Path, html: dict[Path, Html]) -> None:
    text = (site / "search.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") :].rstrip().rstrip(";"))
    found = {urldefrag(each["location"])[0] for each in index["items"]}
    pages = {path.relative_to(site).as_posix() for path in html}
    assert {page for page in pages if not page.startswith("source/")} <= found
    assert any(
        "timeouts.stall" in each["text"] and each["location"].startswith("config.html") for each in index["items"]
    )


# What a reader wants to know in place of what the schema has.
SAID_OTHERWISE = {
    "train.epochs": 1, "data.order.type": "shuffled", "validate.batch_size": "train.batch_size / train.accumulate",
}  # fmt: skip


def test_the_defaults_that_are_written_are_those_of_the_schema(config_keys: Any) -> None:
    schema = RunConfig.model_json_schema(by_alias=True)
    page = (ROOT / "docs" / "config.md").read_text()
    compared = 0
    for key, written in re.findall(r"^\| `([\w.\[\]]+)` \| `([^`|]*)` \|", page, re.M):
        default = config_keys.key_at(schema, key.replace("[]", "").split(".")).get("default")
        if isinstance(default, dict) and set(default) == {"count", "unit"}:
            default = f"{default['count']} {default['unit']}{'s' * (default['count'] != 1)}"
        assert parse_yaml(written) == SAID_OTHERWISE.get(key, default), key
        compared += 1
    assert compared > 100


def test_a_page_that_nobody_would_find_is_told(staging: Any, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n")
    (tmp_path / "docs" / "forgotten.md").write_text("# Forgotten\n")
    pages = staging.Pages(tmp_path)
    with pytest.raises(staging.Mistake, match=r"forgotten\.md is nowhere: add a line"):
        staging.nav_of([{"Home": "index.md"}], pages)
    with pytest.raises(staging.Mistake, match=r"there is no page gone\.md"):
        staging.nav_of([{"Home": "index.md"}, {"Gone": "gone.md"}], pages)
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[away](../nothing.py)\n")
    with pytest.raises(staging.Mistake, match=r"docs/index\.md: links to nothing\.py"):
        staging.Pages(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_lists_are_lists_for_every_reader_of_markdown(page: Path) -> None:
    """Python-Markdown, which makes the site, wants an empty line before a list and four spaces for one inside of it."""
    fenced, before = False, ""
    for number, line in enumerate(page.read_text().split("\n"), start=1):
        fenced ^= line.startswith("```")
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if item and not fenced:
            assert len(item.group(1)) % 4 == 0, f"{page.name}:{number}: indent a list inside of a list by four spaces"
            goes_on = not before or re.match(r" |(?:[-*]|\d+\.) |<!--", before)
            assert goes_on, f"{page.name}:{number}: put an empty line before a list"
        before = line


# The search is an element of its own, in a tree of its own.
DIALOG = "([...document.querySelectorAll('*')].find((each) => each.shadowRoot)?.shadowRoot)"


@pytest.mark.long
def test_a_browser_finds_something_from_disk_and_asks_nobody(site: Path, tmp_path: Path) -> None:
    """A real one: types into the search of a page that was opened from disk, and notes every address it asks for."""
    if not shutil.which("chromedriver") or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("there is no chromium with its driver here: apt install chromium chromium-driver")
    options = [
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'profile'}",
    ]  # fmt: skip
    with Browser(tmp_path, [f"--{option}" for option in options]) as browser:
        browser.call("url", url=(site / "index.html").as_uri())
        browser.until(f"return {DIALOG} !== undefined")
        browser.script("document.querySelector('.md-search__button').click()")
        browser.until(f"return {DIALOG}.activeElement?.tagName === 'INPUT'")
        keys = [{"type": kind, "value": key} for key in "timeouts.stall" for kind in ("keyDown", "keyUp")]
        browser.call("actions", actions=[{"type": "key", "id": "keys", "actions": keys}])
        text = browser.until(f"const text = {DIALOG}.textContent; return /[1-9]\\d* results/.test(text) && text")
        assert "timeouts.stall" in text
        messages = [json.loads(each["message"])["message"] for each in browser.call("se/log", type="performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("search.js") for url in asked)
    assert not [url for url in asked if url.startswith("http")]


class Browser:
    """As much of WebDriver as is needed."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"http://127.0.0.1:{free.getsockname()[1]}"
        log = (folder / "chromedriver.log").open("w")
        port = self.address.rpartition(":")[2]
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
        log.close()
        self.session = ""
        try:
            self._begin({"goog:loggingPrefs": {"performance": "ALL"}, "goog:chromeOptions": {"args": options}})
        except BaseException:
            self.driver.kill()
            self.driver.wait(30)
            raise

    def _begin(self, wanted: dict[str, object]) -> None:
        deadline = time.monotonic() + 60
        while not self.session:
            try:
                self.session = self.call("", capabilities={"alwaysMatch": wanted})["sessionId"]
            except urllib.error.URLError:
                assert time.monotonic() < deadline and self.driver.poll() is None, "chromedriver does not answer"
                time.sleep(0.2)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.call("", method="DELETE")
        self.driver.terminate()
        self.driver.wait(30)

    def call(self, command: str, *, method: str = "POST", **values: object) -> Any:
        path = "/".join(part for part in ("session", self.session, command) if part)
        request = urllib.request.Request(f"{self.address}/{path}", json.dumps(values).encode(), method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def script(self, code: str) -> Any:
        return self.call("execute/sync", script=code, args=[])

    def until(self, code: str) -> Any:
        return wait_until(lambda: self.script(code), 60, code)
