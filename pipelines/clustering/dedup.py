"""From clustered samples to the star schema.

Unique tuples per block, stored per block, per part or as windows.
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
from pipelines.sources.read import ORIGIN
from pipelines.transforms.apply import with_transforms
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
        samples: one row per sample: block, columns of no group, inverse indices.
        groups: one row per unique tuple of a block.
        samples_per_block: (num_blocks,) int64.
        unique_per_block: group to (num_blocks,) int64.
        tuples: group to (num_unique,) int64, equal where two of its rows are, whatever the block.
    """

    samples: pa.Table
    groups: Mapping[str, pa.Table]
    samples_per_block: NDArray[np.int64]
    unique_per_block: Mapping[str, NDArray[np.int64]]
    tuples: Mapping[str, NDArray[np.int64]]


def to_star(
    clustered: Clustered, file_index: int, data: DataConfig, learned: FittedValues | None = None
) -> Star:
    """Deduplicate each group within each block, exactly, and apply the transforms.

    Args:
        clustered: samples of one part in order.
        file_index: number of the part, the upper bits of its block ids.
        data: groups and transforms.
        learned: what transforms learned, None where none does.
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
    samples = with_transforms(samples, SAMPLES, data.transforms.get(SAMPLES, {}), learned)
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
        groups[group] = with_transforms(table, group, data.transforms.get(group, {}), learned)
        local = (inverse - starts[clustered.block]).astype(np.int32)
        samples = samples.append_column(inverse_column(group), pa.array(local))
        unique_per_block[group] = counts
    per_block = np.bincount(clustered.block, minlength=num_blocks).astype(np.int64)
    return Star(samples, groups, per_block, unique_per_block, stored_tuples)


def check_num_blocks(num_blocks: int, block_samples: int) -> None:
    """Refuse a part with more blocks than its block ids have room for.

    Raises:
        SchemaError: it has more than 2**20.
    """
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
        index, table, counts = dedup_tuples(table, star.tuples[group], row_groups)
        first = done.get(tuples_path(group, file_index), 0)
        numbered = pa.array(segment_indices(file_index, first + index))
        head = star.groups[group].select([BLOCK, UNIQUE_INDEX])
        yield StoredTable(path, head.append_column(TUPLE_INDEX, numbered), row_groups)
        path, row_groups = tuples_path(group, file_index), counts
        own = pa.array(segment_indices(file_index, first + np.arange(table.num_rows)))
        table = table.add_column(0, TUPLE_INDEX, own)
    for feature in layout.windows:
        first = done.get(buffers_path(feature, file_index), 0)
        columns, buffers = encode_windows(table[feature], row_groups, file_index, first)
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


def segment_indices(file_index: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of tuples or buffers, unique in the segment, by their places in a part."""
    return (np.int64(file_index) << np.int64(NUMBER_SHIFT)) + places


def dedup_tuples(
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


def encode_windows(
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
        parts.append((segment_indices(file_index, found.buffer + first), found.start, found.length))
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


def supports_windows(kind: pa.DataType) -> bool:
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
    index = pa.array(segment_indices(file_index, first + np.arange(sum(counts))))
    lists = pa.chunked_array(buffers).combine_chunks()
    return pa.table({BUFFER_INDEX: index, feature: lists}), counts


# Which groups are stored beyond blocks: shared tuples and windows, by measured bytes.
#
# A pure function of the tables of one part, and of the job. It is asked once, and all parts of a
# segment are stored alike; each segment is asked anew.

SAMPLE_ROWS = 1 << 15
"""Unique tuples of a group that are looked at."""
SAMPLE_BYTES = 4 << 20
"""Uncompressed bytes of one column that are looked at."""
MAX_SIZE_RATIO = 0.98
"""Share of the bytes at which a layout is taken; what saves less is not worth another file."""
SKIP_RATIO = 0.9
"""Share of tuples or values that are left at which bytes are not even measured."""
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

Layouts = Mapping[str, GroupLayout]
"""Group to its layout."""


def choose_layouts(star: Star, storage: StorageConfig) -> dict[str, GroupLayout]:
    """Choose the layout of every group.

    Args:
        star: some sessions of one part.
        storage: what the job says.
    """
    found: dict[str, GroupLayout] = {}
    for group, table in star.groups.items():
        rows = min(table.num_rows, SAMPLE_ROWS)
        largest = max((table[c].nbytes for c in table.column_names), default=0)
        rows = min(rows, max(1, SAMPLE_BYTES * table.num_rows // max(1, largest)))
        sample = table.slice(0, rows).combine_chunks()
        found[group] = choose_layout(sample, star.tuples[group][:rows], group, storage)
    return found


def choose_layout(
    table: pa.Table, tuples: NDArray[np.int64], group: str, storage: StorageConfig
) -> GroupLayout:
    """Choose the layout of one group.

    Args:
        table: some rows of the group, as one row group.
        tuples: (num_rows,) equal where two rows are.
        group: its name in the job.
        storage: what the job says.
    """
    wanted = resolve_choice(storage.shared_tuples, group)
    index, kept, _ = dedup_tuples(table, tuples, [table.num_rows])
    if wanted is None and kept.num_rows > SKIP_RATIO * table.num_rows:
        wanted = False
    plain = table.drop_columns([BLOCK, UNIQUE_INDEX])
    if wanted is not None:
        return GroupLayout(wanted, _windows(kept if wanted else plain, group, storage)[0])
    by_block, plain_bytes = _windows(plain, group, storage)
    by_row_group, shared_bytes = _windows(kept, group, storage)
    shared_bytes += _index_bytes(index) + _index_bytes(np.arange(kept.num_rows))
    if shared_bytes <= MAX_SIZE_RATIO * plain_bytes:
        return GroupLayout(True, by_row_group)
    return GroupLayout(False, by_block)


def _windows(table: pa.Table, group: str, storage: StorageConfig) -> tuple[tuple[str, ...], int]:
    """Return the list features that are windows, and the bytes of all files together."""
    wanted = resolve_choice(storage.windows, group)
    total, chosen = min_encoded_bytes(table), []
    for field in table.schema:
        if wanted is False or not supports_windows(field.type) or not _PATH.fullmatch(field.name):
            continue
        column = table[field.name]
        found, values = list_windows(column.combine_chunks())
        if wanted is None and len(found.source) > SKIP_RATIO * len(values):
            continue
        columns, buffers = encode_windows(column, [table.num_rows], 0)
        names = window_columns(field.name)
        before = min_encoded_bytes(table.select([field.name]))
        after = min_encoded_bytes(pa.table(dict(zip(names, columns, strict=True))))
        index = pa.array(segment_indices(0, np.arange(len(buffers[0]))))
        after += min_encoded_bytes(pa.table({BUFFER_INDEX: index, field.name: buffers[0]}))
        if wanted or after <= MAX_SIZE_RATIO * before:
            chosen.append(field.name)
            total += after - before
    return tuple(chosen), total


def _index_bytes(index: NDArray[np.int64]) -> int:
    return min_encoded_bytes(pa.table({TUPLE_INDEX: pa.array(segment_indices(0, index))}))
