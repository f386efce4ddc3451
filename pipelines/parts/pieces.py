"""A part in pieces that fit in memory, whatever the size of its sessions.

The order of a part is known from a few columns of its samples. Its blocks are
then made piece by piece, each from the rows that belong to it; a session of
any size is cut only where blocks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.parts.cluster import Clustered, clustered_of, keys_of, order_of
from pipelines.samples.tuples import Tuples, compact, join
from schemas.columns import flat_list, is_list, is_text
from schemas.jagged import offsets_of
from schemas.job import DataConfig

PIECE_BYTES = 256 << 20
"""Bytes of the samples of a piece, each with its own lists; a worker holds about five times as
many where nothing repeats."""


def pieces(parts: Iterable[Tuples], data: DataConfig) -> Iterator[Clustered]:
    """Yield the samples of a part in their final order.

    Args:
        parts: all samples of some session keys, in any order; gone through once for the order,
            and once for each piece where there are several.
        data: session, window, split and block size.
    """
    keys: list[pa.Table] = []
    kept: list[Tuples] = []
    total = 0
    for part in parts:
        keys.append(keys_of(part, data))
        total += expanded_bytes(part)
        if total <= PIECE_BYTES:
            kept.append(part)
        else:
            kept.clear()
    ends = np.cumsum([k.num_rows for k in keys])
    order = order_of(pa.concat_tables(keys), data)
    del keys
    num_pieces = max(1, -(-total // PIECE_BYTES))
    samples = -(-len(order.rows) // num_pieces)
    limit = -(-samples // data.block_samples) * data.block_samples
    for place in cuts(order.block, limit):
        rows = order.rows[place]
        yield clustered_of(_taken(kept or parts, ends, rows), order, place)


def expanded_bytes(samples: Tuples) -> int:
    """Return the bytes of samples as if each had its own tuples; the same however they are cut."""
    alone = sum(int(_bytes_per_row(c).sum()) for c in samples.samples.columns)
    return alone + sum(
        int(_bytes_per_row(column)[samples.references[group]].sum())
        for group, table in samples.uniques.items()
        for column in table.columns
    )


def _bytes_per_row(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the bytes of each value: items, and 8 more for a list or a text."""
    kind = column.type
    if is_list(kind) and is_text(kind.value_type):
        texts, offsets = flat_list(column)
        ends = offsets_of(_bytes_per_row(texts))
        return 8 + ends[offsets[1:]] - ends[offsets[:-1]]
    if is_list(kind):
        lengths, width = pc.list_value_length(column), kind.value_type.bit_width // 8
    elif pa.types.is_string(kind):
        lengths, width = pc.binary_length(column), 1
    else:
        return np.full(len(column), max(1, kind.bit_width // 8), np.int64)
    return 8 + width * pc.fill_null(lengths, 0).to_numpy().astype(np.int64)


def cuts(block: NDArray[np.int64], limit: int) -> Iterator[slice]:
    """Yield ranges of samples that end where a block ends, each of `limit` samples or one block.

    Example:
        >>> list(cuts(np.array([0, 0, 1, 1, 2, 3, 3]), 3))
        [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None)]
    """
    ends = np.flatnonzero(np.diff(block, append=-1)) + 1
    start = 0
    while start < len(block):
        fitting = ends[(ends > start) & (ends <= start + limit)]
        end = int(fitting[-1]) if len(fitting) else int(ends[ends > start][0])
        yield slice(start, end)
        start = end


def _taken(parts: Iterable[Tuples], ends: NDArray[np.int64], rows: NDArray[np.int64]) -> Tuples:
    """Return some rows of all parts, in the given order.

    Args:
        parts: samples.
        ends: rows of all parts up to and with each.
        rows: positions in all parts.
    """
    whole = len(rows) == ends[-1]
    part = np.searchsorted(ends, rows, side="right")
    by_part = np.argsort(part, kind="stable")
    bounds = np.searchsorted(part[by_part], np.arange(len(ends) + 1))
    found: list[Tuples] = []
    place = np.empty(len(rows), np.int64)
    done = 0
    for index, samples in enumerate(parts):
        mine = by_part[bounds[index] : bounds[index + 1]]
        if whole:  # as they are, which saves a copy
            place[mine] = rows[mine]
            found.append(samples)
        elif len(mine):
            local = rows[mine] - (ends[index] - samples.num_samples)
            place[mine] = done + np.arange(len(mine))
            found.append(compact(samples.take(local)))
            done += len(mine)
    return join(found).take(place)
