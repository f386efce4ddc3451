"""One group of a part as it lies in files: its tuples, and what several of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.star import Star, unique_in_blocks
from schemas.columns import flat_list, is_list, is_text, numpy_of, one_chunk
from schemas.jagged import Jagged, bits
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
from schemas.windows import Windows, to_windows


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How a group is stored.

    Attributes:
        shared_tuples: each distinct tuple once per row group, not once per block.
        windows: its list features that are windows over buffers.
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
        star: the part.
        layout: how the group is stored.
        row_groups: unique tuples of each row group.
        file_index: number of the part.
        written: path to the rows that the file has already.
    """
    done = written or {}
    table, path = star.groups[group], group_path(group, file_index)
    if layout.shared_tuples:
        index, table, counts = shared(table, star.tuples[group], row_groups)
        first = done.get(tuples_path(group, file_index), 0)
        numbered = pa.array(numbers(file_index, first + index))
        head = star.groups[group].select([BLOCK, UNIQUE_INDEX])
        yield StoredTable(path, head.append_column(TUPLE_INDEX, numbered), row_groups)
        path, row_groups = tuples_path(group, file_index), counts
        own = pa.array(numbers(file_index, first + np.arange(table.num_rows)))
        table = table.add_column(0, TUPLE_INDEX, own)
    for feature in layout.windows:
        first = done.get(buffers_path(feature, file_index), 0)
        columns, buffers = windowed(table[feature], row_groups, file_index, first)
        place = table.column_names.index(feature)
        table = table.remove_column(place)
        for offset, name in enumerate(window_columns(feature)):
            table = table.add_column(place + offset, name, columns[offset])
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


def numbers(file_index: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of tuples or buffers, unique in the segment, by their places in a part."""
    return (np.int64(file_index) << np.int64(NUMBER_SHIFT)) + places


def shared(
    table: pa.Table, tuples: NDArray[np.int64], row_groups: Sequence[int]
) -> tuple[NDArray[np.int64], pa.Table, list[int]]:
    """Keep each distinct tuple of a row group once, in order of first appearance.

    Args:
        table: the rows of a group.
        tuples: (num_rows,) equal where two rows are.
        row_groups: rows of each row group.

    Returns:
        (num_rows,) the place of each row's tuple among the kept ones; these, without `block` and
        `unique_index`; how many each row group has.
    """
    row_group = np.repeat(np.arange(len(row_groups)), row_groups)
    first, index = unique_in_blocks(row_group, tuples)
    counts = np.bincount(row_group[first], minlength=len(row_groups))
    kept = table.drop_columns([BLOCK, UNIQUE_INDEX]).take(pa.array(first))
    return index, kept, counts.tolist()


def windowed(
    column: pa.ChunkedArray, row_groups: Sequence[int], file_index: int, first: int = 0
) -> tuple[list[pa.Array], list[pa.Array]]:
    """Turn a list feature into windows.

    Args:
        column: lists of numbers.
        row_groups: rows of each row group.
        file_index: number of the part.
        first: buffers that the file has already.

    Returns:
        The three window columns, and the buffers of each row group.
    """
    lists, parts, buffers = one_chunk(column), [], []
    start = 0
    for count in row_groups:
        found, values = list_windows(lists.slice(start, count))
        parts.append((numbers(file_index, found.buffer + first), found.start, found.length))
        entries = values.take(pa.array(found.source))
        offsets = found.offsets if len(found.offsets) > 1 else np.zeros(2, np.int64)
        made = pa.LargeListArray.from_arrays(pa.array(offsets), entries, type=lists.type)
        buffers.append(made)
        start, first = start + count, first + len(made)
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


def can_be_windows(kind: pa.DataType) -> bool:
    """Tell whether a column's type is a list of values that can be compared by their bits."""
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
    index = pa.array(numbers(file_index, first + np.arange(sum(counts))))
    lists = pa.chunked_array(buffers).combine_chunks()
    return pa.table({BUFFER_INDEX: index, feature: lists}), counts
