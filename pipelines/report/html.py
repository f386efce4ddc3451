"""Pieces of a page: tables, figures and headed sections, as HTML text without scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass


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
