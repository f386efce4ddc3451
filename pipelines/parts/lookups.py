"""Which rows of which table each block looks up: what the oracle starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.star import Star
from schemas.columns import numpy_of, values_of
from schemas.jagged import Jagged, offsets_of
from schemas.job import SAMPLES, DataConfig
from schemas.layout import inverse_column
from schemas.oracle import unique_per_block
from schemas.rows import ids_of, rows_of_ids


@dataclass(frozen=True, slots=True)
class TableLookups:
    """Look-ups of one table in the training blocks of one part.

    Attributes:
        num_lookups: if every sample does its own.
        num_lookups_dedup: once per unique tuple of a block.
        accesses: for each block its ascending distinct rows; no rows for evaluation blocks.
    """

    num_lookups: int
    num_lookups_dedup: int
    accesses: Jagged


def lookups_of(
    star: Star, is_training: NDArray[np.bool_], data: DataConfig
) -> Iterator[tuple[str, TableLookups]]:
    """Yield each table's look-ups in one part.

    Args:
        star: the part.
        is_training: (num_blocks,) bool.
        data: tables and groups.
    """
    for name, table in data.tables.items():
        expanded = dedup = 0
        rows, blocks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for feature in table.features:
            group = data.group_of_column.get(feature, SAMPLES)
            values, block, repeats = _values(star, feature, group)
            used = is_training[block]
            rows.append(rows_of_ids(values[used], name, table))
            blocks.append(block[used])
            dedup += int(used.sum())
            expanded += int(repeats[used].sum())
        joined = unique_per_block(*_by_block(rows, blocks), len(is_training))
        yield name, TableLookups(expanded, dedup, joined)


def _by_block(
    rows: Sequence[NDArray[np.int64]], blocks: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge the look-ups of several features, each in block order, into block order."""
    joined = np.concatenate(blocks)
    order = np.argsort(joined, kind="stable")  # runs are ascending: numpy merges them
    return np.concatenate(rows)[order], joined[order]


def _values(
    star: Star, feature: str, group: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of a feature, the block of each, and how many samples share each."""
    table = star.samples if group == SAMPLES else star.groups[group]
    per_block = star.samples_per_block if group == SAMPLES else star.unique_per_block[group]
    block = np.repeat(np.arange(len(per_block)), per_block)
    repeats = np.ones(table.num_rows, np.int64)
    if group != SAMPLES:
        starts = offsets_of(per_block)[:-1]
        sample_block = np.repeat(np.arange(len(per_block)), star.samples_per_block)
        tuples = numpy_of(star.samples[inverse_column(group)]) + starts[sample_block]
        repeats = np.bincount(tuples, minlength=table.num_rows).astype(np.int64)
    values, offsets = values_of(table[feature])
    lengths = np.diff(offsets)
    return ids_of(values), np.repeat(block, lengths), np.repeat(repeats, lengths)


def lookups_table(accesses: Jagged) -> pa.Table:
    """Return accesses as an Arrow table, one row per block."""
    rows = pa.LargeListArray.from_arrays(pa.array(accesses.offsets), pa.array(accesses.values))
    return pa.table({"num_rows": pa.array(accesses.lengths), "rows": rows})
