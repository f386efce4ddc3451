"""How a segment is stored: the layout of each group, and the encodings of each file.

A group has one row per unique tuple of a block. Its tuples may be stored once per row group instead
(shared tuples), and its lists as windows over buffers; both are chosen by what repeats. Parquet
encodings are chosen by trial writes. Every choice is a function of the rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.pipelines.clustering.star import SortKeys, Star, cluster, sort_keys, to_star
from presage.pipelines.samples.tuples import (
    Tuples,
    concat_tuples,
    drop_unused_tuples,
    hash_session_keys,
    unique_in_ranges,
)
from presage.schemas.arrays import (
    Jagged,
    bits,
    flat_list,
    is_list,
    is_text,
    numpy_of,
    one_chunk,
    split_time,
    take_rows,
    take_values,
)
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.fitted import FittedValues
from presage.schemas.dataset.group_files import Windows, to_windows
from presage.schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    NUMBER_SHIFT,
    SECONDS,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    count_column,
    inverse_column,
    part_path,
    window_columns,
)

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 3
"""9 saves 1.6 to 1.9 % of the bytes and doubles the time of a build (benchmarks/layout.md)."""
TRIAL_ROWS = 1 << 16
"""Rows of a trial; more changed no choice on MIND, demo and EB-NeRD (2026-11-21)."""
TRIAL_BYTES = 8 << 20
"""Uncompressed bytes of one column in a trial."""
PAGE_BYTES = 8 << 20
"""Uncompressed bytes of a page. Each page is compressed by itself, and histories need large pages:
EB-NeRD's take 53.6 kB at 1 MiB and 36.2 kB at 8 MiB (benchmarks/storage.md)."""

DICTIONARY = "DICTIONARY"

Encodings = Mapping[str, str]
"""Parquet column path (`a`, `list.list.element`) to encoding name."""
_MAX_ROWS_PER_PAGE = 1 << 30
"""No limit: the default of 20,000 rows costs 4 % (benchmarks/layout.md)."""
_CANDIDATES: Mapping[str, Sequence[str]] = {
    "BYTE_ARRAY": (DICTIONARY, "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"),
    "FIXED_LEN_BYTE_ARRAY": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "BOOLEAN": ("PLAIN", "RLE"),
    "FLOAT": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "DOUBLE": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT32": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT64": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
}
"""Physical type to its candidate encodings; the earlier one wins ties. Fixed encodings by type take
2 to 12 % more bytes (benchmarks/storage.md)."""


def candidate_encodings(field: pa.Field) -> dict[str, Sequence[str]]:
    """Return the candidate encodings of each leaf of a column, such as `a.list.element`."""
    return {f"{field.name}{path}": names for path, names in _candidates_of(field.type).items()}


@cache
def _candidates_of(kind: pa.DataType) -> dict[str, Sequence[str]]:
    """Return the candidates of each leaf of a type; the paths begin after the column's name."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.schema([pa.field("a", kind)]).empty_table(), sink)
    leaves = pq.read_metadata(pa.BufferReader(sink.getvalue())).schema
    columns = [leaves.column(i) for i in range(len(leaves))]
    if "dictionary<" in str(kind):  # Arrow reads no other encoding back as a dictionary
        return {c.path[1:]: (DICTIONARY, "PLAIN") for c in columns}
    return {c.path[1:]: _CANDIDATES.get(c.physical_type, ("PLAIN",)) for c in columns}


class Trial(NamedTuple):
    """The smallest encoding of a leaf, and the estimated bytes of all its rows in it."""

    num_bytes: float
    encoding: str


Trials = Mapping[str, Trial]
"""Parquet column path to its smallest encoding."""


def choose_encodings(table: pa.Table) -> dict[str, str]:
    """Return the smallest encoding of each leaf of a table of a file, or of its first row group."""
    return {leaf: trial.encoding for leaf, trial in try_encodings(table).items()}


def try_encodings(table: pa.Table) -> dict[str, Trial]:
    """Write the first rows of each column in every encoding."""
    smallest: dict[str, Trial] = {}
    for name in table.column_names:
        column = trial_rows(table.select([name]))
        scale = table.num_rows / max(1, column.num_rows)
        candidates = candidate_encodings(column.schema.field(0))
        smallest |= dict.fromkeys(candidates, Trial(inf, ""))
        for index in range(max(map(len, candidates.values()), default=0)):
            trial = {path: names[min(index, len(names) - 1)] for path, names in candidates.items()}
            for path, size in encoded_bytes(column, trial).items():
                if size * scale < smallest[path].num_bytes:
                    smallest[path] = Trial(size * scale, trial[path])
    return smallest


def try_columns(table: pa.Table) -> dict[str, Trial]:
    """Try the encodings of a table, and its times in two parts where these take less."""
    trials = try_encodings(table)
    for field in table.schema:
        if field.type == pa.timestamp("us"):
            parts = try_encodings(pa.table({field.name: split_time(table[field.name])}))
            if num_bytes(parts) < trials[field.name].num_bytes:
                del trials[field.name]
                trials |= parts
    return trials


def as_stored(table: pa.Table, encodings: Encodings) -> pa.Table:
    """Return a table with its times in two parts if the encodings are of these."""
    for index, name in enumerate(table.column_names):
        if f"{name}.{SECONDS}" in encodings:
            table = table.set_column(index, name, split_time(table[name]))
    return table


def num_bytes(trials: Trials) -> float:
    """Return the estimated bytes of the columns of a table."""
    return sum(trial.num_bytes for trial in trials.values())


def trial_rows(column: pa.Table) -> pa.Table:
    """Return the first rows of a table of one column, for a trial."""
    rows = min(column.num_rows, TRIAL_ROWS)
    sample = column.slice(0, rows)
    return sample.slice(0, max(1, rows * TRIAL_BYTES // max(TRIAL_BYTES, sample.nbytes)))


def encoded_bytes(column: pa.Table, encodings: Encodings) -> dict[str, int]:
    """Return the bytes of each leaf of a table of one column."""
    sink = pa.BufferOutputStream()
    with open_writer(sink, column.schema, encodings) as writer:
        writer.write_table(column)
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    if metadata.num_row_groups == 0:
        return dict.fromkeys(encodings, 0)
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    return {c.path_in_schema: c.total_compressed_size for c in chunks}


def open_writer(
    sink: pa.NativeFile | str | Path,
    schema: pa.Schema,
    encodings: Encodings,
    page_bytes: int = PAGE_BYTES,
) -> pq.ParquetWriter:
    """Return a writer with the format's settings: zstd, page checksums, no column statistics.

    Readers find blocks through `blocks.parquet` and do not prune by statistics.
    """
    dictionaries = [path for path, name in encodings.items() if name == DICTIONARY]
    others = {p: name for p, name in encodings.items() if name not in (DICTIONARY, "PLAIN")}
    return pq.ParquetWriter(
        sink,
        schema,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=dictionaries or False,  # pyright: ignore[reportArgumentType] - takes paths too
        column_encoding=others or None,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=page_bytes,
        max_rows_per_page=_MAX_ROWS_PER_PAGE,
        store_schema=True,
    )


# Layouts of groups.


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """How a group is stored.

    Attributes:
        shared_tuples: store each distinct tuple once per row group, not once per block.
        windows: list features that are stored as windows over buffers.
        repeated: one row per sample, not per unique tuple of a block.
    """

    shared_tuples: bool = False
    windows: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class StoredTable:
    """One file of a part.

    Attributes:
        path: relative to the segment.
        table: its rows.
        row_groups: (num_row_groups,) rows of each; none is 0.
    """

    path: str
    table: pa.Table
    row_groups: Sequence[int]


def stored_tables(
    group: str,
    star: Star,
    layout: StoredGroup,
    row_groups: Sequence[int],
    file_index: int,
    written: Mapping[str, int] | None = None,
) -> Iterator[StoredTable]:
    """Yield the files of one group of a part.

    `row_groups` are the unique tuples of each row group; `written` is path to the rows that earlier
    chunks of the part wrote.
    """
    written = written or {}
    table, path = star.groups[group], part_path(file_index, "groups", group)
    if layout.shared_tuples:
        index, table, counts = dedup_tuples(table, star.tuples[group], row_groups)
        first = written.get(part_path(file_index, "tuples", group), 0)
        references = pa.array(segment_indices(file_index, first + index))
        unique_rows = star.groups[group].select([BLOCK, UNIQUE_INDEX])
        yield StoredTable(path, unique_rows.append_column(TUPLE_INDEX, references), row_groups)
        path, row_groups = part_path(file_index, "tuples", group), counts
        tuple_index = pa.array(segment_indices(file_index, first + np.arange(table.num_rows)))
        table = table.add_column(0, TUPLE_INDEX, tuple_index)
    for feature in layout.windows:
        first = written.get(part_path(file_index, "buffers", feature), 0)
        columns, buffers = encode_windows(table[feature], row_groups, file_index, first)
        column_index = table.column_names.index(feature)
        table = table.remove_column(column_index)
        for offset, name in enumerate(window_columns(feature)):
            table = table.add_column(column_index + offset, name, columns[offset])
        stored, counts = _buffers_table(feature, buffers, file_index, first)
        yield StoredTable(part_path(file_index, "buffers", feature), stored, counts)
    yield StoredTable(path, table, row_groups)


def directory_of(path: str) -> str:
    """Return the directory of a part's file, the same in all parts.

    Example:
        >>> directory_of("groups/user/00003.parquet")
        'groups/user'
    """
    return str(PurePosixPath(path).parent)


def segment_indices(file_index: int, part_indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return indices of tuples or buffers, unique in the segment, from indices within a part."""
    return (np.int64(file_index) << np.int64(NUMBER_SHIFT)) + part_indices


def dedup_tuples(
    table: pa.Table, tuples: NDArray[np.int64], row_groups: Sequence[int]
) -> tuple[NDArray[np.int64], pa.Table, list[int]]:
    """Keep each distinct tuple of a row group once, in order of first appearance.

    Args:
        table: the rows of a group.
        tuples: (num_rows,) equal rows have equal numbers.
        row_groups: rows of each row group.

    Returns:
        (num_rows,) the index of each row's tuple; the distinct tuples, without `block` and
        `unique_index`; their number in each row group.
    """
    row_group = np.repeat(np.arange(len(row_groups)), row_groups)
    first, index = unique_in_ranges(row_group, tuples)
    counts = np.bincount(row_group[first], minlength=len(row_groups))
    kept = take_rows(table.drop_columns([BLOCK, UNIQUE_INDEX]), first)
    return index, kept, counts.tolist()


def encode_windows(
    column: pa.ChunkedArray, row_groups: Sequence[int], file_index: int, first: int = 0
) -> tuple[list[pa.Array], list[pa.Array]]:
    """Convert a list feature to windows over buffers.

    Args:
        column: the lists.
        row_groups: rows of each row group.
        file_index: number of the part.
        first: buffers that the file already has.

    Returns:
        The three window columns, and the buffers of each row group.
    """
    lists, parts, buffers = one_chunk(column), [], []
    start = 0
    for count in row_groups:
        windows, values = list_windows(lists.slice(start, count))
        buffer_index = segment_indices(file_index, windows.buffer + first)
        parts.append((buffer_index, windows.start, windows.length))
        entries = take_values(values, windows.source)
        offsets = windows.offsets if len(windows.offsets) > 1 else np.zeros(2, np.int64)
        buffers.append(pa.LargeListArray.from_arrays(pa.array(offsets), entries, type=lists.type))
        start, first = start + count, first + len(buffers[-1])
    buffer, begin, length = (np.concatenate(p) for p in zip(*parts, strict=True))
    columns = [
        pa.array(buffer),
        pa.array(begin.astype(np.int32)),
        pa.array(length.astype(np.int32)),
    ]
    return columns, buffers


def list_windows(lists: pa.Array) -> tuple[Windows, pa.Array]:
    """Return the windows of a list array, and the values that `Windows.source` points into."""
    is_null = None
    if lists.null_count:
        is_null = ~lists.is_valid().to_numpy(zero_copy_only=False)
    values, offsets = flat_list(lists)
    codes = values.dictionary_encode().indices if is_text(values.type) else values
    return to_windows(Jagged(bits(numpy_of(codes)), offsets), is_null), values


def supports_windows(kind: pa.DataType) -> bool:
    """Return whether a type is a list of values that can be compared bitwise."""
    return is_list(kind) and (
        is_text(kind.value_type)
        or pa.types.is_integer(kind.value_type)
        or pa.types.is_floating(kind.value_type)
        or pa.types.is_timestamp(kind.value_type)
    )


def _buffers_table(
    feature: str, buffers: Sequence[pa.Array], file_index: int, first: int
) -> tuple[pa.Table, list[int]]:
    counts = [len(b) for b in buffers]
    index = pa.array(segment_indices(file_index, first + np.arange(sum(counts))))
    lists = pa.chunked_array(buffers).combine_chunks()
    return pa.table({BUFFER_INDEX: index, feature: lists}), counts


# Choice of layouts: once per segment, for all its parts

SAMPLE_ROWS = 1 << 15
"""Maximum number of a group's unique tuples that are examined."""
SAMPLE_BYTES = 4 << 20
"""Maximum uncompressed bytes of a column that are examined."""
SHARED_RATIO = 0.7
"""Tuples are shared if at most this share of them is distinct in a row group. Of 20 groups of nine
logs, those at 0.11 and 0.23 take 0.38 and 0.30 times the bytes, one at 0.84 takes 1.3 times, and
all others are above 0.95 (benchmarks/storage.md)."""
WINDOWS_RATIO = 0.9
"""Lists are windows over buffers if these hold at most this share of the values. Of 13 lists, those
up to 0.88 take 0.21 to 0.95 times the bytes, those above 0.99 take 1.01 to 1.03 times."""
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

Layouts = Mapping[str, StoredGroup]
"""Group to its layout."""


def choose_layouts(star: Star) -> dict[str, StoredGroup]:
    """Choose the layout of every group from some sessions of one part."""
    layouts: dict[str, StoredGroup] = {}
    for group, table in star.groups.items():
        rows = min(table.num_rows, SAMPLE_ROWS)
        largest = max((table[c].nbytes for c in table.column_names), default=0)
        rows = min(rows, max(1, SAMPLE_BYTES * table.num_rows // max(1, largest)))
        layouts[group] = choose_layout(table.slice(0, rows), star.tuples[group][:rows])
    return layouts


def choose_layout(table: pa.Table, tuples: NDArray[np.int64]) -> StoredGroup:
    """Choose the layout of one group by what repeats.

    Args:
        table: some rows of the group, as one row group.
        tuples: (num_rows,) equal rows have equal numbers.
    """
    _, unique, _ = dedup_tuples(table, tuples, [table.num_rows])
    shared = unique.num_rows <= SHARED_RATIO * table.num_rows
    stored = unique if shared else table
    windows = (f.name for f in stored.schema if _overlaps(stored, f))
    return StoredGroup(shared, tuple(windows))


def _overlaps(table: pa.Table, field: pa.Field) -> bool:
    """Return whether a column has lists whose buffers are enough smaller."""
    if not supports_windows(field.type) or not _PATH.fullmatch(field.name):
        return False
    windows, values = list_windows(one_chunk(table[field.name]))
    return 0 < len(windows.source) <= WINDOWS_RATIO * len(values)


# The layout of a segment, from a few sessions of one part: parts are equal ranges of a hash, so a
# choice for one fits all. The sessions are chosen by their hash, so the choice does not depend on
# workers, files or retries.

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
            columns = try_group(plain, name, StoredGroup(repeated=True))
            if columns.num_bytes < group.num_bytes - trifle:
                other = try_group(plain, name, replace(layouts[name], repeated=True))
                groups[name] = min(columns, other, key=lambda trial: trial.num_bytes)
    directory = directory_of(part_path(0, "samples"))
    tables = {directory: samples | {c: t for g in groups.values() for c, t in g.inverse.items()}}
    tables |= {path: trials for g in groups.values() for path, trials in g.tables.items()}
    encodings = {
        p: {leaf: t.encoding for leaf, t in trials.items()} for p, trials in tables.items()
    }
    encodings[directory] |= dict.fromkeys(map(count_column, data.histories), "BYTE_STREAM_SPLIT")
    return SegmentLayout({name: g.layout for name, g in groups.items()}, encodings, num_parts)


@dataclass(frozen=True, slots=True)
class GroupTrial:
    """A layout of a group that was tried.

    Attributes:
        layout: the layout.
        inverse: trial of its inverse indices.
        tables: directory of each of its files to the trials of the columns.
    """

    layout: StoredGroup
    inverse: Trials
    tables: Mapping[str, Trials]

    @property
    def num_bytes(self) -> float:
        """Estimated bytes of the group."""
        return sum(map(num_bytes, (self.inverse, *self.tables.values())))


def try_group(star: Star, group: str, layout: StoredGroup) -> GroupTrial:
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
