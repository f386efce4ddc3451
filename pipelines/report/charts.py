"""Bar and line charts as SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

INK, SOFT, LINE = "#1c2530", "#5a6672", "#e3e7eb"
OURS, OTHER, ACCENT = "#0b6e6e", "#a9b4bf", "#c7742a"
WIDTH = 1024
"""Pixels of a figure, which fills the page."""

STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "font.size": 13.0,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "ytick.major.pad": 6,
}
LEGEND: dict[str, Any] = {
    "loc": "outside upper left", "frameon": False, "labelcolor": SOFT, "handlelength": 1.2,
}  # fmt: skip
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'(?:href="#|url\(#)([\w.-]+)')
_HEAD = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|\bxmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL)
_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def canvas(height: int) -> tuple[Figure, Axes]:
    """Return a figure with one axes; lengths in pixels.

    Called inside `rc_context(STYLE)`, like everything else that draws.
    """
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.subplots()


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as an `svg` element; the same figure gives the same bytes.

    `label` is the description for screen readers, unique on the page.
    """
    target = io.StringIO()
    with rc_context({"svg.hashsalt": label}):  # ids are unique on the page
        figure.savefig(target, format="svg", transparent=True, metadata=_METADATA)
    text = _HEAD.sub("", target.getvalue()).replace("xlink:href", "href")
    used = set(_REFERENCE.findall(text))
    text = _ID.sub(lambda match: match[0] if match[1] in used else "", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    name: str  # in the legend
    x: NDArray[Any]
    y: NDArray[Any]
    color: str
    style: Mapping[str, Any] = field(default_factory=dict)  # of `Axes.plot`


@dataclass(frozen=True, slots=True)
class Scale:
    """Label, tick texts and ends of an axis; None for an end at the data."""

    label: str
    text: Callable[[float], str]
    low: float | None = None
    high: float | None = None


@rc_context(STYLE)
def curve_chart(label: str, lines: Sequence[Line], x: Scale, y: Scale) -> str:
    """Return lines over one x axis, with a legend above."""
    figure, axes = canvas(330)
    for line in lines:
        axes.plot(line.x, line.y, color=line.color, label=line.name, **line.style)
    axes.grid(axis="y")
    axes.margins(x=0.0)
    axes.set(xlabel=x.label, ylabel=y.label, xlim=(x.low, x.high), ylim=(y.low, y.high))
    axes.xaxis.set_major_formatter(lambda value, _: x.text(value))
    axes.yaxis.set_major_formatter(lambda value, _: y.text(value))
    axes.spines["left"].set_visible(False)
    figure.legend(**LEGEND, ncols=4)
    return to_svg(figure, label)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with its name and text."""

    name: str
    value: float
    text: str
    color: str


@rc_context(STYLE)
def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return horizontal bars, the first on top."""
    figure, axes = canvas(34 * len(bars) + 8)
    axes.set_yticks(range(len(bars)), [b.name for b in bars], color=INK)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.margins(x=0.0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    drawn = axes.barh(
        range(len(bars)), [b.value for b in bars], 0.62, color=[b.color for b in bars]
    )
    axes.bar_label(drawn, [b.text for b in bars], padding=7)
    return to_svg(figure, f"{title}: " + "; ".join(f"{bar.name} {bar.text}" for bar in bars))
