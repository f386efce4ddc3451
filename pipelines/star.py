"""From clustered samples to the star schema: unique tuples per block, and who points at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.cluster import Clustered
from pipelines.sources import ORIGIN
from pipelines.sql import LIST_INDEX, connect, run
from schemas.columns import comparable_tuple
from schemas.errors import SchemaError
from schemas.jagged import offsets_of, unique_tuples
from schemas.job import SAMPLES, DataConfig
from schemas.layout import BLOCK, FILE_SHIFT, UNIQUE_INDEX, inverse_column


@dataclass(frozen=True, slots=True)
class Star:
    """The tables of one part.

    Attributes:
        samples: one row per sample: block, columns of no group, inverse indices.
        groups: one row per unique tuple of a block.
        samples_per_block: (num_blocks,) int64.
        unique_per_block: group to (num_blocks,) int64.
    """

    samples: pa.Table
    groups: Mapping[str, pa.Table]
    samples_per_block: NDArray[np.int64]
    unique_per_block: Mapping[str, NDArray[np.int64]]


def to_star(clustered: Clustered, file_index: int, data: DataConfig) -> Star:
    """Deduplicate each group within each block, exactly, and apply the transforms.

    Args:
        clustered: samples of one part in order.
        file_index: number of the part, the upper bits of its block ids.
        data: groups and transforms.
    """
    rows = clustered.samples.drop_columns([ORIGIN, LIST_INDEX])
    num_blocks = int(clustered.block[-1]) + 1 if rows.num_rows else 0
    names = (np.int64(file_index) << np.int64(FILE_SHIFT)) + clustered.block
    grouped = {c for columns in data.groups.values() for c in columns}
    samples = pa.table(
        {BLOCK: pa.array(names), **{c: rows[c] for c in rows.column_names if c not in grouped}}
    )
    samples = _transformed(samples, data.transforms.get(SAMPLES, {}))
    groups: dict[str, pa.Table] = {}
    unique_per_block: dict[str, NDArray[np.int64]] = {}
    for group, columns in data.groups.items():
        first, inverse = unique_tuples([clustered.block, *comparable_tuple(rows, columns)])
        counts = np.bincount(clustered.block[first], minlength=num_blocks).astype(np.int64)
        starts = offsets_of(counts)[:-1]
        unique_index = np.arange(len(first)) - np.repeat(starts, counts)
        tuples = rows.select(list(columns)).take(pa.array(first))
        table = pa.table(
            {
                BLOCK: pa.array(names[first]),
                UNIQUE_INDEX: pa.array(unique_index.astype(np.int32)),
                **{c: tuples[c] for c in columns},
            }
        )
        groups[group] = _transformed(table, data.transforms.get(group, {}))
        local = inverse - starts[clustered.block]
        samples = samples.append_column(inverse_column(group), pa.array(local.astype(np.int32)))
        unique_per_block[group] = counts
    per_block = np.bincount(clustered.block, minlength=num_blocks).astype(np.int64)
    return Star(samples, groups, per_block, unique_per_block)


def _transformed(table: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
    """Add one column per SQL expression over the columns of the table."""
    if not expressions:
        return table
    selected = ", ".join(f'({text}) AS "{name}"' for name, text in expressions.items())
    connection = connect()
    made = run(connection, f"SELECT {selected} FROM tuples", {"tuples": table})
    if made.num_rows != table.num_rows:
        raise SchemaError(
            f"transforms must give one value per row, got {made.num_rows} for {table.num_rows} "
            "rows; remove aggregates and unnest"
        )
    for name in expressions:
        kind = made.schema.field(name).type
        column = made[name].cast(pa.float32()) if pa.types.is_float64(kind) else made[name]
        table = table.append_column(name, column)
    return table
