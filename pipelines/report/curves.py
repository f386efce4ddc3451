"""Line charts of the report: each line named at its end, a light grid, no frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from numpy.typing import NDArray

from pipelines.report.numbers import short
from pipelines.report.svg import FULL, OTHER, SOFT, STYLE, canvas, to_svg

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
