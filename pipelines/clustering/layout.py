"""How a segment is stored: the layout of each group, and the encodings of each file.

A group has one row per unique tuple of a block. Its tuples may be stored once per row group instead
(shared tuples), and its lists as windows over buffers; both are chosen by measured bytes. Parquet
encodings and page sizes are chosen by trial writes. Every choice is a function of the rows alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.clustering.star import Star
from pipelines.samples.tuples import unique_in_ranges
from schemas.arrays import (
    Jagged,
    bits,
    flat_list,
    is_list,
    is_text,
    numpy_of,
    one_chunk,
    take_rows,
    take_values,
)
from schemas.config.job import StorageConfig, resolve_choice
from schemas.group_files import Windows, to_windows
from schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    NUMBER_SHIFT,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    buffers_path,
    group_path,
    tuples_path,
    window_columns,
)

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 3
"""9 saves 1.6 to 1.9 % of the bytes and doubles the time of a build (benchmarks/layout.md)."""
TRIAL_ROWS = 1 << 16
"""Rows of a trial; more changed no choice on MIND, demo and EB-NeRD (2026-11-21)."""
TRIAL_BYTES = 8 << 20
"""Uncompressed bytes of one column in a trial: the size of the largest page."""
PAGE_BYTES = (8 << 20, 1 << 20, 64 << 10)
"""Candidate page sizes, uncompressed; the earlier one wins ties. Each page is compressed by itself:
histories need large pages (EB-NeRD's take 53.6 kB at 1 MiB and 36.2 kB at 8 MiB), and large
dictionaries small ones, because their indices start narrow (1.3 % of MIND's samples;
benchmarks/storage.md)."""

DICTIONARY = "DICTIONARY"

RunAll = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Runs a function on all items, as `map`, perhaps on several threads."""

_MAX_ROWS_PER_PAGE = 1 << 30
"""No limit: the default of 20,000 rows costs 4 % (benchmarks/layout.md)."""


@dataclass(frozen=True, slots=True)
class Encodings:
    """The encodings of one file.

    Attributes:
        by_path: Parquet column path (`a`, `list.list.element`) to encoding name.
        page_bytes: maximum uncompressed bytes of a page.
    """

    by_path: Mapping[str, str]
    page_bytes: int = PAGE_BYTES[0]

    @property
    def dictionary_paths(self) -> list[str]:
        """The dictionary-encoded paths."""
        return [p for p, e in self.by_path.items() if e == DICTIONARY]

    @property
    def column_encoding(self) -> dict[str, str]:
        """The encodings of the other paths; plain ones are left out."""
        return {p: e for p, e in self.by_path.items() if e not in (DICTIONARY, "PLAIN")}


_CANDIDATES: Mapping[str, Sequence[str]] = {
    "BYTE_ARRAY": (DICTIONARY, "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"),
    "FIXED_LEN_BYTE_ARRAY": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "BOOLEAN": ("PLAIN", "RLE"),
    "FLOAT": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "DOUBLE": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT32": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT64": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
}
"""Physical type to its candidate encodings; the earlier one wins ties."""


def candidate_encodings(field: pa.Field) -> dict[str, Sequence[str]]:
    """Return the candidate encodings of each leaf of a column, such as `a.list.element`."""
    return {f"{field.name}{path}": names for path, names in _candidates_of(field.type).items()}


@cache
def _candidates_of(kind: pa.DataType) -> dict[str, Sequence[str]]:
    """Return the candidates of each leaf of a type; the paths begin after the column's name."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.schema([pa.field("a", kind)]).empty_table(), sink)
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    columns = [leaves.column(i) for i in range(len(leaves))]
    if "dictionary<" in str(kind):  # Arrow reads no other encoding back as a dictionary
        return {c.path[1:]: (DICTIONARY, "PLAIN") for c in columns}
    return {c.path[1:]: _CANDIDATES.get(c.physical_type, ("PLAIN",)) for c in columns}


def choose_encodings(table: pa.Table, run_all: RunAll = map) -> Encodings:
    """Try every encoding on the first rows of each column, then every page size on all of them.

    Args:
        table: the rows of a file, or of its first row group.
        run_all: runs the trials.
    """
    samples = [trial_rows(table.select([name])) for name in table.column_names]
    smallest = [
        {path: min(trials) for path, trials in leaves.items()}
        for leaves in _trial_sizes(samples, run_all)
    ]
    by_path = {path: best[2] for leaves in smallest for path, best in leaves.items()}
    sizes = [sum(best[0] for best in leaves.values()) for leaves in smallest]
    chosen, least = Encodings(by_path), sum(sizes)
    largest = max((sample.nbytes for sample in samples), default=0)
    for page_bytes in PAGE_BYTES[1:]:
        encodings = Encodings(by_path, page_bytes)
        if page_bytes >= largest:
            continue
        fits = [_fits_page(sample, page_bytes) for sample in samples]
        larger = [sample for sample, fit in zip(samples, fits, strict=True) if not fit]
        total = sum(size for size, fit in zip(sizes, fits, strict=True) if fit)
        for leaves in run_all(partial(_leaf_bytes, encodings=encodings), larger):
            total += sum(leaves.values())
        if total < least:
            chosen, least = encodings, total
    return chosen


def _fits_page(column: pa.Table, page_bytes: int) -> bool:
    """Return whether no encoding of a column has several pages; narrow values take 4 bytes."""
    kind = column.schema.field(0).type
    is_wide = is_text(kind) or (not pa.types.is_nested(kind) and kind.bit_width >= 32)
    return (1.25 if is_wide else 40) * column.nbytes <= page_bytes


def min_encoded_bytes(table: pa.Table, run_all: RunAll = map) -> int:
    """Return the size of a file with one row group and the smallest encoding of each column.

    Args:
        table: at least one row.
        run_all: runs the trials.
    """
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, Encodings({})) as writer:
        writer.write_table(table.slice(0, 1))
    file = sink.getvalue()
    row = pq.read_metadata(pa.BufferReader(file)).row_group(0)
    total = file.size - sum(row.column(i).total_compressed_size for i in range(row.num_columns))
    columns = [table.select([name]) for name in table.column_names]
    for leaves in _trial_sizes(columns, run_all):
        total += sum(min(trials)[0] for trials in leaves.values())
    return total


Trials = dict[str, list[tuple[int, int, str]]]
"""(bytes, index, name) of each candidate encoding, for each leaf of a column."""


def _trial_sizes(columns: Sequence[pa.Table], run_all: RunAll) -> list[Trials]:
    """Try all encodings of some tables of one column each, whose names differ.

    One write tries one encoding of several columns: a file costs as much time as 4,000 values.
    """
    candidates = [candidate_encodings(column.schema.field(0)) for column in columns]
    trials: list[Trials] = [{path: [] for path in paths} for paths in candidates]
    by_rows: dict[int, list[int]] = {}
    for position, column in enumerate(columns):
        by_rows.setdefault(column.num_rows, []).append(position)
    jobs: list[tuple[int, list[int], Encodings]] = []
    for index in range(max(map(len, _CANDIDATES.values()))):
        for same_rows in by_rows.values():
            left = [p for p in same_rows if any(index < len(c) for c in candidates[p].values())]
            for start in range(0, len(left), _TRIAL_COLUMNS):
                positions = left[start : start + _TRIAL_COLUMNS]
                by_path = {
                    path: names[min(index, len(names) - 1)]
                    for position in positions
                    for path, names in candidates[position].items()
                }
                jobs.append((index, positions, Encodings(by_path)))

    def run(job: tuple[int, list[int], Encodings]) -> dict[str, int]:
        _, positions, encodings = job
        schema = pa.schema([columns[p].schema.field(0) for p in positions])
        table = pa.table([columns[p][0] for p in positions], schema=schema)
        return _leaf_bytes(table, encodings)

    for (index, positions, encodings), sizes in zip(jobs, run_all(run, jobs), strict=True):
        for position in positions:
            for path, of_path in trials[position].items():
                of_path.append((sizes[path], index, encodings.by_path[path]))
    return trials


_TRIAL_COLUMNS = 8
"""Columns of one trial write, so that several processors have work."""


def trial_rows(column: pa.Table) -> pa.Table:
    """Return the first rows of a table of one column, for a trial."""
    rows = min(column.num_rows, TRIAL_ROWS)
    sample = column.slice(0, rows)
    return sample.slice(0, max(1, rows * TRIAL_BYTES // max(TRIAL_BYTES, sample.nbytes)))


def _leaf_bytes(column: pa.Table, encodings: Encodings) -> dict[str, int]:
    sink = pa.BufferOutputStream()
    with open_writer(sink, column.schema, encodings) as writer:
        writer.write_table(column)
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    if metadata.num_row_groups == 0:
        return dict.fromkeys(encodings.by_path, 0)
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    return {c.path_in_schema: c.total_compressed_size for c in chunks}


def open_writer(
    sink: pa.NativeFile | str | Path, schema: pa.Schema, encodings: Encodings
) -> pq.ParquetWriter:
    """Return a writer with the format's settings: zstd, page checksums, no column statistics.

    Readers find blocks through `blocks.parquet` and do not prune by statistics.
    """
    return pq.ParquetWriter(
        sink,
        schema,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=encodings.dictionary_paths or False,  # pyright: ignore[reportArgumentType] - takes paths too
        column_encoding=encodings.column_encoding or None,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=encodings.page_bytes,
        max_rows_per_page=_MAX_ROWS_PER_PAGE,
        store_schema=True,
    )


# Layouts of groups.


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How a group is stored.

    Attributes:
        shared_tuples: store each distinct tuple once per row group, not once per block.
        windows: list features that are stored as windows over buffers.
    """

    shared_tuples: bool = False
    windows: tuple[str, ...] = ()


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
    layout: GroupLayout,
    row_groups: Sequence[int],
    file_index: int,
    written: Mapping[str, int] | None = None,
) -> Iterator[StoredTable]:
    """Yield the files of one group of a part.

    Args:
        group: name of the group.
        star: the part, or a chunk of it.
        layout: how the group is stored.
        row_groups: unique tuples of each row group.
        file_index: number of the part.
        written: path to the rows that earlier chunks wrote.
    """
    written = written or {}
    table, path = star.groups[group], group_path(group, file_index)
    if layout.shared_tuples:
        index, table, counts = dedup_tuples(table, star.tuples[group], row_groups)
        first = written.get(tuples_path(group, file_index), 0)
        references = pa.array(segment_indices(file_index, first + index))
        unique_rows = star.groups[group].select([BLOCK, UNIQUE_INDEX])
        yield StoredTable(path, unique_rows.append_column(TUPLE_INDEX, references), row_groups)
        path, row_groups = tuples_path(group, file_index), counts
        tuple_index = pa.array(segment_indices(file_index, first + np.arange(table.num_rows)))
        table = table.add_column(0, TUPLE_INDEX, tuple_index)
    for feature in layout.windows:
        first = written.get(buffers_path(feature, file_index), 0)
        columns, buffers = encode_windows(table[feature], row_groups, file_index, first)
        column_index = table.column_names.index(feature)
        table = table.remove_column(column_index)
        for offset, name in enumerate(window_columns(feature)):
            table = table.add_column(column_index + offset, name, columns[offset])
        stored, counts = _buffers_table(feature, buffers, file_index, first)
        yield StoredTable(buffers_path(feature, file_index), stored, counts)
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
"""Maximum number of a group's unique tuples that are measured."""
SAMPLE_BYTES = 4 << 20
"""Maximum uncompressed bytes of a column that are measured."""
MAX_SIZE_RATIO = 0.98
"""A layout is chosen if its bytes are at most this share; a smaller gain is not worth a file."""
SKIP_RATIO = 0.9
"""Bytes are not measured if more than this share of the tuples or values would remain."""
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

Layouts = Mapping[str, GroupLayout]
"""Group to its layout."""


def choose_layouts(
    star: Star, storage: StorageConfig, run_all: RunAll = map
) -> dict[str, GroupLayout]:
    """Choose the layout of every group from some sessions of one part."""
    layouts: dict[str, GroupLayout] = {}
    for group, table in star.groups.items():
        rows = min(table.num_rows, SAMPLE_ROWS)
        largest = max((table[c].nbytes for c in table.column_names), default=0)
        rows = min(rows, max(1, SAMPLE_BYTES * table.num_rows // max(1, largest)))
        sample = table.slice(0, rows).combine_chunks()
        layouts[group] = choose_layout(sample, star.tuples[group][:rows], group, storage, run_all)
    return layouts


def choose_layout(
    table: pa.Table,
    tuples: NDArray[np.int64],
    group: str,
    storage: StorageConfig,
    run_all: RunAll = map,
) -> GroupLayout:
    """Choose the layout of one group.

    Args:
        table: some rows of the group, as one row group.
        tuples: (num_rows,) equal rows have equal numbers.
        group: its name in the job.
        storage: settings of the job, which take precedence.
        run_all: runs the trials.
    """
    shared = resolve_choice(storage.shared_tuples, group)
    index, unique, _ = dedup_tuples(table, tuples, [table.num_rows])
    if shared is None and unique.num_rows > SKIP_RATIO * table.num_rows:
        shared = False
    plain = table.drop_columns([BLOCK, UNIQUE_INDEX])
    choose_windows = partial(_choose_windows, group=group, storage=storage, run_all=run_all)
    if shared is not None:
        return GroupLayout(shared, choose_windows(unique if shared else plain)[0])
    plain_windows, plain_saved = choose_windows(plain)
    shared_windows, shared_saved = choose_windows(unique)
    plain_bytes = min_encoded_bytes(plain, run_all) - plain_saved
    shared_bytes = min_encoded_bytes(unique, run_all) - shared_saved
    shared_bytes += _index_bytes(index) + _index_bytes(np.arange(unique.num_rows))
    if shared_bytes <= MAX_SIZE_RATIO * plain_bytes:
        return GroupLayout(True, shared_windows)
    return GroupLayout(False, plain_windows)


def _choose_windows(
    table: pa.Table, group: str, storage: StorageConfig, run_all: RunAll
) -> tuple[tuple[str, ...], int]:
    """Return the list features to store as windows, and the bytes that this saves."""
    enabled = resolve_choice(storage.windows, group)
    saved, features = 0, []
    for field in table.schema:
        if enabled is False or not supports_windows(field.type) or not _PATH.fullmatch(field.name):
            continue
        column = table[field.name]
        windows, values = list_windows(column.combine_chunks())
        if enabled is None and len(windows.source) > SKIP_RATIO * len(values):
            continue
        columns, buffers = encode_windows(column, [table.num_rows], 0)
        names = window_columns(field.name)
        list_bytes = min_encoded_bytes(table.select([field.name]), run_all)
        index = pa.array(segment_indices(0, np.arange(len(buffers[0]))))
        window_bytes = sum(
            min_encoded_bytes(pa.table(stored), run_all)
            for stored in (
                dict(zip(names, columns, strict=True)),
                {BUFFER_INDEX: index, field.name: buffers[0]},
            )
        )
        if enabled or window_bytes <= MAX_SIZE_RATIO * list_bytes:
            features.append(field.name)
            saved += list_bytes - window_bytes
    return tuple(features), saved


def _index_bytes(index: NDArray[np.int64]) -> int:
    return min_encoded_bytes(pa.table({TUPLE_INDEX: pa.array(segment_indices(0, index))}))
