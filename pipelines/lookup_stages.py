"""Look-ups as stages of a build: side tables sorted, cut by key, and joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from pipelines.context import BuildContext
from pipelines.partition import part_of_key
from pipelines.samples.lookups import (
    HIDDEN,
    SideTable,
    check_unique,
    joined,
    key_column,
    key_hashes,
    side_table,
    sorted_rows,
)
from pipelines.shuffle import SHUFFLE, group_rows
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN
from schemas.arrays import one_chunk

# Look-ups as stages of a build: side tables sorted, cut by key, and looked up in.
#
# `beam/transforms.py` runs them on workers, `executor.py` in this process.

_SIDE_BYTES = 32 << 20
"""Bytes of a side table that one part of a look-up by key takes."""


class Sides(dict[str, SideTable]):
    """Side tables by name; a class of its own, since a plain dict cannot be shared."""


def sorted_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Return all rows of a small side table in the order of look-ups.

    Raises:
        SchemaError: a table without time has two rows of one key.
    """
    config = context.data.sides[name]
    rows = pa.concat_tables([context.empty_rows[name], *tables])
    rows = sorted_rows(rows, config, context.key_types[name])
    check_unique(rows, name, config, context.listing)
    return rows


def write_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> Path:
    """Write a small side table to one file that workers map; a retry writes the same bytes."""
    rows = sorted_side(context, name, tables)
    number = list(context.data.sides).index(name)  # no name of a file: it may hold anything
    path = context.segment_root / SHUFFLE / f"side-{number}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with (
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    partial.replace(path)
    return path


def load_sides(paths: Mapping[str, str], context: BuildContext) -> Sides:
    """Return the small side tables of a build, mapped into memory."""
    sides = Sides()
    for name in context.broadcast:
        if name in paths:
            with pa.memory_map(paths[name]) as source:
                rows = pa.ipc.open_file(source).read_all().combine_chunks()
        else:  # every row was a reject
            rows = sorted_side(context, name, [])
        sides[name] = side_table(rows, context.data.sides[name])
    return sides


def sides_of(context: BuildContext, tables: Mapping[str, Sequence[pa.Table]]) -> Sides:
    """Return the small side tables of a build from their rows in memory."""
    return Sides(
        {
            name: side_table(sorted_side(context, name, tables.get(name, [])), config)
            for name, config in context.data.sides.items()
            if name in context.broadcast
        }
    )


def visible_columns(side: SideTable) -> pa.Table:
    """Return the columns of a side table that SQL sees."""
    return side.rows.drop_columns([n for n in side.rows.column_names if n in HIDDEN])


def join_one(samples: pa.Table, sides: Sides, context: BuildContext, index: int) -> pa.Table:
    """Return samples after one look-up in a small side table."""
    join = context.data.samples.joins[index]
    config, time = context.data.sides[join.side], join.as_of or context.data.session.time
    return joined(samples, sides[join.side], config, join, time)


def num_look_up_parts(context: BuildContext, side: str) -> int:
    """Return the partitions in which samples meet the rows of a large side table."""
    num_bytes = sum(f.num_bytes for f in context.listing if f.source == side)
    return context.num_parts + num_bytes // _SIDE_BYTES


def cut_samples(
    context: BuildContext, index: int, num_parts: int, samples: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield samples by the partition of the key that a look-up asks for."""
    join = context.data.samples.joins[index]
    name = join.key or context.data.sides[join.side].key
    keys = key_column(samples, name, context.key_types[join.side])
    hashes = key_hashes(keys)
    missing = keys.is_null().to_numpy(zero_copy_only=False)
    # A null key finds nothing anywhere: such samples are spread evenly.
    hashes[missing] = key_hashes(one_chunk(samples[ORIGIN]))[missing]
    return group_rows(samples, part_of_key(hashes, num_parts))


def cut_side(
    context: BuildContext, name: str, num_parts: int, table: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield rows of a large side table by the partition of their key."""
    keys = key_column(table, context.data.sides[name].key, context.key_types[name])
    return group_rows(table, part_of_key(key_hashes(keys), num_parts))


def join_part(
    context: BuildContext, index: int, samples: Sequence[pa.Table], rows: Iterable[pa.Table]
) -> Iterator[pa.Table]:
    """Yield samples after one look-up among the rows of their keys, in chunks.

    Args:
        context: of the build.
        index: of the look-up.
        samples: of some keys.
        rows: of the side table: all of those keys.
    """
    join = context.data.samples.joins[index]
    config = context.data.sides[join.side]
    side = sorted_side(context, join.side, list(rows))
    time = join.as_of or context.data.session.time
    if samples:
        together = pa.concat_tables(samples)
        for start in range(0, together.num_rows, CHUNK_ROWS):
            chunk = together.slice(start, CHUNK_ROWS)
            yield joined(chunk, side_table(side, config), config, join, time)
