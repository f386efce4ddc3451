"""What the oracle tells of the rows of a whole run, in one pass over next-use distances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.job_train import CacheConfig
from schemas.oracle import NEVER
from schemas.plan_size import required_rows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Rows of all tables, or of one.

    Attributes:
        window_rows: the smallest cache with which the plan works.
        fetched_rows: that a time to live fetches, summed over steps.
        touched_rows: (num_steps,) distinct rows up to the end of each step.
    """

    window_rows: int
    fetched_rows: int
    touched_rows: Ints


def look_ahead(tables: Iterable[Iterable[NDArray[np.integer]]], cache: CacheConfig) -> Lookahead:
    """Return what a run needs, over all its tables.

    Args:
        tables: for each table, for each step the next-use distances of its entries.
        cache: policy and limits.
    """
    return added([_of_table(distances, cache) for distances in tables])


def added(parts: Sequence[Lookahead]) -> Lookahead:
    """Return the sums over tables, of which the shorter ones touch nothing more at their end.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("lookahead must cover a table, got none; name one")
    length = max(len(part.touched_rows) for part in parts)
    touched = [np.pad(p.touched_rows, (0, length - len(p.touched_rows)), "edge") for p in parts]
    return Lookahead(
        sum(part.window_rows for part in parts),
        sum(part.fetched_rows for part in parts),
        np.sum(touched, axis=0),
    )


def _of_table(distances: Iterable[NDArray[np.integer]], cache: CacheConfig) -> Lookahead:
    entries: list[int] = []
    kept = 0
    returning = np.zeros(1024, np.int64)  # by step, rows that an earlier step used

    def counted() -> Iterator[NDArray[np.integer]]:
        nonlocal kept, returning
        for step, found in enumerate(distances):
            again = np.bincount(found[found != NEVER])
            entries.append(len(found))
            kept += int(again[: cache.lookahead + 1].sum())
            top = step + len(again)
            if top > len(returning):
                returning = np.concatenate([returning, np.zeros(top, np.int64)])
            returning[step:top] += again
            yield found

    required = required_rows(counted(), cache)
    first = np.array(entries, np.int64) - returning[: len(entries)]
    touched = np.cumsum(first) if entries else np.zeros(1, np.int64)
    return Lookahead(required, sum(entries) - kept, touched)
