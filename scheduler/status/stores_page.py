"""The part of the page that shows who holds a job's rows."""

from __future__ import annotations

from html import escape

from scheduler.machine.slots import NUM_RANGES, spans
from scheduler.machine.watch import LEAD_SEC
from scheduler.status.charts import meter
from scheduler.status.numbers import memory, percent
from scheduler.status.parts import cores, table, text
from scheduler.status.stores import Move, Stores, StoreView, in_words
from schemas.hashing import NUM_SLOTS

TONES = 4
"""Looks of cells; stores that follow each other have different ones, and each cell says its own."""
UNKNOWN = "not known yet"


def stores_section(stores: Stores, key: str) -> str:
    """Return who holds a job's rows, as a part of the job's own section.

    Args:
        stores: of the job.
        key: id of the job's section.
    """
    key = f"{key}-stores"
    ahead = f"accesses in {LEAD_SEC:.0f} s"
    head = ("store", "process", "state", "ranges", "accesses now", ahead, "memory", "cores")
    rows = map(_row, stores.stores)
    return (
        f'<section id="{key}" class="stores" aria-labelledby="{key}-title">'
        f'<h3 id="{key}-title">Stores</h3>'
        f"{_cells(stores)}{table('Stores and their ranges', head, rows, f'{key}-table')}"
        f'<p class="soft">{escape(_explained(stores))}</p></section>'
    )


def _cells(stores: Stores) -> str:
    """Return a cell for each range that says whose it is, and what moves in words."""
    if not stores.owners:
        return "<p>No range has a store yet.</p>"
    places = {store.number: place for place, store in enumerate(stores.stores)}
    cells = "".join(
        _cell(number, owner, places[owner] % TONES, stores.move)
        for number, owner in enumerate(stores.owners)
    )
    return (
        f"<p>{escape(_moving(stores.move))}</p>"
        f'<ol class="ranges" role="list" aria-label="Store of each range">{cells}</ol>'
        '<p class="soft">Large: the store; small: the range of slots that it owns.</p>'
    )


def _cell(number: int, owner: int, tone: int, move: Move | None) -> str:
    named = f"<span>{_unseen('range ')}{number}{_unseen(': ')}</span>"
    if move is None or number not in move.ranges:
        return f'<li class="tone-{tone}">{named}<strong>{_unseen("store ")}{owner}</strong></li>'
    target = "" if move.target is None else f"<span> to {move.target}</span>"
    return (
        f'<li class="tone-{tone} moves">{named}'
        f"<strong>{_unseen('moving from ')}{owner}</strong>{target}</li>"
    )


def _unseen(said: str) -> str:
    return f'<span class="unseen">{said}</span>'


def _moving(move: Move | None) -> str:
    if move is None:
        return "No range is moving."
    return f"{in_words(move).capitalize()}."


def _row(store: StoreView) -> tuple[str, ...]:
    one = store.process
    ranges = escape(spans(store.ranges))
    shares = _share(store.share), _share(store.share_ahead)
    if one is None:
        return str(store.number), "none", "no process", ranges, *shares, "none", "none"
    held = "not read yet" if one.resident_bytes is None else memory(one.resident_bytes)
    limit = f" of {memory(one.limit_bytes)}" if one.limit_bytes else ""
    own = text(one.name), one.status, ranges, *shares, escape(f"{held}{limit}"), cores(one)
    return str(store.number), *own


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else meter(share, percent(share))


def _explained(stores: Stores) -> str:
    told = (
        f"A row lies in one of {NUM_SLOTS:,} slots, and these in {NUM_RANGES} ranges, which move "
        "as a whole."
    )
    if stores.step is None:
        return told
    told += f" Accesses are those that the oracle knows of, around step {stores.step:,}"
    if stores.step_ahead is None:
        return f"{told}."
    return f"{told} now and around step {stores.step_ahead:,} then."
