"""Build one part of a segment from the samples of one range of session hashes.

A part is built in chunks that fit in memory, whatever the size of its sessions (`chunks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.clustering.chunks import cluster_chunks
from pipelines.clustering.star import Clustered, Star, to_star
from pipelines.clustering.writer import LOOKUPS, PartFiles, PartWriter, SegmentLayout
from pipelines.quality.column_statistics import count_buckets, table_statistics
from pipelines.quality.segment_statistics import SliceStatistics, sum_by_split
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples
from schemas.arrays import (
    Jagged,
    flat_list,
    is_list,
    numpy_of,
    offsets_of,
    one_chunk,
    values_of,
)
from schemas.config.job import SAMPLES, DataConfig
from schemas.features import FeatureSet
from schemas.files import FileEntry
from schemas.fitted import FittedValues
from schemas.layout import BLOCK, EVALUATION, TRAIN, UNIQUE_INDEX, inverse_column, part_path
from schemas.rows import distinct_rows, ids_of
from schemas.storage import Location


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Sums over one group of a part.

    `num_values` counts list values without deduplication, `num_values_dedup` those that are stored.
    """

    num_unique: int
    num_values: int
    num_values_dedup: int

    def __add__(self, other: GroupTotals) -> GroupTotals:
        """Add the sums of two chunks."""
        return GroupTotals(
            self.num_unique + other.num_unique,
            self.num_values + other.num_values,
            self.num_values_dedup + other.num_values_dedup,
        )


@dataclass(frozen=True, slots=True)
class PartResult:
    """Counts and statistics of a written part, for the segment's manifest.

    `num_rows` are rows of the log, `blocks` those of `blocks.parquet`, `lookups` is table to
    (num_lookups, num_lookups_dedup) in training blocks, `slices` are statistics by split.
    """

    file_index: int
    num_samples: int
    num_rows: int
    num_sessions: int
    blocks: pa.Table
    groups: Mapping[str, GroupTotals]
    lookups: Mapping[str, tuple[int, int]]
    slices: Mapping[str, SliceStatistics]
    files: tuple[FileEntry, ...] = ()


def build_part(
    root: Location,
    file_index: int,
    samples: Iterable[Tuples],
    data: DataConfig,
    layout: SegmentLayout | Future[SegmentLayout],
    features: FeatureSet,
    fitted: FittedValues | None = None,
) -> PartResult:
    """Cluster, deduplicate and write the samples of one part, chunk by chunk.

    `samples` are all of the part's sessions, in any order, at least one. They are iterated twice if
    they do not fit in memory. A layout that is still being chosen is awaited before the first
    write.
    """
    with PartFiles(root) as files:
        writer: PartWriter | None = None
        results: list[PartResult] = []
        for clustered in cluster_chunks(samples, data):
            star = to_star(clustered, file_index, data, fitted)
            slices = split_statistics(star, clustered, data, features)
            if writer is None:
                chosen = layout.result() if isinstance(layout, Future) else layout
                writer = PartWriter(files, file_index, chosen)
            blocks = writer.add(star, clustered)
            results.append(
                PartResult(
                    file_index,
                    clustered.samples.num_samples,
                    num_rows(clustered.samples),
                    clustered.num_sessions,
                    blocks,
                    {name: group_totals(star, name) for name in star.groups},
                    write_lookups(files, file_index, star, blocks, data),
                    slices,
                )
            )
        return replace(reduce(_merge_results, results), files=files.close())


def _merge_results(left: PartResult, right: PartResult) -> PartResult:
    lookups = {
        table: (a[0] + b[0], a[1] + b[1])
        for (table, a), b in zip(left.lookups.items(), right.lookups.values(), strict=True)
    }
    return PartResult(
        left.file_index,
        left.num_samples + right.num_samples,
        left.num_rows + right.num_rows,
        left.num_sessions + right.num_sessions,
        pa.concat_tables([left.blocks, right.blocks]),
        {g: left.groups[g] + right.groups[g] for g in left.groups},
        lookups,
        sum_by_split([left.slices, right.slices]),
    )


def num_rows(samples: Tuples) -> int:
    """Return the number of rows of the log; the first sample of each has list index 0."""
    return int(np.count_nonzero(samples.column(LIST_INDEX).to_numpy() == 0))


def group_totals(star: Star, group: str) -> GroupTotals:
    """Return the sums over one group of a part or chunk."""
    table, samples_per_tuple = star.groups[group], star.samples_per_tuple[group]
    stored = expanded = 0
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = np.diff(flat_list(table[name])[1])
            stored += int(lengths.sum())
            expanded += int(lengths @ samples_per_tuple)
    return GroupTotals(table.num_rows, expanded, stored)


def split_statistics(
    star: Star, clustered: Clustered, data: DataConfig, features: FeatureSet
) -> dict[str, SliceStatistics]:
    """Return the statistics of samples by split.

    Training samples come first in `star` and `clustered`, which have the same order.
    """
    num_samples = star.samples.num_rows
    num_train = int((~clustered.is_evaluation).sum())
    train_blocks = int((np.cumsum(star.samples_per_block) <= num_train).sum())
    ranges = {TRAIN: (0, num_train), EVALUATION: (num_train, num_samples)}
    key_columns = {BLOCK, UNIQUE_INDEX, *(inverse_column(g) for g in star.groups)}
    statistics: dict[str, SliceStatistics] = {}
    for split, (start, end) in ranges.items():
        if start == end:
            continue
        columns = table_statistics(star.samples.slice(start, end - start), key_columns)
        num_unique: dict[str, int] = {}
        for group, table in star.groups.items():
            num_train_rows = int(star.unique_per_block[group][:train_blocks].sum())
            low, high = (0, num_train_rows) if split == TRAIN else (num_train_rows, table.num_rows)
            columns.update(table_statistics(table.slice(low, high - low), key_columns))
            num_unique[group] = high - low
        lengths = clustered.session_samples[start:end]
        statistics[split] = SliceStatistics(
            end - start,
            columns,
            count_buckets(lengths[lengths > 0]),
            _label_delays(clustered, slice(start, end), data, features),
            num_unique,
        )
    return statistics


def _label_delays(
    clustered: Clustered, rows: slice, data: DataConfig, features: FeatureSet
) -> dict[int, int]:
    names = features.with_role("label_time")
    if not names:
        return {}
    label_time, time = (
        one_chunk(clustered.samples.column(c)).slice(rows.start, rows.stop - rows.start)
        for c in (names[0], data.session.time)
    )
    valid = label_time.is_valid()
    seconds = (
        numpy_of(label_time.filter(valid).cast(pa.int64()))
        - numpy_of(time.filter(valid).cast(pa.int64()))
    ) / 1e6
    return count_buckets(seconds)


def write_lookups(
    files: PartFiles, file_index: int, star: Star, blocks: pa.Table, data: DataConfig
) -> dict[str, tuple[int, int]]:
    """Write the rows that some blocks look up, the input of the oracle.

    Returns:
        (num_lookups, num_lookups_dedup) by table.
    """
    num_training = int(pc.sum(pc.equal(blocks["split"], TRAIN)).as_py() or 0)
    counts: dict[str, tuple[int, int]] = {}
    for name in data.tables:
        accesses, counts[name] = table_lookups(star, num_training, data, name)
        rows = lookups_table(accesses)
        path = f"{LOOKUPS}/{name}/{part_path(file_index)}"
        files.writer(path, partial(open_lookups, schema=rows.schema)).write_table(rows)
    return counts


def open_lookups(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Return a writer of look-ups; as differences of ascending rows they need no compression."""
    return pq.ParquetWriter(
        path,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        column_encoding={
            "num_rows": "DELTA_BINARY_PACKED",
            "rows.list.element": "DELTA_BINARY_PACKED",
        },
    )


def table_lookups(
    star: Star, num_training: int, data: DataConfig, name: str
) -> tuple[Jagged, tuple[int, int]]:
    """Return the look-ups of one table in the training blocks of a part or chunk.

    The first `num_training` blocks are for training; those for evaluation follow.

    Returns:
        For each block its ascending distinct rows, none for evaluation; and the number of look-ups
        without deduplication and once per unique tuple of a block.
    """
    expanded = dedup = 0
    columns: list[Jagged] = []
    for feature in data.tables[name].features:
        group = data.group_of_column.get(feature, SAMPLES)
        table = star.samples if group == SAMPLES else star.groups[group]
        per_block = star.samples_per_block if group == SAMPLES else star.unique_per_block[group]
        values, offsets = values_of(table[feature])
        rows_of_blocks = offsets_of(per_block)
        rows_of_blocks[num_training:] = rows_of_blocks[num_training]
        blocks = offsets[rows_of_blocks]
        columns.append(Jagged(ids_of(values.slice(0, blocks[-1])), blocks))
        lengths = np.diff(offsets[: rows_of_blocks[-1] + 1])
        dedup += int(blocks[-1])
        samples_per_tuple = star.samples_per_tuple.get(group)
        if samples_per_tuple is None:
            expanded += int(blocks[-1])
        else:
            expanded += int(lengths @ samples_per_tuple[: len(lengths)])
    return distinct_rows(columns, name, data.tables[name]), (expanded, dedup)


def lookups_table(accesses: Jagged) -> pa.Table:
    """Return accesses as an Arrow table with one row per block."""
    rows = pa.LargeListArray.from_arrays(pa.array(accesses.offsets), pa.array(accesses.values))
    return pa.table({"num_rows": pa.array(accesses.lengths), "rows": rows})
