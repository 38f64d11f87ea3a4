"""The page of a plan: what is in it, and how a real browser lays it out."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lockstep.planner.page import plans_page, search_page
from lockstep.planner.plan import GIB, Collective, Work, lines
from lockstep.planner.search import Way
from planned_steps import compiled, plan, step

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr",
    "--window-size=1400,900", "--dump-dom",
]  # fmt: skip

TENSOR = step(
    mesh={"data": 4, "model": 4},
    collectives=[
        Collective("all_gather", "data", 4, 13, 40, 10**9),
        Collective("all_reduce", "model", 4, 4, 60, 10**8),
    ],
)
LONG_NAME = "fsdp 128 x " + "a" * 60


def plans() -> str:
    made = [
        plan(),
        plan(TENSOR),
        plan(peak=20 * GIB),
        plan(compiled()),
        plan(step(world_size=2048, mesh={"data": 2048})),
    ]
    return plans_page("gpt <script>alert(1)</script>", made, "bf16")


def searched() -> str:
    fast, slow, large = plan(), plan(TENSOR), plan(peak=20 * GIB)
    found = [Way("fsdp", {}, fast), Way(LONG_NAME, {}, slow), Way("ddp, in 8 parts", {}, large),
             Way("hsdp 2 x 8", {}, None, "not traced: <it> has no less of the model than fsdp")]  # fmt: skip
    return search_page("gpt", [(fast.target, found)], "bf16")


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def titles(self) -> list[str]:
        return [str(attributes["title"]) for _, attributes in self.found if "title" in attributes]


def test_text_of_others_is_text() -> None:
    for page in (plans(), searched()):
        assert not {tag for tag, _ in Elements(page).found} & {"script", "img", "link", "iframe", "it"}
        assert "http" not in page and "url(" not in page
    assert "&lt;script&gt;alert(1)" in plans() and "return x &lt; 1 &amp; y" in plans()
    assert "&lt;it&gt; has no less" in searched()


def test_devices_of_a_colour_are_a_line_along_the_axis() -> None:
    titles = Elements(plans_page("gpt", [plan(TENSOR)], "bf16")).titles()
    assert "rank 5: data 1, model 1; along data with 1, 5, 9, 13" in titles
    assert "rank 5: data 1, model 1; along model with 4, 5, 6, 7" in titles


def test_of_many_hosts_some_are_drawn() -> None:
    many = plans_page("gpt", [plan(step(world_size=2048, mesh={"data": 2048}))], "bf16")
    assert "and 248 more hosts" in many and many.count("<small>host") == 8


def test_phases_are_where_they_were() -> None:
    page = plans_page("gpt", [plan()], "bf16")
    found = re.findall(r'<span class="(\w+)" style="left:([\d.]+)%;width:([\d.]+)%" title', page)
    assert found == [("forward", "0.00", "40.00"), ("backward", "40.00", "40.00"), ("gradients", "80.00", "10.00"),
                     ("optimizer", "90.00", "10.00")]  # fmt: skip
    assert "<title>backward: 12.00 GiB\nweights 2.00 GiB\noptimizer 4.00 GiB\nactivations 6.00 GiB</title>" in page


def test_products_are_on_the_roof_and_what_bounds_them_is_told() -> None:
    """Of this device the roof is flat from 200 FLOP for a byte on."""
    work = [Work("bfloat16", 10**11, 10**9, 60), Work("bfloat16", 10**11, 10**8, 20)]
    titles = Elements(plans_page("gpt", [plan(work=work)], "bf16")).titles()
    (waits,) = [each for each in titles if each.startswith("60 of bfloat16")]
    assert "100 FLOP for a byte" in waits and waits.endswith("bound by traffic")
    (computes,) = [each for each in titles if each.startswith("20 of bfloat16")]
    assert "1,000 FLOP for a byte" in computes and computes.endswith("bound by arithmetic")


def test_a_plan_that_a_compiler_made_has_no_pictures_of_what_it_does_not_know() -> None:
    page = plans_page("gpt", [plan(compiled())], "bf16")
    assert 'class="plot' not in page and "host 1" in page and "weights" in page
    assert "at its peak: 12.00 GiB of" in "\n".join(lines(plan(compiled())))


def test_a_search_has_the_best_first_and_marks_what_does_not_fit() -> None:
    page = searched()
    rows = [html.unescape(each) for each in re.findall(r'<div class="row"><span class="of">(.*?)</span>', page)]
    assert rows[:3] == [
        'fsdp <b class="fits">the best</b>',
        LONG_NAME,
        'ddp, in 8 parts <b class="not">does not fit</b>',
    ]
    assert "not traced" in page


MEASURE = """
<!doctype html><meta charset="utf-8"><body><script>
const found = [];
const pages = PAGES;
for (const [name, width, text] of pages) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px";
  frame.onload = () => {
    const root = frame.contentDocument.documentElement, look = each => frame.contentWindow.getComputedStyle(each);
    const style = look(root.querySelector("body"));
    const texts = [...root.querySelectorAll("body *")].filter(each => !each.childElementCount);
    const small = texts.filter(each => each.textContent.trim() && parseFloat(look(each).fontSize) < 11).length;
    found.push({name, width, wide: root.scrollWidth, inner: root.clientWidth, page: style.backgroundColor,
                ink: style.color, small, charts: root.querySelectorAll(".plot svg").length});
    document.title = JSON.stringify(found);
  };
  frame.srcdoc = text;
  document.body.append(frame);
}
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium to open the page in")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_legible_in_a_browser_at_a_desk_and_on_a_phone(dark: bool, tmp_path: Path) -> None:
    pages = [
        [name, width, text] for name, text in (("plans", plans()), ("search", searched())) for width in (1280, 390)
    ]
    harness = tmp_path / "measure.html"
    harness.write_text(MEASURE.replace("PAGES", json.dumps(pages).replace("</", "<\\/")), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(BROWSER), *FLAGS, *scheme, f"--user-data-dir={tmp_path / 'browser'}", harness.as_uri()]
    opened = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(.*?)</title>", opened.stdout)
    assert title is not None, opened.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(title[1]))
    assert {(each["name"], each["width"]) for each in found} == {(name, width) for name, width, _ in pages}
    for each in found:
        assert each["wide"] <= each["inner"], f"{each['name']} overflows at {each['width']}: {each}"
        assert each["page"] == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)") and each["small"] == 0
        assert each["charts"] >= 2
    assert "CONSOLE" not in opened.stderr, opened.stderr[-2000:]


def test_an_empty_step_is_drawn_too() -> None:
    bare = replace(compiled(1), by_kind={}, peak=0)
    assert "fits" in plans_page("none", [plan(bare)], "float32")
