"""What a segment's manifest claims in numbers, counted again from what is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.parts.expand import joined_row_group, row_groups
from pipelines.parts.sessions import segment_session_lengths
from pipelines.segments.commit import bytes_below, split_ranges
from schemas.absent import absent_columns, column_types, numbered_accesses, type_name
from schemas.columns import is_list, values_of
from schemas.dataset import Dataset, Index, Segment
from schemas.layout import (
    BLOCK,
    DATA_DIRECTORIES,
    TRAIN,
    UNIQUE_INDEX,
    num_unique_column,
)
from schemas.manifest import GroupCounts, TableCounts
from schemas.stored import read_group


def count_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    """Yield the claims of a segment's manifest that are not so, one line each."""
    m = segment.manifest
    groups, tables, columns = stored_counts(segment, dataset)
    claims: dict[str, tuple[object, object]] = {
        "num_samples": (m.num_samples, int(segment.column("num_samples").sum())),
        "num_sessions": (m.num_sessions, len(segment_session_lengths(segment, dataset.job.data))),
        "num_blocks": (m.num_blocks, segment.blocks.num_rows),
        "num_rejects": (m.num_rejects, num_rejects(segment)),
        "splits": (dict(m.splits), split_ranges(segment.blocks)),
        "input_bytes": (m.input_bytes, sum(f.num_bytes for f in m.listing)),
        "dataset_bytes": (m.dataset_bytes, _bytes(segment, *DATA_DIRECTORIES)),
        "oracle_bytes": (m.oracle_bytes, _bytes(segment, "access/", "edges/")),
        "columns": (dict(m.columns), columns),
    }
    for group, found in groups.items():
        unique = int(segment.num_unique(group).sum())
        claims[num_unique_column(group)] = m.groups[group].num_unique, unique
        claims[f"groups.{group}"] = asdict(m.groups[group]), asdict(found)
    for table, found in tables.items():
        claims[f"tables.{table}"] = asdict(m.tables[table]), asdict(found)
    for name, (claimed, found) in claims.items():
        if claimed != found:
            yield f"MANIFEST.json: {name} is {claimed}, stored are {found}"


def _bytes(segment: Segment, *directories: str) -> int:
    return bytes_below(list(segment.files.values()), *directories)


def num_rejects(segment: Segment) -> int:
    """Return the rows of a segment's rejects."""
    paths = [path for path in segment.files if path.startswith("rejects/")]
    return sum(pq.read_metadata(segment.directory / path).num_rows for path in paths)


def stored_counts(
    segment: Segment, dataset: Dataset
) -> tuple[dict[str, GroupCounts], dict[str, TableCounts], dict[str, str]]:
    """Count list values of groups and look-ups of tables, with and without deduplication.

    Returns:
        counts of each group, of each table that the segment knows, and the types of all columns.
    """
    data, absent = dataset.job.data, absent_columns(dataset, segment)
    training = set(segment.positions(TRAIN).tolist())
    values, stored_values, unique = Counter[str](), Counter[str](), Counter[str]()
    lookups, stored_lookups = Counter[str](), Counter[str]()
    types: dict[str, str] = {}
    for file_index, row_group in row_groups(segment):
        chosen = (segment.column("file") == file_index) & (segment.column("row_group") == row_group)
        is_training = int(np.flatnonzero(chosen)[0]) in training
        joined = joined_row_group(segment, file_index, row_group, data)
        types.update({f.name: type_name(f.type) for f in joined.schema})
        tuples = {g: read_group(segment.file, g, file_index, row_group) for g in data.groups}
        for group, table in tuples.items():
            unique[group] += table.num_rows
            for name in (c for c in table.column_names if c not in (BLOCK, UNIQUE_INDEX)):
                if is_list(table.schema.field(name).type):
                    values[group] += num_values(joined[name])
                    stored_values[group] += num_values(table[name])
        for feature, name in data.table_of_feature.items():
            if is_training and feature not in absent:
                owner = tuples.get(data.group_of_column.get(feature, ""), joined)
                lookups[name] += num_values(joined[feature])
                stored_lookups[name] += num_values(owner[feature])
    num_samples = int(segment.column("num_samples").sum())
    groups = {
        g: GroupCounts(
            num_unique=unique[g],
            dedup_factor=round(num_samples / unique[g], 6),
            num_values=values[g],
            num_values_dedup=stored_values[g],
        )
        for g in data.groups
    }
    tables = {
        t: TableCounts(
            num_lookups=lookups[t],
            num_lookups_dedup=stored_lookups[t],
            num_unique_rows=len(numbered_accesses(dataset, segment, t)[1]),
        )
        for t in data.tables
        if t in segment.manifest.tables
    }
    return groups, tables, types


def num_values(column: pa.ChunkedArray) -> int:
    """Return the values of a column: list elements one by one, nulls left out."""
    return len(values_of(column)[0])


def index_count_problems(
    index: Index, num_steps: int, table: str, entries: int, rows: int
) -> Iterator[str]:
    """Yield the claims of an index's manifest about one table that are not so.

    Args:
        index: an open index.
        num_steps: steps of its order.
        table: name of the table.
        entries: entries over all steps, as counted.
        rows: distinct rows, as counted.
    """
    m = index.manifest
    claims = {
        "num_steps": (m.num_steps, num_steps),
        f"num_accesses.{table}": (m.num_accesses[table], entries),
        f"num_rows.{table}": (m.num_rows[table], rows),
    }
    for name, (claimed, found) in claims.items():
        if claimed != found:
            yield f"MANIFEST.json: {name} is {claimed}, stored are {found}"


def type_problems(dataset: Dataset) -> Iterator[str]:
    """Yield the columns that two segments store as different types."""
    types = column_types(dataset)
    for segment in dataset.segments:
        for name, kind in segment.manifest.columns.items():
            if kind != types[name]:
                yield f"{segment.manifest.id}: column {name} is {kind}, elsewhere {types[name]}"
