"""Stages of a build that look up samples in side tables.

A small side table is sorted once and broadcast. The rows of a large one and the samples are
partitioned by key, and each partition is looked up by itself. `beam/transforms.py` runs the stages
on workers, `executor.py` in this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from pipelines.atomic_files import atomic_write
from pipelines.context import BuildContext
from pipelines.partition import part_of_key
from pipelines.samples.lookups import (
    HIDDEN,
    SideTable,
    check_unique,
    key_column,
    key_hashes,
    look_up,
    side_table,
    sort_side_rows,
)
from pipelines.shuffle import SHUFFLE, group_rows
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN
from schemas.arrays import one_chunk

_PARTITION_BYTES = 32 << 20
"""Bytes of a side table in one partition."""


class Sides(dict[str, SideTable]):
    """Side tables by name; a subclass, as Beam cannot share a plain dict between workers."""


def sort_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Return rows of a side table in the order of look-ups.

    Raises:
        SchemaError: a table without time has two rows of one key.
    """
    config = context.data.sides[name]
    rows = pa.concat_tables([context.empty_rows[name], *tables])
    rows = sort_side_rows(rows, config, context.key_types[name])
    check_unique(rows, name, config, context.listing)
    return rows


def write_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> Path:
    """Write a small side table to one file for all workers; a retry writes the same bytes."""
    rows = sort_side(context, name, tables)
    number = list(context.data.sides).index(name)  # a name may contain any character
    path = context.segment_root / SHUFFLE / f"side-{number}.arrow"
    with (
        atomic_write(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    return path


def load_sides(paths: Mapping[str, str], context: BuildContext) -> Sides:
    """Return the small side tables of a build, memory-mapped."""
    sides = Sides()
    for name in context.broadcast:
        if name in paths:
            with pa.memory_map(paths[name]) as source:
                rows = pa.ipc.open_file(source).read_all().combine_chunks()
        else:  # all rows were rejected
            rows = sort_side(context, name, [])
        sides[name] = side_table(rows, context.data.sides[name])
    return sides


def sides_in_memory(context: BuildContext, tables: Mapping[str, Sequence[pa.Table]]) -> Sides:
    """Return the small side tables of a build from their rows."""
    return Sides(
        {
            name: side_table(sort_side(context, name, tables.get(name, [])), config)
            for name, config in context.data.sides.items()
            if name in context.broadcast
        }
    )


def visible_columns(side: SideTable) -> pa.Table:
    """Return the columns of a side table that SQL can read."""
    return side.rows.drop_columns([n for n in side.rows.column_names if n in HIDDEN])


def look_up_broadcast(
    samples: pa.Table, sides: Sides, context: BuildContext, index: int
) -> pa.Table:
    """Return samples after the look-up of an index, in a small side table."""
    join = context.data.samples.joins[index]
    config, time = context.data.sides[join.side], join.as_of or context.data.session.time
    return look_up(samples, sides[join.side], config, join, time)


def num_lookup_partitions(context: BuildContext, side: str) -> int:
    """Return the number of partitions of a look-up in a large side table."""
    num_bytes = sum(f.num_bytes for f in context.listing if f.source == side)
    return context.num_parts + num_bytes // _PARTITION_BYTES


def partition_samples(
    context: BuildContext, index: int, num_partitions: int, samples: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield samples by the partition of the key of a look-up."""
    join = context.data.samples.joins[index]
    name = join.key or context.data.sides[join.side].key
    keys = key_column(samples, name, context.key_types[join.side])
    hashes = key_hashes(keys)
    missing = keys.is_null().to_numpy(zero_copy_only=False)
    # No row is found for a null key: spread such samples evenly.
    hashes[missing] = key_hashes(one_chunk(samples[ORIGIN]))[missing]
    return group_rows(samples, part_of_key(hashes, num_partitions))


def partition_side(
    context: BuildContext, name: str, num_partitions: int, table: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield rows of a large side table by the partition of their key."""
    keys = key_column(table, context.data.sides[name].key, context.key_types[name])
    return group_rows(table, part_of_key(key_hashes(keys), num_partitions))


def look_up_partition(
    context: BuildContext, index: int, samples: Sequence[pa.Table], rows: Iterable[pa.Table]
) -> Iterator[pa.Table]:
    """Yield the samples of one partition after a look-up, in chunks.

    `rows` are those of the side table in the partition.
    """
    join = context.data.samples.joins[index]
    config = context.data.sides[join.side]
    side = side_table(sort_side(context, join.side, list(rows)), config)
    time = join.as_of or context.data.session.time
    if samples:
        table = pa.concat_tables(samples)
        for start in range(0, table.num_rows, CHUNK_ROWS):
            yield look_up(table.slice(start, CHUNK_ROWS), side, config, join, time)
