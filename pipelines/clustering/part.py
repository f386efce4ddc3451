"""Build one part of a segment from the samples of one range of session hashes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.atomic_files import partial_path
from pipelines.clustering.dedup import Star, to_star
from pipelines.clustering.order import Clustered, slice_clustered, sort_keys, sort_samples
from pipelines.clustering.writer import PartWriter, SegmentLayout
from pipelines.quality.splits import SliceStatistics, sum_by_split
from pipelines.quality.statistics import count_buckets, table_statistics
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, compact, join
from schemas.arrays import (
    Jagged,
    flat_list,
    is_list,
    is_text,
    numpy_of,
    offsets_of,
    one_chunk,
    values_of,
)
from schemas.config.job import SAMPLES, DataConfig
from schemas.features import FeatureSet
from schemas.fitted import FittedValues
from schemas.layout import BLOCK, EVALUATION, TRAIN, UNIQUE_INDEX, inverse_column, part_name
from schemas.oracle import unique_per_block
from schemas.rows import ids_of, rows_of_ids

# A part in pieces that fit in memory, whatever the size of its sessions.
#
# The order of a part is known from a few columns of its samples. Its blocks are then made piece
# by piece, each from the rows that belong to it; a session of any size is cut only where blocks
# are.

CHUNK_BYTES = 256 << 20
"""Bytes of the samples of a piece, each with its own lists; a worker holds about five times as
many where nothing repeats."""


def cluster_chunks(parts: Iterable[Tuples], data: DataConfig) -> Iterator[Clustered]:
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
        keys.append(sort_keys(part, data))
        total += expanded_bytes(part)
        if total <= CHUNK_BYTES:
            kept.append(part)
        else:
            kept.clear()
    ends = np.cumsum([k.num_rows for k in keys])
    order = sort_samples(pa.concat_tables(keys), data)
    del keys
    num_pieces = max(1, -(-total // CHUNK_BYTES))
    samples = -(-len(order.rows) // num_pieces)
    limit = -(-samples // data.block_samples) * data.block_samples
    for place in split_at_blocks(order.block, limit):
        rows = order.rows[place]
        yield slice_clustered(_taken(kept or parts, ends, rows), order, place)


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


def split_at_blocks(block: NDArray[np.int64], limit: int) -> Iterator[slice]:
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


def table_lookups(
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


def split_statistics(
    star: Star, clustered: Clustered, data: DataConfig, features: FeatureSet
) -> dict[str, SliceStatistics]:
    """Return the statistics of a part's samples by split.

    Args:
        star: the part's tables, training samples first.
        clustered: its samples in the same order.
        data: the job's data section.
        features: declared columns.
    """
    num_samples = star.samples.num_rows
    num_train = int((~clustered.is_evaluation).sum())
    train_blocks = int((np.cumsum(star.samples_per_block) <= num_train).sum())
    split_at_blocks = {TRAIN: (0, num_train), EVALUATION: (num_train, num_samples)}
    found: dict[str, SliceStatistics] = {}
    for split, (start, end) in split_at_blocks.items():
        if start == end:
            continue
        columns = table_statistics(star.samples.slice(start, end - start), _keys(star))
        num_unique: dict[str, int] = {}
        for group, table in star.groups.items():
            middle = int(star.unique_per_block[group][:train_blocks].sum())
            low, high = (0, middle) if split == TRAIN else (middle, table.num_rows)
            columns.update(table_statistics(table.slice(low, high - low), _keys(star)))
            num_unique[group] = high - low
        lengths = clustered.session_samples[start:end]
        found[split] = SliceStatistics(
            end - start,
            columns,
            count_buckets(lengths[lengths > 0]),
            _label_delays(clustered, slice(start, end), data, features),
            num_unique,
        )
    return found


def _keys(star: Star) -> set[str]:
    return {BLOCK, UNIQUE_INDEX, *(inverse_column(g) for g in star.groups)}


def _label_delays(
    clustered: Clustered, rows: slice, data: DataConfig, features: FeatureSet
) -> dict[int, int]:
    names = features.with_role("label_time")
    if not names:
        return {}
    known, time = (
        one_chunk(clustered.samples.column(c)).slice(rows.start, rows.stop - rows.start)
        for c in (names[0], data.session.time)
    )
    valid = known.is_valid()
    seconds = (
        numpy_of(known.filter(valid).cast(pa.int64()))
        - numpy_of(time.filter(valid).cast(pa.int64()))
    ) / 1e6
    return count_buckets(seconds)


LOOKUPS = "lookups"
"""Directory of the oracle's input inside a segment being built; gone before the commit."""


@dataclass(frozen=True, slots=True)
class GroupTotals:
    """Sums over one group of a part.

    Attributes:
        num_unique: unique tuples.
        num_values: list values if every sample had its own.
        num_values_dedup: list values that are stored.
    """

    num_unique: int
    num_values: int
    num_values_dedup: int

    def __add__(self, other: GroupTotals) -> GroupTotals:
        """Add the sums over two pieces."""
        return GroupTotals(
            self.num_unique + other.num_unique,
            self.num_values + other.num_values,
            self.num_values_dedup + other.num_values_dedup,
        )


@dataclass(frozen=True, slots=True)
class PartResult:
    """What the commit must know of a written part.

    Attributes:
        file_index: number of the part.
        num_samples: samples.
        num_rows: rows of the log that they were made from.
        num_sessions: sessions.
        blocks: rows of `blocks.parquet`.
        groups: sums by group.
        lookups: table to (num_lookups, num_lookups_dedup) in training blocks.
        slices: statistics by split.
    """

    file_index: int
    num_samples: int
    num_rows: int
    num_sessions: int
    blocks: pa.Table
    groups: Mapping[str, GroupTotals]
    lookups: Mapping[str, tuple[int, int]]
    slices: Mapping[str, SliceStatistics]


def serialize_result(result: PartResult) -> bytes:
    """Return a result as bytes, which a runner passes on without looking into it.

    Beam walks through everything in an element to learn its size: seventy results
    with their statistics took it 13 s.
    """
    return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


def deserialize_results(results: Iterable[bytes]) -> list[PartResult]:
    """Undo `packed` for results in any order; return them in the order of parts."""
    return sorted((pickle.loads(r) for r in results), key=lambda r: r.file_index)


def build_part(
    root: Path,
    file_index: int,
    samples: Iterable[Tuples],
    data: DataConfig,
    pins: SegmentLayout,
    features: FeatureSet,
    learned: FittedValues | None = None,
) -> PartResult:
    """Cluster, cut, deduplicate and write the samples of one part, piece by piece.

    Args:
        root: directory of the segment being built.
        file_index: number of the part.
        samples: all samples of the part's sessions, in any order; at least one row. Gone through
            several times where they are many.
        data: the job's data section.
        pins: what all parts have in common.
        features: declared columns.
        learned: what transforms learned.
    """
    writer = PartWriter(root, file_index, pins)
    lookups = LookupsWriter(root, file_index)
    results: list[PartResult] = []
    for clustered in cluster_chunks(samples, data):
        star = to_star(clustered, file_index, data, learned)
        blocks = writer.add(star, clustered)
        results.append(
            PartResult(
                file_index,
                clustered.samples.num_samples,
                num_rows(clustered.samples),
                clustered.num_sessions,
                blocks,
                {name: group_totals(star, name) for name in star.groups},
                lookups.add(star, blocks, data),
                split_statistics(star, clustered, data, features),
            )
        )
    writer.close()
    lookups.close()
    return reduce(_joined, results)


def _joined(left: PartResult, right: PartResult) -> PartResult:
    """Add the results of two pieces of a part."""
    lookups = {
        table: (known[0] + more[0], known[1] + more[1])
        for (table, known), more in zip(left.lookups.items(), right.lookups.values(), strict=True)
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
    """Return how many rows of the log gave samples: a row's first sample has list index 0."""
    return int(np.count_nonzero(samples.column(LIST_INDEX).to_numpy() == 0))


def group_totals(star: Star, group: str) -> GroupTotals:
    """Return the sums over one group: what is stored, and what every sample would need."""
    table = star.groups[group]
    starts = offsets_of(star.unique_per_block[group])[:-1]
    block = np.repeat(np.arange(len(starts)), star.samples_per_block)
    tuples = numpy_of(star.samples[inverse_column(group)]) + starts[block]
    stored = expanded = 0
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = np.diff(flat_list(table[name])[1])
            stored += int(lengths.sum())
            expanded += int(lengths[tuples].sum())
    return GroupTotals(table.num_rows, expanded, stored)


class LookupsWriter:
    """Writes which rows each block of a part looks up, for the oracle."""

    def __init__(self, root: Path, file_index: int) -> None:
        """Write nothing yet.

        Args:
            root: directory of the segment being built.
            file_index: number of the part.
        """
        self._root = root
        self._file_index = file_index
        self._writers: dict[Path, tuple[Path, pq.ParquetWriter]] = {}

    def add(self, star: Star, blocks: pa.Table, data: DataConfig) -> dict[str, tuple[int, int]]:
        """Write the next blocks; return (num_lookups, num_lookups_dedup) by table."""
        is_training = pa.compute.equal(blocks["split"], TRAIN).to_numpy()
        counts: dict[str, tuple[int, int]] = {}
        for table, lookups in table_lookups(star, is_training, data):
            path = self._root / LOOKUPS / table / part_name(self._file_index)
            rows = lookups_table(lookups.accesses)
            if path not in self._writers:
                partial = partial_path(path)
                writer = pq.ParquetWriter(partial, rows.schema, compression="lz4")
                self._writers[path] = partial, writer
            self._writers[path][1].write_table(rows)
            counts[table] = (lookups.num_lookups, lookups.num_lookups_dedup)
        return counts

    def close(self) -> None:
        """Finish the files and give them their names."""
        for path, (partial, writer) in self._writers.items():
            writer.close()
            partial.replace(path)
