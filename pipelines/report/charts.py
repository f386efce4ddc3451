"""Bar and line charts as SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

INK, SOFT, LINE = "#1c2530", "#5a6672", "#e3e7eb"
OURS, OTHER, ACCENT = "#0b6e6e", "#a9b4bf", "#c7742a"
PALETTE = ("#0b6e6e", "#c7742a", "#31597f", "#7fb8b0", "#e0b184", "#93b0cc", "#6b5b7b", "#b3a9bd")
FULL, HALF = 1024, 494
"""Widths in pixels of a figure that fills the page, and of one beside another."""

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


def canvas(width: int, height: int) -> tuple[Figure, Axes]:
    """Return a figure with one axes; lengths in pixels.

    Called inside `rc_context(STYLE)`, like everything else that draws.
    """
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.subplots()


def to_svg(figure: Figure, label: str) -> str:
    """Return a figure as an `svg` element; the same figure gives the same bytes.

    Args:
        figure: the figure.
        label: description for screen readers, unique on the page.
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

    name: str  # in the legend; empty for none
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
def curve_chart(label: str, lines: Sequence[Line], x: Scale, y: Scale, width: int = FULL) -> str:
    """Return lines over one x axis, with a legend above."""
    figure, axes = canvas(width, 330)
    for line in lines:
        axes.plot(line.x, line.y, color=line.color, label=line.name or "_hidden", **line.style)
    axes.grid(axis="y")
    axes.margins(x=0.0)
    axes.set(xlabel=x.label, ylabel=y.label, xlim=(x.low, x.high), ylim=(y.low, y.high))
    axes.xaxis.set_major_formatter(lambda value, _: x.text(value))
    axes.yaxis.set_major_formatter(lambda value, _: y.text(value))
    axes.spines["left"].set_visible(False)
    figure.legend(**LEGEND, ncols=4)
    return to_svg(figure, label)


def smoothed(
    values: NDArray[np.float64], weights: NDArray[np.float64], span: int
) -> NDArray[np.float64]:
    """Return the weighted mean of each value and its neighbours, up to `span` on either side.

    Example:
        >>> smoothed(np.array([1.0, 3.0, 9.0]), np.array([1.0, 1.0, 0.5]), 1).tolist()
        [2.0, 3.4, 5.0]
    """

    def sums(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.convolve(x, np.ones(2 * span + 1))[span : span + len(x)]

    return sums(values * weights) / sums(weights)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with its name and text."""

    name: str
    value: float
    text: str
    color: str = OURS


@rc_context(STYLE)
def bar_chart(title: str, bars: Sequence[Bar], width: int = FULL) -> str:
    """Return horizontal bars, the first on top."""
    figure, axes = _bar_canvas([b.name for b in bars], width)
    drawn = axes.barh(
        range(len(bars)), [b.value for b in bars], 0.62, color=[b.color for b in bars]
    )
    axes.bar_label(drawn, [b.text for b in bars], padding=7)
    return to_svg(figure, _label(title, bars))


def _label(title: str, bars: Sequence[Bar]) -> str:
    return f"{title}: " + "; ".join(f"{bar.name} {bar.text}" for bar in bars)


def _bar_canvas(names: Sequence[str], width: int, legend_height: int = 0) -> tuple[Figure, Axes]:
    figure, axes = canvas(width, 34 * len(names) + 8 + legend_height)
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure, axes


@rc_context(STYLE)
def stacked_bars(
    title: str, rows: Mapping[str, Mapping[str, float]], text: Callable[[float], str]
) -> str:
    """Return horizontal bars made of the same parts in the same order, with a legend above.

    Args:
        title: of the chart.
        rows: bar to part to length.
        text: returns the text of a length.
    """
    figure, axes = _bar_canvas(list(rows), FULL, 34)
    ends, drawn = np.zeros(len(rows)), []
    for part, color in zip(next(iter(rows.values())), PALETTE, strict=False):
        lengths = [row[part] for row in rows.values()]
        drawn.append(axes.barh(range(len(rows)), lengths, 0.62, left=ends, color=color, label=part))
        ends += lengths
    axes.bar_label(drawn[-1], [text(end) for end in ends], padding=7)
    figure.legend(**LEGEND, ncols=len(PALETTE))
    described = (
        f"{name}: " + ", ".join(f"{part} {text(length)}" for part, length in row.items())
        for name, row in rows.items()
    )
    return to_svg(figure, f"{title}: " + "; ".join(described))


@rc_context(STYLE)
def histogram(title: str, bars: Sequence[Bar], axis_label: str) -> str:
    """Return upright bars side by side, each with its text above."""
    figure, axes = canvas(HALF, 240)
    drawn = axes.bar(range(len(bars)), [b.value for b in bars], 0.82, color=OURS)
    axes.bar_label(drawn, [b.text for b in bars], padding=5, size=11.5)
    axes.set_xticks(range(len(bars)), [b.name for b in bars])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(axis_label)
    return to_svg(figure, _label(title, bars))
