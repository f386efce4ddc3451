"""What all parts of a segment have in common, learned from the sessions of one of them.

Looking at a few whole sessions once is much cheaper than in every part, and
parts are equal ranges of a hash: what suits one suits all. The samples are
chosen by the hash of their session, so that workers, files and retries do not
change the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.cluster import cluster, hash_session_keys, keys_of
from pipelines.parts.encodings import TRIAL_ROWS, Encodings, choose
from pipelines.parts.star import Star, to_star
from pipelines.parts.stored import directory_of, stored_tables
from pipelines.parts.windows import Layouts, choose_windows
from pipelines.samples.tuples import Tuples, compact, join
from schemas.job import DataConfig
from schemas.layout import samples_path
from schemas.learned import Learned

PINNED_SAMPLES = TRIAL_ROWS
"""Samples that are looked at, about."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What is the same in all parts of a segment.

    Attributes:
        layouts: group to what its tuples share.
        encodings: directory of the segment (`samples`, `groups/user`) to how its files are written.
        num_parts: parts of the segment.
    """

    layouts: Layouts
    encodings: Mapping[str, Encodings]
    num_parts: int = 1


def pin(
    parts: Iterable[Tuples], data: DataConfig, learned: Learned | None = None, num_parts: int = 1
) -> Pins:
    """Learn from the samples of one part, in any order.

    Args:
        parts: all samples of the part's sessions, at least one; gone through twice.
        data: the job's data section.
        learned: what transforms learned.
        num_parts: parts of the segment.
    """
    star = to_star(cluster(join(few_sessions(parts, data)), data), 0, data, learned)
    layouts = choose_windows(star, data.storage)
    encodings = {name: choose(table) for name, table in tables_of(star, layouts)}
    return Pins(layouts, encodings, num_parts)


def tables_of(star: Star, layouts: Layouts) -> Iterator[tuple[str, pa.Table]]:
    """Yield the tables of a part by directory as they are stored, samples first."""
    yield directory_of(samples_path(0)), star.samples
    for group, layout in layouts.items():
        for file in stored_tables(group, star, layout, [star.groups[group].num_rows], 0):
            yield directory_of(file.path), file.table


def few_sessions(
    parts: Iterable[Tuples], data: DataConfig, limit: int = PINNED_SAMPLES
) -> list[Tuples]:
    """Return the sessions with the smallest hashes, of about `limit` samples or more.

    A last session that would make it twice as many is cut where it has that many.

    Args:
        parts: samples in any order; gone through twice.
        data: names the session key.
        limit: samples.
    """
    keys = [keys_of(p, data) for p in parts]
    hashes = [hash_session_keys(k["key"]) for k in keys]
    joined = np.sort(np.concatenate(hashes))
    largest = joined[min(limit, len(joined)) - 1]
    mine = [np.flatnonzero(h <= largest) for h in hashes]
    if sum(map(len, mine)) > 2 * limit:
        mine = _first(keys, hashes, mine, 2 * limit)
    return [compact(p.take(rows)) for p, rows in zip(parts, mine, strict=True) if len(rows)]


def _first(
    keys: Sequence[pa.Table],
    hashes: Sequence[NDArray[np.uint64]],
    mine: Sequence[NDArray[np.int64]],
    limit: int,
) -> list[NDArray[np.int64]]:
    """Return the rows of each part that come first by hash, time and place in the input."""
    part = np.repeat(np.arange(len(mine)), [len(rows) for rows in mine])
    columns = [
        np.concatenate([k[c].to_numpy()[rows] for k, rows in zip(keys, mine, strict=True)])
        for c in ("index", "origin", "time")
    ]
    hashed = np.concatenate([h[rows] for h, rows in zip(hashes, mine, strict=True)])
    first = np.sort(np.lexsort((*columns, hashed))[:limit])
    rows = np.concatenate(mine)
    return [rows[first[part[first] == index]] for index in range(len(mine))]
