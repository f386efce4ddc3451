"""Bar charts of the report: horizontal, labelled at the bar, without axes to read values from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pipelines.report.svg import FULL, INK, OURS, PALETTE, SOFT, STYLE, canvas, to_svg

_ROW = 34
_LETTER = 7.4


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
    right = round(max(len(b.text) for b in bars) * _LETTER) + 14
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
    right = round(max(len(t) for t in texts.values()) * _LETTER) + 14
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
    return round(max(len(n) for n in names) * _LETTER) + 12


def _finish(axes: Axes, names: Sequence[str], longest: float) -> None:
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest or 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
