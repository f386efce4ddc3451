"""Bar and line charts of the report, as SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

from pipelines.report.html import short

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
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}

_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(href="#|url\(#)([\w.-]+)')
_HEAD = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|\bxmlns(?::\w+)?=\"[^\"]*\"", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) (?:width|height)="[^"]*"')


def canvas(
    width: int, height: int, left: int, right: int, top: int, bottom: int
) -> tuple[Figure, Axes]:
    """Return a figure with one axes; all lengths in pixels, margins from the edges.

    Called inside `rc_context(STYLE)`, like everything else that draws.
    """
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    box = (left / width, bottom / height, (width - left - right) / width)
    axes = figure.add_axes((*box, (height - top - bottom) / height))
    axes.tick_params(length=0, pad=6)
    return figure, axes


def to_svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an `svg` element.

    Args:
        figure: the figure; the same one gives the same bytes.
        name: told apart from that of every other figure of the page.
        label: what the picture shows, for those who do not see it.
    """
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = _HEAD.sub("", target.getvalue()).replace("xlink:href", "href")
    used = {found for _, found in _REFERENCE.findall(text)}
    text = _ID.sub(lambda m: f'id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = _REFERENCE.sub(rf"\g<1>{name}-\g<2>", text)
    for _ in range(2):  # the page sets the size, the view box keeps the shape
        text = _SIZE.sub(r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1).strip()


_LETTER = 7.2
_LINE_HEIGHT = 16.0


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        name: at its end; no text when empty.
        x: (n,) places.
        y: (n,) values.
        color: of line and text.
        dashes: lengths on and off, in line widths; empty for a whole line.
        faint: drawn thin and light, behind the others.
        at: place in the line, from 0 to 1, above which the name stands; None for its end.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    color: str
    dashes: tuple[float, ...] = ()
    faint: bool = False
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One marked point with its text below and right of it, or above near the right end."""

    text: str
    x: float
    y: float
    color: str


@dataclass(frozen=True, slots=True)
class Scale:
    """What an axis says.

    Attributes:
        label: quantity and unit.
        text: makes a tick's text.
        low: where the axis begins, or None for where the lines do.
        high: where it ends, or None.
    """

    label: str
    text: Callable[[float], str] = short
    low: float | None = None
    high: float | None = None


@rc_context(STYLE)
def curve_chart(
    name: str,
    label: str,
    lines: Sequence[Line],
    x: Scale,
    y: Scale,
    points: Sequence[Point] = (),
    width: int = FULL,
    height: int = 330,
) -> str:
    """Return lines over one x axis."""
    named = [line for line in lines if line.name and line.at is None]
    right = round(max((len(line.name) for line in named), default=1) * _LETTER) + 22
    top, bottom = 34, 48
    figure, axes = canvas(width, height, 62, right, top, bottom)
    for line in lines:
        width_px, alpha = (1.0, 0.35) if line.faint else (2.2, 1.0)
        (drawn,) = axes.plot(line.x, line.y, color=line.color, linewidth=width_px, alpha=alpha)
        if line.dashes:
            drawn.set_dashes(line.dashes)
    for point in points:
        axes.plot([point.x], [point.y], "o", ms=9, color=point.color, mec="white", mew=1.5)
        is_far = point.x > 0.8 * max(line.x[-1] for line in lines)  # names of lines stand there
        axes.annotate(
            point.text, (point.x, point.y), (0, 10) if is_far else (10, -18),
            textcoords="offset points", ha="right" if is_far else "left",
            color=point.color, weight="bold",
        )  # fmt: skip
    axes.grid(axis="y")
    _limits(axes, x, y)
    axes.set_xlabel(x.label)
    axes.text(0, 1 + 14 / (height - top - bottom), y.label, transform=axes.transAxes, color=SOFT)
    axes.xaxis.set_major_formatter(lambda value, _: x.text(value))
    axes.yaxis.set_major_formatter(lambda value, _: y.text(value))
    axes.spines["left"].set_visible(False)
    _name_ends(axes, named, height - top - bottom)
    for line in lines:
        if line.at is not None:
            place = round(line.at * (len(line.x) - 1))
            axes.annotate(
                line.name, (line.x[place], line.y[place]), (0, 8), textcoords="offset points",
                ha="center", color=_text_color(line),
            )  # fmt: skip
    return to_svg(figure, name, label)


def _limits(axes: Axes, x: Scale, y: Scale) -> None:
    axes.margins(x=0.0, y=0.06)
    axes.autoscale_view()
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(y.low, y.high)


def _name_ends(axes: Axes, lines: Sequence[Line], height: int) -> None:
    """Write names right of the axes at the lines' ends, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = [(line.y[-1] - low) / (high - low) * height for line in lines]
    for line, place in zip(lines, spread(ends, _LINE_HEIGHT), strict=True):
        axes.annotate(
            line.name, (1, place / height), (8, 0), "axes fraction", "offset points",
            color=_text_color(line), va="center_baseline",
        )  # fmt: skip


def _text_color(line: Line) -> str:
    return SOFT if line.color == OTHER else line.color


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move places apart until neighbours are a gap away, each as little as that takes.

    Of equal places the first becomes the highest.

    Example:
        >>> spread([10.0, 10.0, 50.0], 4.0)
        [12.0, 8.0, 50.0]
    """
    order = sorted(range(len(places)), key=lambda i: (places[i], -i))
    runs: list[tuple[float, int]] = []  # (lowest place, how many) of names that touch
    for index in order:
        start, many = places[index], 1
        while runs and runs[-1][0] + runs[-1][1] * gap > start:
            before, count = runs.pop()
            middle = (before + (count - 1) * gap / 2) * count + (
                start + (many - 1) * gap / 2
            ) * many
            many += count
            start = middle / many - (many - 1) * gap / 2
        runs.append((start, many))
    moved = [start + i * gap for start, many in runs for i in range(many)]
    found = dict(zip(order, moved, strict=True))
    return [found[i] for i in range(len(places))]


def smoothed(
    values: NDArray[np.float64], weights: NDArray[np.float64], span: int
) -> NDArray[np.float64]:
    """Return the weighted mean of each value and its neighbours, up to `span` on either side.

    Args:
        values: (n,).
        weights: (n,), above 0: a last short batch counts as little as it holds.
        span: neighbours on either side.

    Example:
        >>> smoothed(np.array([1.0, 3.0, 9.0]), np.array([1.0, 1.0, 0.5]), 1).tolist()
        [2.0, 3.4, 5.0]
    """
    sums, total = (np.concatenate([[0.0], np.cumsum(x)]) for x in (values * weights, weights))
    places = np.arange(len(values))
    starts, ends = np.maximum(0, places - span), np.minimum(len(values), places + span + 1)
    return (sums[ends] - sums[starts]) / (total[ends] - total[starts])


_ROW = 34
_BAR_LETTER = 7.4


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        name: left of it.
        value: its length.
        text: right of it.
        color: of it.
    """

    name: str
    value: float
    text: str
    color: str = OURS


@rc_context(STYLE)
def bar_chart(name: str, label: str, bars: Sequence[Bar], width: int = FULL) -> str:
    """Return horizontal bars, the first on top."""
    left = _margin([b.name for b in bars])
    right = round(max(len(b.text) for b in bars) * _BAR_LETTER) + 14
    figure, axes = canvas(width, _ROW * len(bars) + 8, left, right, 4, 4)
    places = range(len(bars))
    axes.barh(places, [b.value for b in bars], height=0.62, color=[b.color for b in bars])
    for place, bar in zip(places, bars, strict=True):
        shift = {"xytext": (7, 0), "textcoords": "offset points", "va": "center_baseline"}
        weight = "bold" if bar.color == OURS else "normal"
        axes.annotate(bar.text, (bar.value, place), color=INK, weight=weight, **shift)
    _finish(axes, [b.name for b in bars], max(b.value for b in bars))
    return to_svg(figure, name, label)


@rc_context(STYLE)
def stacked_bars(
    name: str,
    label: str,
    rows: Mapping[str, Mapping[str, float]],
    texts: Mapping[str, str],
    width: int = FULL,
) -> str:
    """Return horizontal bars made of the same parts in the same order, with a legend above.

    Args:
        name: of the figure.
        label: what it shows.
        rows: bar to part to length.
        texts: bar to what stands right of it.
        width: pixels.
    """
    parts = list(next(iter(rows.values())))
    left = _margin(rows)
    right = round(max(len(t) for t in texts.values()) * _BAR_LETTER) + 14
    figure, axes = canvas(width, _ROW * len(rows) + 42, left, right, 38, 4)
    ends = dict.fromkeys(rows, 0.0)
    for part, color in zip(parts, PALETTE, strict=False):
        lengths = [rows[row][part] for row in rows]
        axes.barh(range(len(rows)), lengths, 0.62, left=list(ends.values()), color=color)
        ends = {row: ends[row] + rows[row][part] for row in rows}
    for place, row in enumerate(rows):
        axes.annotate(
            texts[row], (ends[row], place), (7, 0), textcoords="offset points", va="center_baseline"
        )
    _finish(axes, list(rows), max(ends.values()))
    handles = [Patch(color=c, label=p) for p, c in zip(parts, PALETTE, strict=False)]
    figure.legend(
        handles=handles, loc="upper left", ncols=len(parts), frameon=False, borderpad=0,
        bbox_to_anchor=(left / width, 1.0), borderaxespad=0, handlelength=0.9, handleheight=0.9,
        labelcolor=SOFT, columnspacing=1.6, handletextpad=0.5,
    )  # fmt: skip
    return to_svg(figure, name, label)


@rc_context(STYLE)
def columns(name: str, label: str, bars: Sequence[Bar], axis_label: str, width: int = FULL) -> str:
    """Return upright bars side by side: a histogram, each bar with its text above."""
    figure, axes = canvas(width, 240, 8, 8, 24, 46)
    places = range(len(bars))
    axes.bar(places, [b.value for b in bars], width=0.82, color=[b.color for b in bars])
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            bar.text, (place, bar.value), (0, 5), textcoords="offset points",
            ha="center", color=INK, size=11.5,
        )  # fmt: skip
    axes.set_xticks(list(places), [b.name for b in bars])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(axis_label)
    return to_svg(figure, name, label)


def _margin(names: Sequence[str] | Mapping[str, object]) -> int:
    return round(max(len(n) for n in names) * _BAR_LETTER) + 12


def _finish(axes: Axes, names: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
