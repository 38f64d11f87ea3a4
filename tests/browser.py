"""Pages in a real browser: what it made of them, at the widths of a desk and of a phone, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (1280, 390)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--hide-scrollbars",
]  # fmt: skip

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium to open the page in")

# Frames of a page that asks each what it looks like, once it has had time to draw.
_MEASURE = """
<!doctype html><meta charset="utf-8"><body><script>
const found = [], pages = PAGES;
let waiting = pages.length;
for (const [name, width, text] of pages) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px";
  frame.style.height = "3000px";
  frame.onload = () => setTimeout(() => {
    const root = frame.contentDocument.documentElement, look = each => frame.contentWindow.getComputedStyle(each);
    const style = look(root.querySelector("body"));
    const texts = [...root.querySelectorAll("main *")].filter(each => !each.children.length && each.textContent.trim());
    const drawn = canvas => { const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                              return data.some((value, at) => at % 4 === 3 && value > 0); };
    found.push({name, width, wide: root.scrollWidth, inner: root.clientWidth, page: style.backgroundColor,
                small: texts.filter(each => parseFloat(look(each).fontSize) < 11).map(each => each.textContent),
                plots: [...root.querySelectorAll(".uplot canvas")].filter(drawn).length,
                heat: [...root.querySelectorAll(".heat canvas")].filter(drawn).length,
                sections: [...root.querySelectorAll("section")].map(each => each.id),
                foreign: root.querySelectorAll("main script, main img, main iframe, main i i").length,
                titles: [...root.querySelectorAll(".chart h3")].map(each => each.textContent),
                text: root.querySelector("main").innerText.slice(0, 6000)});
    if (!--waiting) document.title = JSON.stringify(found);
  }, 600);
  frame.srcdoc = text;
  document.body.append(frame);
}
</script>
"""


def measured(pages: dict[str, str], dark: bool, folder: Path) -> list[dict[str, Any]]:
    """What a browser says of pages, each at both widths. A page that says anything to the console fails."""
    asked = [[name, width, text] for name, text in pages.items() for width in WIDTHS]
    harness = folder / "measure.html"
    harness.write_text(_MEASURE.replace("PAGES", json.dumps(asked).replace("</", "<\\/")), encoding="utf-8")
    arguments = ["--window-size=1400,900", "--virtual-time-budget=20000", "--dump-dom"]
    opened = run_browser(arguments, harness.as_uri(), dark, folder)
    title = re.search(r"<title>(.*?)</title>", opened.stdout, re.DOTALL)
    assert title is not None, opened.stderr[-2000:]
    return json.loads(html.unescape(title[1]))  # type: ignore[no-any-return]


def run_browser(arguments: list[str], address: str, dark: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [str(BROWSER), *FLAGS, scheme, *arguments, f"--user-data-dir={folder / 'browser'}", address]
    opened = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert "CONSOLE" not in opened.stderr, opened.stderr[-3000:]
    return opened
