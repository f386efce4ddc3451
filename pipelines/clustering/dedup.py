"""Deduplicate clustered samples into the star schema, and choose how each group is stored.

A group has one row per unique tuple of a block. Its tuples may be stored once per row group instead
(shared tuples), and its lists as windows over buffers; both are chosen by measured bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.clustering.encodings import min_encoded_bytes
from pipelines.clustering.order import Clustered
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import first_appearances
from pipelines.sources.rows import ORIGIN
from pipelines.transforms.apply import apply_transforms
from schemas.arrays import (
    Jagged,
    bits,
    flat_list,
    is_list,
    is_text,
    numpy_of,
    offsets_of,
    one_chunk,
)
from schemas.config.job import SAMPLES, DataConfig, StorageConfig, resolve_choice
from schemas.errors import SchemaError
from schemas.fitted import FittedValues
from schemas.group_files import Windows, to_windows
from schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    FILE_SHIFT,
    NUMBER_SHIFT,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    buffers_path,
    group_path,
    inverse_column,
    tuples_path,
    window_columns,
)


@dataclass(frozen=True, slots=True)
class Star:
    """The tables of one part.

    Attributes:
        samples: one row per sample: block, columns without a group, inverse indices.
        groups: one row per unique tuple of a block.
        samples_per_block: (num_blocks,) int64.
        unique_per_block: group to (num_blocks,) int64.
        tuples: group to (num_unique,) int64; equal rows have equal numbers in all blocks.
    """

    samples: pa.Table
    groups: Mapping[str, pa.Table]
    samples_per_block: NDArray[np.int64]
    unique_per_block: Mapping[str, NDArray[np.int64]]
    tuples: Mapping[str, NDArray[np.int64]]


def to_star(
    clustered: Clustered, file_index: int, data: DataConfig, learned: FittedValues | None = None
) -> Star:
    """Deduplicate each group within each block and apply the transforms.

    Args:
        clustered: samples of one part in order.
        file_index: number of the part, the upper bits of its block ids.
        data: groups and transforms.
        learned: fitted parameters of transforms.
    """
    learned = learned or FittedValues()
    num_blocks = int(clustered.block[-1]) + 1 if len(clustered.block) else 0
    check_num_blocks(clustered.first_block + num_blocks, data.block_samples)
    prefix = (np.int64(file_index) << np.int64(FILE_SHIFT)) + clustered.first_block
    tuples = clustered.samples
    columns = {
        c: tuples.samples[c] for c in tuples.samples.column_names if c not in (ORIGIN, LIST_INDEX)
    }
    samples = pa.table({BLOCK: pa.array(prefix + clustered.block), **columns})
    samples = apply_transforms(samples, SAMPLES, data.transforms.get(SAMPLES, {}), learned)
    groups: dict[str, pa.Table] = {}
    unique_per_block: dict[str, NDArray[np.int64]] = {}
    stored_tuples: dict[str, NDArray[np.int64]] = {}
    for group, names in data.groups.items():
        stored, inverse = unique_in_blocks(clustered.block, tuples.references[group])
        counts = np.bincount(clustered.block[stored], minlength=num_blocks).astype(np.int64)
        starts = offsets_of(counts)[:-1]
        unique_index = np.arange(len(stored)) - np.repeat(starts, counts)
        stored_tuples[group] = tuples.references[group][stored]
        taken = tuples.uniques[group].take(pa.array(stored_tuples[group]))
        table = pa.table(
            {
                BLOCK: pa.array(prefix + clustered.block[stored]),
                UNIQUE_INDEX: pa.array(unique_index.astype(np.int32)),
                **{c: taken[c] for c in names},
            }
        )
        groups[group] = apply_transforms(table, group, data.transforms.get(group, {}), learned)
        local = (inverse - starts[clustered.block]).astype(np.int32)
        samples = samples.append_column(inverse_column(group), pa.array(local))
        unique_per_block[group] = counts
    per_block = np.bincount(clustered.block, minlength=num_blocks).astype(np.int64)
    return Star(samples, groups, per_block, unique_per_block, stored_tuples)


def check_num_blocks(num_blocks: int, block_samples: int) -> None:
    """Raise SchemaError if a part has more blocks than its block ids can number, 2**20."""
    if num_blocks > 1 << FILE_SHIFT:
        raise SchemaError(
            f"part must have at most {1 << FILE_SHIFT} blocks, got {num_blocks} of "
            f"{block_samples} samples; raise data.block_samples"
        )


def unique_in_blocks(
    block: NDArray[np.int64], references: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the first sample of each distinct (block, tuple), in order.

    Args:
        block: (num_samples,) ascending.
        references: (num_samples,) the tuple of each sample.

    Returns:
        first: (num_stored,) ascending positions of samples.
        inverse: (num_samples,) the position in `first` of each sample's tuple.

    Example:
        >>> first, inverse = unique_in_blocks(np.array([0, 0, 0, 1]), np.array([5, 2, 5, 5]))
        >>> first.tolist(), inverse.tolist()
        ([0, 1, 3], [0, 1, 0, 2])
    """
    size = int(references.max()) + 1 if len(references) else 1
    inverse, first = first_appearances(block * size + references)
    return first, inverse


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
    first, index = unique_in_blocks(row_group, tuples)
    counts = np.bincount(row_group[first], minlength=len(row_groups))
    kept = table.drop_columns([BLOCK, UNIQUE_INDEX]).take(pa.array(first))
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
        entries = values.take(pa.array(windows.source))
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


def choose_layouts(star: Star, storage: StorageConfig) -> dict[str, GroupLayout]:
    """Choose the layout of every group from some sessions of one part."""
    layouts: dict[str, GroupLayout] = {}
    for group, table in star.groups.items():
        rows = min(table.num_rows, SAMPLE_ROWS)
        largest = max((table[c].nbytes for c in table.column_names), default=0)
        rows = min(rows, max(1, SAMPLE_BYTES * table.num_rows // max(1, largest)))
        sample = table.slice(0, rows).combine_chunks()
        layouts[group] = choose_layout(sample, star.tuples[group][:rows], group, storage)
    return layouts


def choose_layout(
    table: pa.Table, tuples: NDArray[np.int64], group: str, storage: StorageConfig
) -> GroupLayout:
    """Choose the layout of one group.

    Args:
        table: some rows of the group, as one row group.
        tuples: (num_rows,) equal rows have equal numbers.
        group: its name in the job.
        storage: settings of the job, which take precedence.
    """
    shared = resolve_choice(storage.shared_tuples, group)
    index, unique, _ = dedup_tuples(table, tuples, [table.num_rows])
    if shared is None and unique.num_rows > SKIP_RATIO * table.num_rows:
        shared = False
    plain = table.drop_columns([BLOCK, UNIQUE_INDEX])
    if shared is not None:
        return GroupLayout(shared, _choose_windows(unique if shared else plain, group, storage)[0])
    plain_windows, plain_bytes = _choose_windows(plain, group, storage)
    shared_windows, shared_bytes = _choose_windows(unique, group, storage)
    shared_bytes += _index_bytes(index) + _index_bytes(np.arange(unique.num_rows))
    if shared_bytes <= MAX_SIZE_RATIO * plain_bytes:
        return GroupLayout(True, shared_windows)
    return GroupLayout(False, plain_windows)


def _choose_windows(
    table: pa.Table, group: str, storage: StorageConfig
) -> tuple[tuple[str, ...], int]:
    """Return the list features to store as windows, and the bytes of all files together."""
    enabled = resolve_choice(storage.windows, group)
    total, features = min_encoded_bytes(table), []
    for field in table.schema:
        if enabled is False or not supports_windows(field.type) or not _PATH.fullmatch(field.name):
            continue
        column = table[field.name]
        windows, values = list_windows(column.combine_chunks())
        if enabled is None and len(windows.source) > SKIP_RATIO * len(values):
            continue
        columns, buffers = encode_windows(column, [table.num_rows], 0)
        names = window_columns(field.name)
        list_bytes = min_encoded_bytes(table.select([field.name]))
        window_bytes = min_encoded_bytes(pa.table(dict(zip(names, columns, strict=True))))
        index = pa.array(segment_indices(0, np.arange(len(buffers[0]))))
        window_bytes += min_encoded_bytes(pa.table({BUFFER_INDEX: index, field.name: buffers[0]}))
        if enabled or window_bytes <= MAX_SIZE_RATIO * list_bytes:
            features.append(field.name)
            total += window_bytes - list_bytes
    return tuple(features), total


def _index_bytes(index: NDArray[np.int64]) -> int:
    return min_encoded_bytes(pa.table({TUPLE_INDEX: pa.array(segment_indices(0, index))}))
