"""Write the files of a part: every table has the same row groups, which consist of whole blocks.

All parts of a segment have one layout, chosen from a few sessions of one part: parts are equal
ranges of a hash, so a choice for one fits all. The sessions are chosen by their hash, so the choice
does not depend on workers, files or retries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.clustering.star import Clustered, SortKeys, Star, cluster, sort_keys, to_star
from pipelines.clustering.storage_layout import (
    TRIAL_ROWS,
    Encodings,
    GroupLayout,
    Layouts,
    Trials,
    as_stored,
    choose_layouts,
    directory_of,
    num_bytes,
    open_writer,
    stored_tables,
    try_columns,
    try_encodings,
)
from pipelines.samples.tuples import Tuples, concat_tuples, drop_unused_tuples, hash_session_keys
from schemas.arrays import column_bytes, offsets_of
from schemas.config.job import DataConfig
from schemas.dataset.files import FileEntry, describe_file
from schemas.dataset.fitted import FittedValues
from schemas.layout import (
    BLOCK,
    EVALUATION,
    FILE_SHIFT,
    TRAIN,
    blocks_schema,
    inverse_column,
    num_unique_column,
    part_path,
)
from schemas.storage.location import Location

LOOKUPS = "lookups"
"""Directory of the oracle's input below a segment being built; removed before the commit."""
LAYOUT_SAMPLES = TRIAL_ROWS
"""Approximate number of samples from which the layout is chosen."""
TRIFLE = 0.0025
"""Share of all bytes that a group may take beyond its plain columns, with at most 8 groups."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The layout of all parts of a segment.

    `layouts` are by group, `encodings` by directory of the files (`samples`, `groups/user`).
    """

    layouts: Layouts
    encodings: Mapping[str, Encodings]
    num_parts: int = 1

    @property
    def repeated(self) -> set[str]:
        """Groups that are stored per sample."""
        return {group for group, layout in self.layouts.items() if layout.repeated}


def choose_segment_layout(
    parts: Iterable[Tuples],
    data: DataConfig,
    fitted: FittedValues | None = None,
    num_parts: int = 1,
) -> SegmentLayout:
    """Choose the layout of a segment from the samples of one part.

    A group that takes more bytes than its plain columns is stored per sample: a number of a few
    bits that repeats irregularly takes less than its inverse index.

    `parts` have all samples of the part's sessions, at least one, in any order.
    """
    clustered = cluster(sample_sessions(parts, data), data)
    star = to_star(clustered, 0, data, fitted)
    layouts = choose_layouts(star)
    samples = try_columns(star.samples.drop_columns([inverse_column(g) for g in layouts]))
    groups = {group: try_group(star, group, layout) for group, layout in layouts.items()}
    trifle = TRIFLE * (num_bytes(samples) + sum(g.num_bytes for g in groups.values()))
    doubtful = {name: g for name, g in groups.items() if num_bytes(g.inverse) > trifle}
    if doubtful:
        plain = to_star(clustered, 0, data, fitted, doubtful)
        layouts = choose_layouts(plain)
        for name, group in doubtful.items():
            columns = try_group(plain, name, GroupLayout(repeated=True))
            if columns.num_bytes < group.num_bytes - trifle:
                other = try_group(plain, name, replace(layouts[name], repeated=True))
                groups[name] = min(columns, other, key=lambda trial: trial.num_bytes)
    directory = directory_of(part_path(0, "samples"))
    tables = {directory: samples | {c: t for g in groups.values() for c, t in g.inverse.items()}}
    tables |= {path: trials for g in groups.values() for path, trials in g.tables.items()}
    encodings = {
        p: {leaf: t.encoding for leaf, t in trials.items()} for p, trials in tables.items()
    }
    return SegmentLayout({name: g.layout for name, g in groups.items()}, encodings, num_parts)


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A layout of a group that was tried.

    Attributes:
        layout: the layout.
        inverse: trial of its inverse indices.
        tables: directory of each of its files to the trials of the columns.
    """

    layout: GroupLayout
    inverse: Trials
    tables: Mapping[str, Trials]

    @property
    def num_bytes(self) -> float:
        """Estimated bytes of the group."""
        return sum(map(num_bytes, (self.inverse, *self.tables.values())))


def try_group(star: Star, group: str, layout: GroupLayout) -> GroupTrial:
    """Try the encodings of the files of a group."""
    files = stored_tables(group, star, layout, [star.groups[group].num_rows], 0)
    return GroupTrial(
        layout,
        try_encodings(star.samples.select([inverse_column(group)])),
        {directory_of(file.path): try_columns(file.table) for file in files},
    )


def sample_sessions(
    parts: Iterable[Tuples], data: DataConfig, limit: int = LAYOUT_SAMPLES
) -> Tuples:
    """Return the sessions with the smallest hashes, at least `limit` samples where there are.

    The last session is truncated if the result would have more than twice as many samples. The
    memory is that of the result and of one part.
    """
    chosen: list[Tuples] = []
    smallest = np.empty(0, np.uint64)  # hashes of at most `limit` samples
    for part in parts:
        keys = sort_keys(part, data)
        smallest = np.concatenate([smallest, hash_session_keys(keys.keys)[keys.key]])
        smallest = np.partition(smallest, min(limit, len(smallest)) - 1)[:limit]
        chosen.append(_take_sessions(part, keys, smallest, limit))
        if sum(c.num_samples for c in chosen) > 4 * limit:
            chosen = [_first_sessions(chosen, smallest, data, limit)]
    return _first_sessions(chosen, smallest, data, limit)


def _first_sessions(
    chosen: Sequence[Tuples], smallest: NDArray[np.uint64], data: DataConfig, limit: int
) -> Tuples:
    samples = concat_tuples(chosen)
    return _take_sessions(samples, sort_keys(samples, data), smallest, limit)


def _take_sessions(
    samples: Tuples, columns: SortKeys, smallest: NDArray[np.uint64], limit: int
) -> Tuples:
    """Return the samples whose hash is at most the largest of `smallest`.

    If they are more than twice `limit`, the first ones by hash, time and position in the input.
    """
    hashes = hash_session_keys(columns.keys)[columns.key]
    rows = np.flatnonzero(hashes <= smallest.max()) if len(smallest) == limit else None
    if rows is None or len(rows) == len(hashes) <= 2 * limit:
        return samples
    if len(rows) > 2 * limit:
        by_position = (columns.index[rows], columns.origin[rows], columns.time[rows], hashes[rows])
        rows = np.sort(rows[np.lexsort(by_position)[: 2 * limit]])
    return drop_unused_tuples(samples.take(rows))


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


class PartFiles:
    """The Parquet files of a part, written in chunks; they get their final names at the end.

    A context; at an object store, files are written to temporary files and uploaded at the end.
    """

    def __init__(self, root: Location) -> None:
        """Store the directory of the segment being built."""
        self._root = root
        self._open = ExitStack()
        self._writers: dict[str, tuple[Path, pq.ParquetWriter]] = {}

    def __enter__(self) -> PartFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def writer(self, path: str, open_file: Callable[[Path], pq.ParquetWriter]) -> pq.ParquetWriter:
        """Return the writer of a file; the first call opens it under a temporary name."""
        if path not in self._writers:
            temporary = self._open.enter_context((self._root / path).new_file())
            self._writers[path] = temporary, open_file(temporary)
        return self._writers[path][1]

    def close(self) -> tuple[FileEntry, ...]:
        """Close the files, give them their final names; return the entries of those that stay."""
        entries: list[FileEntry] = []
        for path, (temporary, writer) in self._writers.items():
            writer.close()
            if not path.startswith(f"{LOOKUPS}/"):
                entries.append(describe_file(temporary, path))
        self._open.close()
        return tuple(entries)


class PartWriter:
    """Writes the samples and groups of one part chunk by chunk."""

    def __init__(self, files: PartFiles, file_index: int, layout: SegmentLayout) -> None:
        self._files = files
        self._file_index = file_index
        self.layout = layout
        self._written: Counter[str] = Counter()
        self._num_row_groups = 0

    def add(self, star: Star, clustered: Clustered, sums: Mapping[str, NDArray[Any]]) -> pa.Table:
        """Write the next chunk of the part; return its rows of `blocks.parquet`.

        `clustered` has the same samples, for splits and windows; `sums` are columns of
        `blocks.parquet`.
        """
        first_sample = offsets_of(star.samples_per_block)[:-1]
        groups = plan_row_groups(
            clustered.is_evaluation[first_sample],
            clustered.window[first_sample],
            _bytes_per_block(star),
            windows_limit=min(ROW_GROUP_BYTES, WINDOWS_BYTES // self.layout.num_parts),
        )
        counts = [int(star.samples_per_block[g.first : g.end].sum()) for g in groups]
        self._write(part_path(self._file_index, "samples"), star.samples, counts)
        for name in star.groups:
            unique = [int(star.unique_per_block[name][g.first : g.end].sum()) for g in groups]
            layout = self.layout.layouts[name]
            for file in stored_tables(
                name, star, layout, unique, self._file_index, dict(self._written)
            ):
                self._write(file.path, file.table, file.row_groups)
        blocks = _blocks_table(
            star, clustered, sums, self._file_index, groups, self._num_row_groups
        )
        self._num_row_groups += len(groups)
        return blocks

    def _write(self, path: str, table: pa.Table, rows_per_group: Sequence[int]) -> None:
        encodings = self.layout.encodings[directory_of(path)]
        table = as_stored(table, encodings)
        open_file = partial(open_writer, schema=table.schema, encodings=encodings)
        writer, start = self._files.writer(path, open_file), 0
        for count in rows_per_group:
            rows = table.slice(start, count)
            writer.write_table(rows, row_group_size=max(1, count))
            start += count
        self._written[path] += table.num_rows


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
