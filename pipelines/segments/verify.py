"""Recompute everything a dataset claims about itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.parts.expand import joined_row_group, row_groups
from pipelines.segments.verify_counts import count_problems, index_count_problems, type_problems
from schemas.absent import absent_columns, numbered_accesses
from schemas.accesses import TableAccesses
from schemas.checked import verify_whole
from schemas.chosen import choose
from schemas.columns import comparable_tuple, numpy_of, values_of
from schemas.dataset import Dataset, Index, Segment, open_dataset
from schemas.errors import SchemaError
from schemas.jagged import unique_tuples
from schemas.job import OrderConfig
from schemas.layout import BLOCK, TRAIN
from schemas.learned import load_learned
from schemas.oracle import LastUses, unique_per_block
from schemas.order import Order
from schemas.rows import ids_of, rows_of_ids
from schemas.stored import read_group


def verify(path: Path) -> dict[str, Any]:
    """Check a dataset from its root down.

    Returns:
        `num_samples, num_segments, num_blocks, problems`; no problem means that all counts,
        checksums, tuples, access lists and next uses are what they should be.
    """
    problems: list[str] = []
    dataset = open_dataset(path)
    for segment in dataset.segments:
        problems.extend(f"{segment.manifest.id}/{p}" for p in segment_problems(segment, dataset))
    sound = not problems  # an index is recomputed from segments, so only from sound ones
    problems.extend(type_problems(dataset))
    for index in dataset.indexes:
        problems.extend(f"{index.manifest.id}/{p}" for p in index_problems(index, dataset, sound))
    return {
        "num_samples": sum(s.manifest.num_samples for s in dataset.segments),
        "num_segments": len(dataset.segments),
        "num_blocks": sum(s.manifest.num_blocks for s in dataset.segments),
        "problems": problems,
    }


def segment_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    """Yield what is wrong with a segment, one line each."""
    broken = verify_whole(segment.directory, segment.files)
    yield from broken
    if broken:
        return
    try:
        load_learned(dataset.directory, segment.manifest.learned, dataset.job.data)
        yield from count_problems(segment, dataset)
        for file_index, row_group in row_groups(segment):
            place = f"row group {row_group} of part {file_index}"
            samples = joined_row_group(segment, file_index, row_group, dataset.job.data)
            chosen = _chosen(segment, file_index, row_group)
            expected = int(segment.column("num_samples")[chosen].sum())
            if samples.num_rows != expected:
                yield f"{place}: {samples.num_rows} samples instead of {expected}"
            yield from _group_problems(segment, dataset, file_index, row_group)
        yield from _access_problems(segment, dataset)
    except SchemaError as error:
        yield str(error)


def _chosen(segment: Segment, file_index: int, row_group: int) -> np.ndarray:
    return (segment.column("file") == file_index) & (segment.column("row_group") == row_group)


def _group_problems(
    segment: Segment, dataset: Dataset, file_index: int, row_group: int
) -> Iterator[str]:
    chosen = _chosen(segment, file_index, row_group)
    for group, columns in dataset.job.data.groups.items():
        table = read_group(segment.file, group, file_index, row_group)
        place = f"group {group} in row group {row_group} of part {file_index}"
        blocks = numpy_of(table[BLOCK])
        wanted = np.repeat(segment.block_names[chosen], segment.num_unique(group)[chosen])
        if not np.array_equal(blocks, wanted):
            yield f"{place}: tuples per block differ from blocks.parquet"
        first, _ = unique_tuples([blocks, *comparable_tuple(table, columns)])
        if len(first) != table.num_rows:
            yield f"{place}: {table.num_rows - len(first)} tuples are not unique in their block"


def _access_problems(segment: Segment, dataset: Dataset) -> Iterator[str]:
    training = segment.positions(TRAIN)
    looked_up = _training_lookups(segment, dataset)
    for name, table in dataset.job.data.tables.items():
        ids, positions = looked_up[name]
        expected = unique_per_block(rows_of_ids(ids, name, table), positions, len(training))
        found, row_of = numbered_accesses(dataset, segment, name)
        rows = row_of[found.values]
        blocks = np.repeat(np.arange(found.num_rows), found.lengths)
        same_lengths = np.array_equal(found.offsets, expected.offsets)
        if not same_lengths or not np.array_equal(
            rows[np.lexsort((rows, blocks))], expected.values
        ):
            yield f"access/{name}: rows differ from those that the samples look up"


def _training_lookups(
    segment: Segment, dataset: Dataset
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return by table the ids that training samples look up, and their blocks' positions."""
    data = dataset.job.data
    first_position = segment.positions(TRAIN)[:1].sum()
    is_training = np.isin(np.arange(segment.blocks.num_rows), segment.positions(TRAIN))
    ids: dict[str, list[np.ndarray]] = {t: [np.empty(0, np.int64)] for t in data.tables}
    positions: dict[str, list[np.ndarray]] = {t: [np.empty(0, np.int64)] for t in data.tables}
    absent = absent_columns(dataset, segment)
    for file_index, row_group in row_groups(segment):
        chosen = np.flatnonzero(_chosen(segment, file_index, row_group))
        if not is_training[chosen[0]]:
            continue
        samples = joined_row_group(segment, file_index, row_group, data, absent)
        position = np.repeat(chosen - first_position, segment.column("num_samples")[chosen])
        for feature, table in data.table_of_feature.items():
            values, offsets = values_of(samples[feature])
            ids[table].append(ids_of(values))
            positions[table].append(np.repeat(position, np.diff(offsets)))
    return {t: (np.concatenate(ids[t]), np.concatenate(positions[t])) for t in data.tables}


def index_problems(index: Index, dataset: Dataset, sound: bool) -> Iterator[str]:
    """Yield what is wrong with an index, one line each.

    Args:
        index: an open index.
        dataset: its dataset.
        sound: whether the segments are, so that next uses can be recomputed from them.
    """
    broken = verify_whole(index.directory, index.files)
    yield from broken
    manifest = index.manifest
    known = {s.manifest.id for s in dataset.segments}
    if broken or not sound or not known.issuperset(manifest.segments):
        return
    dataset = choose(dataset, manifest.segments)  # an index may be over some of them
    config = OrderConfig(
        shuffle="blocks" if manifest.shuffle == "blocks" else "none", seed=manifest.seed
    )
    order = Order(
        tuple(len(s.positions(TRAIN)) for s in dataset.segments),
        manifest.batch_samples // dataset.job.data.block_samples,
        manifest.epochs,
        config,
    )
    for table in dataset.job.data.tables:
        accesses, found = TableAccesses(dataset, table, order), index.steps(table)
        uses, entries, same = LastUses(len(accesses.rows)), 0, len(found) == order.num_steps
        for train_step in range(order.num_steps - 1, -1, -1):
            expected = uses.link(accesses.numbers(train_step), train_step)
            entries += len(expected)
            same = same and np.array_equal(found[train_step], expected)
        yield from index_count_problems(index, order.num_steps, table, entries, len(accesses.rows))
        if not same:
            yield f"{table}: next uses differ from the access lists"
