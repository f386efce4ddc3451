"""Parts that the page is made of, as HTML that needs no more escaping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from scheduler.status.numbers import clock, digits, moment, visible
from scheduler.status.processes import ProcessView


def text(value: object) -> str:
    """Return what a log says as text of the page, its direction kept to itself."""
    return f"<bdi>{escape(visible(str(value)))}</bdi>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], key: str) -> str:
    """Return a table that scrolls in itself and is reached by keyboard.

    Args:
        caption: what it shows.
        head: one text per column.
        rows: cells as HTML; the first names the row.
        key: id of the table.
    """
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" id="{key}" role="region" aria-labelledby="{key}-caption" '
        f'tabindex="0"><table><caption id="{key}-caption">{escape(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def timed(time_sec: float) -> str:
    """Return a moment as the time of day."""
    return f'<time datetime="{moment(time_sec)}">{clock(time_sec)}</time>'


def cores(one: ProcessView) -> str:
    """Return the cores that a process kept busy of those that are booked for it."""
    booked = digits(one.cpus)
    return booked if one.busy_cores is None else f"{digits(round(one.busy_cores, 2))} of {booked}"


def details(title: str, body: str) -> str:
    """Return what is closed until somebody opens it."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
