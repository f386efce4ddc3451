"""Verify a dataset: recompute the counts, checksums, access lists and next uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.table.commit import anomalies_text_of
from pipelines.table.rows import segment_session_lengths
from pipelines.table.segment import split_ranges, sum_bytes
from schemas.accesses import TableAccesses
from schemas.arrays import Jagged, comparable_tuple, is_list, numpy_of, unique_tuples, values_of
from schemas.dataset import (
    Dataset,
    IndexPart,
    Segment,
    access_lists,
    has_accesses,
    missing_column_defaults,
    open_dataset,
    type_name,
)
from schemas.errors import SchemaError
from schemas.files import ListFiles, find_damaged_files
from schemas.fitted import load_fitted
from schemas.group_files import read_group
from schemas.layout import BLOCK, DATA_DIRECTORIES, TRAIN, UNIQUE_INDEX, num_unique_column
from schemas.manifest import GroupCounts, IndexEntry, TableCounts
from schemas.oracle import NextUseTracker, unique_per_block
from schemas.order import Order
from schemas.rows import ids_of, rows_of_ids
from schemas.samples import blocks_of_row_group, read_joined_row_group, row_groups
from schemas.storage import Location

SETTINGS = ("batch_samples", "epochs", "shuffle", "seed")
"""Settings of an index that each of its parts repeats."""


def verify(path: Path | Location) -> dict[str, Any]:
    """Verify a dataset.

    Returns:
        `num_samples, num_segments, num_blocks, problems`; without problems, all counts, checksums,
        tuples, access lists and next uses are correct.
    """
    problems: list[str] = []
    dataset = open_dataset(path)
    for segment in dataset.segments:
        problems.extend(f"{segment.id}/{p}" for p in segment_problems(segment, dataset))
    sound = not problems
    problems.extend(type_problems(dataset))
    for index in dataset.manifest.indexes:
        for segment in dataset.segments:
            if segment.id in index.parts:
                one = replace(dataset, segments=(segment,))
                found = part_problems(one, index, sound)
                problems.extend(f"{index.id}/{index.parts[segment.id].id}/{p}" for p in found)
    return {
        "num_samples": sum(s.manifest.num_samples for s in dataset.segments),
        "num_segments": len(dataset.segments),
        "num_blocks": sum(s.manifest.num_blocks for s in dataset.segments),
        "problems": problems,
    }


def segment_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    """Yield the problems of a segment, one line each."""
    damaged = find_damaged_files(segment.directory, segment.files)
    yield from damaged
    if damaged:
        return
    try:
        load_fitted(dataset.directory, segment.manifest.fitted, dataset.job.data)
        yield from count_problems(segment, dataset)
        for file_index, row_group in row_groups(segment):
            location = f"row group {row_group} of part {file_index}"
            samples = read_joined_row_group(segment, file_index, row_group, dataset.job.data)
            chosen = blocks_of_row_group(segment, file_index, row_group)
            expected = int(segment.column("num_samples")[chosen].sum())
            if samples.num_rows != expected:
                yield f"{location}: {samples.num_rows} samples instead of {expected}"
            yield from _group_problems(segment, dataset, file_index, row_group)
        yield from _access_problems(segment, dataset)
        anomalies_text_of(segment)  # raises if it is missing or changed
    except SchemaError as error:
        yield str(error)


def count_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    """Yield a line for each wrong field of a segment's manifest."""
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
    for group, group_counts in groups.items():
        unique = int(segment.num_unique(group).sum())
        claims[num_unique_column(group)] = m.groups[group].num_unique, unique
        claims[f"groups.{group}"] = asdict(m.groups[group]), asdict(group_counts)
    for table, table_counts in tables.items():
        claims[f"tables.{table}"] = asdict(m.tables[table]), asdict(table_counts)
    yield from _differences(claims)


def _differences(claims: Mapping[str, tuple[object, object]]) -> Iterator[str]:
    """Yield a line for each field whose value in the manifest differs from the stored value."""
    for name, (claimed, stored) in claims.items():
        if claimed != stored:
            yield f"MANIFEST.json: {name} is {claimed}, stored are {stored}"


def _bytes(segment: Segment, *directories: str) -> int:
    return sum_bytes(list(segment.files.values()), *directories)


def num_rejects(segment: Segment) -> int:
    """Return the number of stored rejects."""
    paths = [path for path in segment.files if path.startswith("rejects/")]
    return sum(segment.file(path).num_rows for path in paths)


def stored_counts(
    segment: Segment, dataset: Dataset
) -> tuple[dict[str, GroupCounts], dict[str, TableCounts], dict[str, str]]:
    """Count list values of groups and look-ups of tables, with and without deduplication.

    Returns:
        Counts of each group, of each table of the segment, and the types of all columns.
    """
    data, missing = dataset.job.data, missing_column_defaults(dataset, segment)
    training = set(segment.positions(TRAIN).tolist())
    values, stored_values, unique = Counter[str](), Counter[str](), Counter[str]()
    lookups, stored_lookups = Counter[str](), Counter[str]()
    types: dict[str, str] = {}
    for file_index, row_group in row_groups(segment):
        is_training = (
            int(np.flatnonzero(blocks_of_row_group(segment, file_index, row_group))[0]) in training
        )
        joined = read_joined_row_group(segment, file_index, row_group, data)
        types.update({f.name: type_name(f.type) for f in joined.schema})
        tuples = {g: read_group(segment.file, g, file_index, row_group) for g in data.groups}
        for group, table in tuples.items():
            unique[group] += table.num_rows
            for name in (c for c in table.column_names if c not in (BLOCK, UNIQUE_INDEX)):
                if is_list(table.schema.field(name).type):
                    values[group] += num_values(joined[name])
                    stored_values[group] += num_values(table[name])
        for feature, name in data.table_of_feature.items():
            if is_training and feature not in missing:
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
            num_unique_rows=num_rows_of(dataset, segment, t),
        )
        for t in data.tables
        if t in segment.manifest.tables
    }
    return groups, tables, types


def num_rows_of(dataset: Dataset, segment: Segment, table: str) -> int:
    """Return the distinct rows of a table in a segment."""
    if not has_accesses(dataset, segment, table):
        return 0
    return sum(file.num_rows for file in segment.edge_files(table))


def num_values(column: pa.ChunkedArray) -> int:
    """Return the values of a column: list elements one by one, nulls left out."""
    return len(values_of(column)[0])


def _group_problems(
    segment: Segment, dataset: Dataset, file_index: int, row_group: int
) -> Iterator[str]:
    chosen = blocks_of_row_group(segment, file_index, row_group)
    num_samples = segment.column("num_samples")
    for group, columns in dataset.job.data.groups.items():
        table = read_group(segment.file, group, file_index, row_group)
        location = f"group {group} in row group {row_group} of part {file_index}"
        blocks = numpy_of(table[BLOCK])
        expected = np.repeat(segment.block_ids[chosen], segment.num_unique(group)[chosen])
        if not np.array_equal(blocks, expected):
            yield f"{location}: tuples per block differ from blocks.parquet"
        if np.array_equal(segment.num_unique(group), num_samples):
            continue  # stored per sample
        first, _ = unique_tuples([blocks, *comparable_tuple(table, columns)])
        if len(first) != table.num_rows:
            yield f"{location}: {table.num_rows - len(first)} tuples are not unique in their block"


def _access_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    """Compare the access lists with the samples, one row group after the other."""
    training = segment.positions(TRAIN)
    stored = {t: _StoredAccesses(dataset, segment, t) for t in dataset.job.data.tables}
    different = {name for name, each in stored.items() if len(each) != len(training)}
    for positions, lookups in _training_lookups(segment, dataset):
        for name in stored.keys() - different:
            ids, blocks = lookups[name]
            rows = rows_of_ids(ids, name, dataset.job.data.tables[name])
            expected = unique_per_block(rows, blocks, len(positions))
            if not stored[name].equal(positions, expected):
                different.add(name)
    yield from (
        f"access/{name}: rows differ from those that the samples look up"
        for name in dataset.job.data.tables
        if name in different
    )


class _StoredAccesses:
    """The stored access lists of a table as rows; decoded file by file."""

    def __init__(self, dataset: Dataset, segment: Segment, table: str) -> None:
        self._num_blocks = len(segment.positions(TRAIN))
        self._lists: ListFiles | None = None
        if has_accesses(dataset, segment, table):
            self._lists = ListFiles(segment.access_files(table), access_lists)
            self._rows = segment.rows(table)

    def __len__(self) -> int:
        return self._num_blocks if self._lists is None else len(self._lists)

    def equal(self, positions: np.ndarray, expected: Jagged) -> bool:
        """Return whether the rows of blocks are the expected ones, which ascend in each block."""
        if self._lists is None:
            return not len(expected.values)
        bounds = expected.offsets.tolist()
        for index, position in enumerate(positions.tolist()):
            rows = np.sort(self._rows[self._lists[position]])
            if not np.array_equal(rows, expected.values[bounds[index] : bounds[index + 1]]):
                return False
        return True


Lookups = dict[str, tuple[np.ndarray, np.ndarray]]
"""By table the ids that samples look up, and the index of the block of each."""


def _training_lookups(segment: Segment, dataset: Dataset) -> Iterator[tuple[np.ndarray, Lookups]]:
    """Yield the training positions of the blocks of each row group, and their look-ups."""
    data = dataset.job.data
    first_position = segment.positions(TRAIN)[:1].sum()
    is_training = np.isin(np.arange(segment.blocks.num_rows), segment.positions(TRAIN))
    defaults = missing_column_defaults(dataset, segment)
    for file_index, row_group in row_groups(segment):
        chosen = np.flatnonzero(blocks_of_row_group(segment, file_index, row_group))
        if not is_training[chosen[0]]:
            continue
        samples = read_joined_row_group(segment, file_index, row_group, data, defaults)
        block = np.repeat(np.arange(len(chosen)), segment.column("num_samples")[chosen])
        ids: dict[str, list[np.ndarray]] = {t: [np.empty(0, np.int64)] for t in data.tables}
        blocks: dict[str, list[np.ndarray]] = {t: [np.empty(0, np.int64)] for t in data.tables}
        for feature, table in data.table_of_feature.items():
            values, offsets = values_of(samples[feature])
            ids[table].append(ids_of(values))
            blocks[table].append(np.repeat(block, np.diff(offsets)))
        yield (
            chosen - first_position,
            {t: (np.concatenate(ids[t]), np.concatenate(blocks[t])) for t in data.tables},
        )


def type_problems(dataset: Dataset) -> Iterator[str]:
    """Yield a line for each column that two segments store as different types."""
    types = dataset.column_types
    for segment in dataset.segments:
        for name, kind in segment.manifest.columns.items():
            if kind != types[name]:
                yield f"{segment.id}: column {name} is {kind}, elsewhere {types[name]}"


def part_problems(dataset: Dataset, entry: IndexEntry, sound: bool) -> Iterator[str]:
    """Yield the problems of the part of an index for one segment, one line each.

    `dataset` has this segment alone. Next uses are recomputed if the segments are `sound`.
    """
    try:
        index = dataset.open_index(entry)
    except SchemaError as error:
        yield str(error)
        return
    (part,), (segment,) = index.parts, dataset.segments
    damaged = find_damaged_files(part.directory, part.files)
    yield from damaged
    if damaged or not sound:
        return
    order = index.order.of_segment(0)
    manifest, num_accesses = part.manifest, dict[str, tuple[int, ...]]()
    for table in sorted(segment.manifest.tables):
        accesses = TableAccesses(dataset, table, order)
        entries, is_equal = compare_uses(part, table, accesses, order)
        num_accesses[table] = entries
        if not is_equal:
            yield f"{table}: next uses differ from the access lists"
    yield from _differences(
        {
            **{n: (getattr(manifest, n), getattr(entry, n)) for n in SETTINGS},
            "num_steps": (manifest.num_steps, order.steps_per_epoch),
            "num_accesses": (dict(manifest.num_accesses), num_accesses),
        }
    )


def compare_uses(
    part: IndexPart, table: str, accesses: TableAccesses, order: Order
) -> tuple[tuple[int, ...], bool]:
    """Compare the stored uses of a table with its access lists.

    `part`, `accesses` and `order` are of one segment alone.

    Returns:
        The entries of each epoch, and whether all uses are equal.
    """
    stored, num_entries = part.steps(table), list[int]()
    is_equal = len(stored) == order.num_steps
    for epoch in range(order.epochs if is_equal else 0):
        tracker = NextUseTracker(len(accesses.rows))
        first, last = (np.full(len(accesses.rows), -1, np.int32) for _ in range(2))
        num_entries.append(0)
        for step in reversed(range(order.steps_per_epoch)):
            train_step = epoch * order.steps_per_epoch + step
            numbers = accesses.numbers(train_step)
            num_entries[-1] += len(numbers)
            expected = tracker.link(numbers, step)
            is_equal = is_equal and np.array_equal(stored[train_step], expected)
            first[numbers] = step
            last[numbers[last[numbers] < 0]] = step
        uses = part.uses(table, epoch)
        is_equal = is_equal and all(map(np.array_equal, uses, (first, last)))
    return tuple(num_entries), is_equal
