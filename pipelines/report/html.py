"""Tables, figures and sections of the report as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def digits(value: float) -> str:
    """Return three significant digits without an exponent.

    Example:
        >>> digits(12.23), digits(0.0123), digits(1234.5), digits(2.0), digits(0)
        ('12.2', '0.0123', '1,234', '2.00', '0')
    """
    if not value:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return f"{value:.3g}" if "e" in text else text.rstrip(".")


def size(num_bytes: float) -> str:
    """Return bytes with a decimal unit.

    Example:
        >>> size(8_300_000), size(999), size(1_230_000_000)
        ('8.30 MB', '999 B', '1.23 GB')
    """
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def memory(num_bytes: float) -> str:
    """Return bytes of memory with the binary unit in which it is given out.

    Example:
        >>> memory(2 << 30), memory(3 << 29)
        ('2 GiB', '1.5 GiB')
    """
    return f"{num_bytes / (1 << 30):.3g} GiB"


def count(number: float) -> str:
    """Return a whole number with thousands apart.

    Example:
        >>> count(189359)
        '189,359'
    """
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Return a number short enough for an axis.

    Example:
        >>> short(2_500_000), short(40_000), short(12)
        ('2.5M', '40k', '12')
    """
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:g}{unit}"
    return f"{number:g}"


def percent(share: float) -> str:
    """Return a share.

    Example:
        >>> percent(0.8312), percent(0.004)
        ('83.1 %', '0.4 %')
    """
    return f"{100 * share:.1f} %"


def compared(ours: float, other: float) -> str:
    """Return how a size compares with another one.

    Example:
        >>> compared(2.0, 8.0), compared(1.19, 1.0), compared(3.0, 3.0)
        ('4.00 times smaller than', '1.19 times as large as', 'as large as')
    """
    if ratio(max(ours, other), min(ours, other)) == "1.00":
        return "as large as"
    if ours < other:
        return f"{ratio(other, ours)} times smaller than"
    return f"{ratio(ours, other)} times as large as"


def ratio(a: float, b: float) -> str:
    """Return how many times larger `a` is.

    Example:
        >>> ratio(8.3, 0.68), ratio(1, 0)
        ('12.2', 'n/a')
    """
    return digits(a / b) if b else "n/a"


@dataclass(frozen=True, slots=True)
class Section:
    """One numbered part of the page.

    Attributes:
        name: its anchor.
        title: its heading.
        finding: one sentence that states what was found, with numbers.
        body: HTML below it.
    """

    name: str
    title: str
    finding: str
    body: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number.

    Attributes:
        value: the number as text.
        label: what it counts.
        detail: between what and what.
    """

    value: str
    label: str
    detail: str


def escape(text: object) -> str:
    """Return a text that HTML shows as it is."""
    return html.escape(str(text))


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    """Return a list of plain texts."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    total: Sequence[object] | None = None,
) -> str:
    """Return a table whose first column names the row; the others are numbers, right-aligned.

    Args:
        caption: what the table shows.
        head: one text per column.
        rows: cells, as they are to be shown; None is an absent value.
        total: cells of a last row that sums the others up, or None.
    """
    body = "".join(map(_row, rows)) + (_row(total, "total") if total else "")
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return (
        f'<div class="table"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[object], kind: str = "") -> str:
    name, *values = cells
    shown = "".join(f"<td>{'&ndash;' if v is None else escape(v)}</td>" for v in values)
    attribute = f' class="{kind}"' if kind else ""
    return f'<tr{attribute}><th scope="row">{escape(name)}</th>{shown}</tr>'


def words_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of words, left-aligned; its first column names the row."""
    return table(caption, head, rows).replace('class="table"', 'class="table words"', 1)


def command_table(caption: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Return a table of words; the last column holds commands."""
    body = "".join(
        f'<tr><th scope="row">{escape(a)}</th><td>{escape(b)}<br><code>{escape(c)}</code></td></tr>'
        for a, b, c in rows
    )
    return (
        f'<div class="table words"><table><caption>{escape(caption)}</caption>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(svg: str, caption: str) -> str:
    """Return an SVG with the text below it."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def side_by_side(*parts: str) -> str:
    """Return parts in one row where the page is wide enough."""
    return f'<div class="pair">{"".join(f"<div>{p}</div>" for p in parts)}</div>'


def details(title: str, body: str) -> str:
    """Return HTML that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def tiles(shown: Sequence[Tile]) -> str:
    """Return the row of headline numbers."""
    cells = "".join(
        f'<div><dt>{escape(t.label)}</dt><dd class="value">{escape(t.value)}</dd>'
        f"<dd>{escape(t.detail)}</dd></div>"
        for t in shown
    )
    return f'<dl class="tiles">{cells}</dl>'


def sections(shown: Sequence[Section]) -> str:
    """Return all sections, each under its heading and its finding."""
    return "\n".join(
        f'<section id="{s.name}"><h2>{escape(s.title)}</h2>'
        f'<p class="finding">{escape(s.finding)}</p>\n{s.body}</section>'
        for s in shown
    )
