"""Which rows of a table the training ranges of segments use, from their edges: no list is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from schemas.absent import looks_up
from schemas.checked import sha256_of
from schemas.dataset import Dataset, Segment
from schemas.errors import SchemaError
from schemas.forgotten import names_before
from schemas.layout import MANIFEST


def rows_used(dataset: Dataset, segments: Iterable[Segment], table: str) -> NDArray[np.int64]:
    """Return the distinct rows that the training blocks of segments look up, ascending.

    Args:
        dataset: that the segments are of.
        segments: of it.
        table: table name.
    """
    found = [s.rows(table) for s in segments if looks_up(dataset, s, table)]
    return np.unique(np.concatenate([np.empty(0, np.int64), *found]))


def rows_of_days(
    dataset: Dataset, table: str, num_days: int | None, trained: Sequence[str]
) -> NDArray[np.int64] | None:
    """Return the ascending rows that stay, None where all do.

    A row stays when a segment of the last `num_days` days uses it. The last of these days is the
    newest one of the segments that are trained now or were before; later days are not looked at.

    Args:
        dataset: the segments that are trained now, chosen from all.
        table: table name.
        num_days: days that count, the newest among them; None for all days.
        trained: hashes of the segments that were trained before.

    Raises:
        SchemaError: one of these segments has no day.
    """
    if num_days is None:
        return None
    lineage = dataset.manifest.lineage
    before = [s for s in dataset.others if not _hashes(s, lineage).isdisjoint(trained)]
    newest = max(_day_of(s) for s in (*dataset.segments, *before))
    first = newest - timedelta(days=num_days - 1)
    everything = (*dataset.segments, *dataset.others)
    last = [s for s in everything if s.manifest.day and first <= _day_of(s) <= newest]
    return rows_used(dataset, last, table)


def _hashes(segment: Segment, lineage: Mapping[str, str]) -> frozenset[str]:
    """Return the hash of a segment's manifest, and those from before ids were forgotten in it."""
    return names_before(lineage, segment.manifest.id) | {sha256_of(segment.directory / MANIFEST)}


def _day_of(segment: Segment) -> date:
    if segment.manifest.day is None:
        raise SchemaError(
            "segment must have a day while rows expire by days, got none; leave --expire-days out, "
            "or build the dataset with --day",
            file=str(segment.directory / MANIFEST),
        )
    return date.fromisoformat(segment.manifest.day)
