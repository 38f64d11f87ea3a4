"""What the pictures share: colours, a plot with its labels, bars, and numbers as they are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lockstep.planner.figures import KINDS

SIDE = 1000  # of a plot, in the units of its shapes
# Told apart by those who see no red or green as well (Okabe and Ito's).
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#999999"
SKY, RED, PINK, YELLOW = "#56b4e9", "#d55e00", "#cc79a7", "#f0e442"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
KIND_COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, GREY, SKY, RED, PINK, YELLOW), strict=True))


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    told: str
    colour: str = BLUE


def plot(label: str, shapes: str, marks: str, kind: str = "") -> str:
    """`shapes` have places from 0 to SIDE, `marks` are HTML with places in percent."""
    return (
        f'<div class="plot {kind}" role="img" aria-label="{escape(label)}">'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">{shapes}</svg>{marks}</div>'
    )


def mark(text: str, left: float, top: float, kind: str) -> str:
    """`left` and `top` from 0 to 1."""
    return f'<span class="mark {kind}" style="left:{100 * left:.2f}%;top:{100 * top:.2f}%">{escape(text)}</span>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    places = " ".join(
        f'{name}="{SIDE * at:.1f}"' for name, at in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2))
    )  # fmt: skip
    return f'<line {places} class="{kind}">{told}</line>'


def bars(label: str, values: Sequence[Bar]) -> str:
    most = max((each.value for each in values), default=0.0) or 1.0
    rows = "".join(
        f'<div class="row"><span class="of">{escape(each.label)}</span><span class="track">'
        f'<span style="width:{100 * each.value / most:.2f}%;background:{each.colour}"></span></span>'
        f'<span class="told">{escape(each.told)}</span></div>'
        for each in values
    )
    return f'<div class="bars" role="img" aria-label="{escape(label)}">{rows}</div>'


def key(colours: Sequence[tuple[str, str]]) -> str:
    """What the colours of a picture stand for."""
    return (
        '<p class="key">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for text, colour in colours)
        + "</p>"
    )


def ticks(top: float, about: int = 4) -> list[float]:
    """Round numbers from 0 to `top`."""
    if top <= 0:
        return [0.0]
    size = 10 ** math.floor(math.log10(top / about))
    step = next(size * each for each in (1, 2, 5, 10) if size * each * about >= top * 0.8)
    return [step * number for number in range(int(top / step) + 1)]


def short(value: float) -> str:
    """Three digits of it, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def milliseconds(seconds: float) -> str:
    return f"{short(seconds * 1e3)} ms" if seconds >= 1e-6 or not seconds else "below 0.001 ms"


def gib(size: float) -> str:
    """Of memory: GiB, as devices are sold; of what is small, MiB or KiB."""
    unit, text = next(((2**n, text) for n, text in ((30, "GiB"), (20, "MiB")) if size >= 2**n / 100), (2**10, "KiB"))
    return f"{short(size / unit)} {text}"


def gigabytes(size: float) -> str:
    """Of what is sent."""
    unit, text = next(((10**n, text) for n, text in ((9, "GB"), (6, "MB")) if size >= 10**n / 100), (10**3, "kB"))
    return f"{short(size / unit)} {text}"
