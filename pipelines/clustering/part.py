"""Build one part of a segment from the samples of one range of session hashes.

A part is built in chunks that fit in memory, whatever the size of its sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.pipelines.clustering.star import Clustered, Star, cluster_chunks, to_star
from presage.pipelines.clustering.storage_layout import (
    SegmentLayout,
    as_stored,
    directory_of,
    open_writer,
    stored_tables,
)
from presage.pipelines.quality.column_statistics import count_buckets, table_statistics
from presage.pipelines.quality.segment_statistics import SliceStatistics, sum_by_split
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples
from presage.schemas.arrays import (
    Jagged,
    column_bytes,
    flat_list,
    is_list,
    numpy_of,
    offsets_of,
    one_chunk,
    values_of,
)
from presage.schemas.config.job import SAMPLES, DataConfig
from presage.schemas.dataset.files import FileEntry, describe_file
from presage.schemas.dataset.fitted import FittedValues
from presage.schemas.features import FeatureSet
from presage.schemas.layout import (
    BLOCK,
    EVALUATION,
    FILE_SHIFT,
    TRAIN,
    blocks_schema,
    internal_columns,
    num_unique_column,
    part_path,
)
from presage.schemas.rows import distinct_rows, ids_of
from presage.schemas.storage.location import Location

LOOKUPS = "lookups"
"""Directory of the oracle's input below a segment being built; removed before the commit."""


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
    they do not fit in memory. A layout that is still being chosen is awaited once they are sorted.
    """
    with PartWriter(root, file_index) as writer:
        results: list[PartResult] = []
        for clustered in cluster_chunks(samples, data):
            chosen = layout.result() if isinstance(layout, Future) else layout
            star = to_star(clustered, file_index, data, fitted, chosen.repeated)
            slices = split_statistics(star, clustered, data, features)
            lookups = {f: lookups_per_block(star, data, f) for f in data.table_of_feature}
            sums = block_sums(star, data, features.weight, lookups)
            blocks = writer.add(star, clustered, chosen, sums)
            results.append(
                PartResult(
                    file_index,
                    clustered.samples.num_samples,
                    num_rows(clustered.samples),
                    clustered.num_sessions,
                    blocks,
                    {name: group_totals(star, name) for name in star.groups},
                    write_lookups(writer, file_index, star, blocks, data, lookups),
                    slices,
                )
            )
        return replace(reduce(_merge_results, results), files=writer.close())


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


PARTS_PER_SUM = 16
"""Parts whose statistics are added at once; those of a part of the demo take 0.6 MiB."""


def sum_statistics(parts: Iterable[PartResult]) -> Iterator[PartResult]:
    """Add the statistics of consecutive parts; the first has the sum, the others have none then.

    Sums of sums keep other frequent values than one sum, so every runner adds the same parts.
    """
    for _, group in groupby(parts, key=lambda part: part.file_index // PARTS_PER_SUM):
        first, *others = group
        yield replace(first, slices=sum_by_split([first.slices, *(p.slices for p in others)]))
        yield from (replace(part, slices={}) for part in others)


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
    key_columns = internal_columns(star.groups, data.histories)
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


Lookups = Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
"""By sparse feature (num_blocks,) entries of each sample, and of each unique tuple of a block."""


def lookups_per_block(
    star: Star, data: DataConfig, feature: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (num_blocks,) entries of a feature, of each sample and of each unique tuple."""
    group = data.group_of_column.get(feature, SAMPLES)
    lengths = np.diff(values_of(_table_of(star, group)[feature])[1])
    dedup = _sum_per_block(star, group, lengths)
    if group == SAMPLES:
        return dedup, dedup
    return _sum_per_block(star, group, lengths * star.samples_per_tuple[group]), dedup


def block_sums(
    star: Star, data: DataConfig, weight: str | None, lookups: Lookups
) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
    """Return (num_blocks,) columns of `blocks.parquet`: the sum of weights, and look-ups.

    `weight` is the column of weights; without one each sample weighs 1.
    """
    weights = star.samples_per_block.astype(np.float64)
    if weight is not None:
        group = data.group_of_column.get(weight, SAMPLES)
        of_rows = numpy_of(_table_of(star, group)[weight]).astype(np.float64)
        if group != SAMPLES:
            of_rows = of_rows * star.samples_per_tuple[group]
        weights = _sum_per_block(star, group, of_rows)
    expanded, dedup = np.zeros((2, len(weights)), np.int64)
    for of_samples, of_tuples in lookups.values():
        expanded, dedup = expanded + of_samples, dedup + of_tuples
    return {"weight": weights, "num_lookups": expanded, "num_lookups_dedup": dedup}


def _table_of(star: Star, group: str) -> pa.Table:
    return star.samples if group == SAMPLES else star.groups[group]


def _rows_per_block(star: Star, group: str) -> NDArray[np.int64]:
    return star.samples_per_block if group == SAMPLES else star.unique_per_block[group]


def _sum_per_block(star: Star, group: str, of_rows: NDArray[Any]) -> NDArray[Any]:
    return np.add.reduceat(of_rows, offsets_of(_rows_per_block(star, group))[:-1])


def write_lookups(
    writer: PartWriter,
    file_index: int,
    star: Star,
    blocks: pa.Table,
    data: DataConfig,
    lookups: Lookups,
) -> dict[str, tuple[int, int]]:
    """Write the rows that some blocks look up, the input of the oracle.

    Returns:
        (num_lookups, num_lookups_dedup) by table, in training blocks.
    """
    num_training = int(pc.sum(pc.equal(blocks["split"], TRAIN)).as_py() or 0)
    counts: dict[str, tuple[int, int]] = {}
    for name, table in data.tables.items():
        of_features = [lookups[feature] for feature in table.features]
        counts[name] = (
            sum(int(expanded[:num_training].sum()) for expanded, _ in of_features),
            sum(int(dedup[:num_training].sum()) for _, dedup in of_features),
        )
        rows = lookups_table(table_lookups(star, num_training, data, name))
        path = f"{LOOKUPS}/{name}/{part_path(file_index)}"
        writer.writer(path, partial(open_lookups, schema=rows.schema)).write_table(rows)
    return counts


def open_lookups(path: Path | pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
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


def table_lookups(star: Star, num_training: int, data: DataConfig, name: str) -> Jagged:
    """Return the look-ups of one table in the training blocks of a part or chunk.

    The first `num_training` blocks are for training; those for evaluation follow.

    Returns:
        For each block its ascending distinct rows, none for evaluation.
    """
    columns: list[Jagged] = []
    if not data.tables[name].features:  # only histories look it up
        return Jagged(np.empty(0, np.int64), offsets_of(0 * _rows_per_block(star, SAMPLES)))
    for feature in data.tables[name].features:
        group = data.group_of_column.get(feature, SAMPLES)
        values, offsets = values_of(_table_of(star, group)[feature])
        rows_of_blocks = offsets_of(_rows_per_block(star, group))
        rows_of_blocks[num_training:] = rows_of_blocks[num_training]
        blocks = offsets[rows_of_blocks]
        columns.append(Jagged(ids_of(values.slice(0, blocks[-1])), blocks))
    return distinct_rows(columns, name, data.tables[name])


def lookups_table(accesses: Jagged) -> pa.Table:
    """Return accesses as an Arrow table with one row per block."""
    rows = pa.LargeListArray.from_arrays(pa.array(accesses.offsets), pa.array(accesses.values))
    return pa.table({"num_rows": pa.array(accesses.lengths), "rows": rows})


# Files of samples and groups.

ROW_GROUP_BYTES = 64 << 20
"""Maximum uncompressed bytes of a row group, samples and groups together. A reader has 16 of them
in memory; 32 MiB cost 7 % of the bytes of the demo's log, 16 MiB 15 % (benchmarks/order.md)."""
WINDOWS_BYTES = 256 << 20
"""Maximum uncompressed bytes of one row group with several windows from each part: the memory of a
reader that reads the windows of all parts in order."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one split that share a row group."""

    first: int
    end: int


def plan_row_groups(
    is_evaluation: NDArray[np.bool_],
    window: NDArray[np.int32],
    bytes_per_block: float,
    limit: int = ROW_GROUP_BYTES,
    windows_limit: int = ROW_GROUP_BYTES,
) -> list[BlockRange]:
    """Assign blocks to row groups: one or more per window, or one for several small windows.

    Args:
        is_evaluation: (num_blocks,) ascending.
        window: (num_blocks,) ascending in each split.
        bytes_per_block: mean uncompressed bytes of a block over all tables.
        limit: maximum uncompressed bytes of a row group.
        windows_limit: maximum uncompressed bytes of a row group of several windows.

    Example:
        >>> plan_row_groups(np.zeros(5, bool), np.array([0, 0, 1, 2, 2]), 1.0, 8, 3)
        [BlockRange(first=0, end=3), BlockRange(first=3, end=5)]
    """
    per_group, per_windows = (
        max(1, int(b // max(1.0, bytes_per_block))) for b in (limit, windows_limit)
    )
    changes = np.diff(is_evaluation, prepend=False) | (np.diff(window, prepend=0) != 0)
    changes[:1] = True
    cuts = np.flatnonzero(changes)
    groups: list[BlockRange] = []
    for start, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(window)], strict=True):
        last = groups[-1].first if groups else start
        if groups and end - last <= per_windows and is_evaluation[last] == is_evaluation[start]:
            groups[-1] = BlockRange(last, end)
        else:
            cuts_of_window = np.linspace(start, end, -(-(end - start) // per_group) + 1).astype(int)
            groups.extend(BlockRange(a, b) for a, b in pairwise(cuts_of_window.tolist()))
    return groups


class PartWriter:
    """Writes the Parquet files of one part chunk by chunk; they get their final names at the end.

    A context; at an object store, files are written to temporary files and uploaded at the end.
    """

    def __init__(self, root: Location, file_index: int) -> None:
        """Open no file yet; `root` is the directory of the segment being built."""
        self._root, self._file_index = root, file_index
        self._open = ExitStack()
        self._writers: dict[str, tuple[Path, pq.ParquetWriter]] = {}
        self._written: Counter[str] = Counter()
        self._num_row_groups = 0

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def writer(self, path: str, open_file: Callable[[Path], pq.ParquetWriter]) -> pq.ParquetWriter:
        """Return the writer of a file; the first call opens it under a temporary name."""
        if path not in self._writers:
            temporary = self._open.enter_context((self._root / path).new_file())
            self._writers[path] = temporary, open_file(temporary)
        return self._writers[path][1]

    def add(
        self,
        star: Star,
        clustered: Clustered,
        layout: SegmentLayout,
        sums: Mapping[str, NDArray[Any]],
    ) -> pa.Table:
        """Write samples and groups of the next chunk; return its rows of `blocks.parquet`.

        `clustered` has the same samples, for splits and windows; `sums` are columns of
        `blocks.parquet`.
        """
        first_sample = offsets_of(star.samples_per_block)[:-1]
        groups = plan_row_groups(
            clustered.is_evaluation[first_sample],
            clustered.window[first_sample],
            _bytes_per_block(star),
            windows_limit=min(ROW_GROUP_BYTES, WINDOWS_BYTES // layout.num_parts),
        )
        counts = [int(star.samples_per_block[g.first : g.end].sum()) for g in groups]
        self._write(part_path(self._file_index, "samples"), star.samples, counts, layout)
        for name in star.groups:
            unique = [int(star.unique_per_block[name][g.first : g.end].sum()) for g in groups]
            written = dict(self._written)
            for file in stored_tables(
                name, star, layout.layouts[name], unique, self._file_index, written
            ):
                self._write(file.path, file.table, file.row_groups, layout)
        blocks = _blocks_table(
            star, clustered, sums, self._file_index, groups, self._num_row_groups
        )
        self._num_row_groups += len(groups)
        return blocks

    def _write(
        self, path: str, table: pa.Table, rows_per_group: Sequence[int], layout: SegmentLayout
    ) -> None:
        encodings = layout.encodings[directory_of(path)]
        table = as_stored(table, encodings)
        open_file = partial(open_writer, schema=table.schema, encodings=encodings)
        writer, start = self.writer(path, open_file), 0
        for count in rows_per_group:
            rows = table.slice(start, count)
            writer.write_table(rows, row_group_size=max(1, count))
            start += count
        self._written[path] += table.num_rows

    def close(self) -> tuple[FileEntry, ...]:
        """Close the files, give them their final names; return the entries of those that stay."""
        entries: list[FileEntry] = []
        for path, (temporary, writer) in self._writers.items():
            writer.close()
            if not path.startswith(f"{LOOKUPS}/"):
                entries.append(describe_file(temporary, path))
        self._open.close()
        return tuple(entries)


def _bytes_per_block(star: Star) -> float:
    tables = (star.samples, *star.groups.values())
    total = sum(column_bytes(column) for table in tables for column in table.columns)
    return total / len(star.samples_per_block)


def _blocks_table(
    star: Star,
    clustered: Clustered,
    sums: Mapping[str, NDArray[Any]],
    file_index: int,
    groups: Sequence[BlockRange],
    first_row_group: int,
) -> pa.Table:
    num_blocks = len(star.samples_per_block)
    first_sample = offsets_of(star.samples_per_block)[:-1]
    lengths = [g.end - g.first for g in groups]
    row_groups = first_row_group + np.arange(len(groups), dtype=np.int32)
    first = (np.int64(file_index) << np.int64(FILE_SHIFT)) + clustered.first_block
    evaluation = clustered.is_evaluation[first_sample]
    columns = {
        BLOCK: first + np.arange(num_blocks),
        "split": np.where(evaluation, EVALUATION, TRAIN),
        "window": clustered.window[first_sample],
        "file": np.full(num_blocks, file_index, np.int32),
        "row_group": np.repeat(row_groups, lengths),
        "num_samples": star.samples_per_block.astype(np.int32),
        "num_sessions": np.add.reduceat(clustered.starts_session.astype(np.int32), first_sample),
        **sums,
        **{num_unique_column(g): c.astype(np.int32) for g, c in star.unique_per_block.items()},
    }
    return pa.table({k: pa.array(v) for k, v in columns.items()}).cast(blocks_schema(star.groups))


def merge_blocks(parts: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of `blocks.parquet` of all parts, sorted by split, window and part."""
    blocks = pa.concat_tables(parts)
    is_evaluation = pa.compute.equal(blocks["split"], EVALUATION)
    keyed = blocks.append_column("is_evaluation", is_evaluation)
    order = [("is_evaluation", "ascending"), ("window", "ascending"), (BLOCK, "ascending")]
    return keyed.sort_by(order).drop_columns(["is_evaluation"]).combine_chunks()
