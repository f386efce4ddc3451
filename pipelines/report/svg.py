"""Figures as SVG that can stand inside a page: no ids that clash, no addresses, no clock."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

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
