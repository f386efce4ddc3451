"""How even the slots' load is, how much a step moves, and how soon rows come back."""

from __future__ import annotations

import numpy as np

from pipelines.report.html import details, table
from pipelines.report.numbers import count, percent
from schemas.load import TableLoad


def load_tables(name: str, load: TableLoad) -> str:
    """Return the load of one table, to be opened by a click.

    Args:
        name: of the table.
        load: at least one access.
    """
    entries = int(load.reuse.sum()) + load.never
    bins = np.flatnonzero(load.reuse).tolist()
    rows = [(steps_of(i), count(load.reuse[i]), percent(load.reuse[i] / entries)) for i in bins]
    rows.append(("never again", count(load.never), percent(load.never / entries)))
    reuse = table(
        f"Table {name}: steps until a row is used again.", ["steps", "accesses", "share"], rows
    )
    total = load.slots.sum(axis=1)
    even = table(
        f"Table {name}: accesses of {load.slots.shape[1]} equal ranges of hash slots in each "
        f"{load.slots.shape[0]}th of the run; over all of it the busiest range has "
        f"{load.imbalance:.2f} times the mean. A step needs {count(load.rows_per_step.mean())} "
        f"rows on average, {count(load.rows_per_step.max())} at most.",
        ["part of the run", "accesses", "idlest range", "busiest range"],
        [
            (f"{i + 1}", count(total[i]), count(part.min()), count(part.max()))
            for i, part in enumerate(load.slots)
        ],
    )
    return details(f"Reuse distances and load of table {name}", reuse + even)


def steps_of(power: int) -> str:
    """Return the distances of a bin.

    Example:
        >>> steps_of(0), steps_of(3)
        ('1', '8 to 15')
    """
    return "1" if power == 0 else f"{2**power} to {2 ** (power + 1) - 1}"
