"""Samples of a part in their total order, clustered by session, in blocks, as a star schema.

Samples of a part are sorted by (split, window, hash of the session key, session key, time, file,
position in the file, list index) and cut into blocks; parts are ranges of the hash. Many session
keys of a block are then ordered by time, because neighbours in time compress better. So the bytes
do not depend on the number of workers or on the worker that read a row. The star schema has one row
per unique tuple of a block for each group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import (
    Tuples,
    concat_batches,
    concat_tuples,
    hash_session_keys,
    partition_tuples,
    unique_in_ranges,
)
from presage.pipelines.shuffle import from_ipc, to_ipc
from presage.pipelines.sources.raw_rows import ORIGIN, microseconds
from presage.pipelines.transforms.apply import apply_transforms
from presage.schemas.arrays import (
    bytes_per_row,
    distinct_values,
    offsets_of,
    ranges,
    stable_order,
    take_rows,
    take_values,
)
from presage.schemas.config.job import SAMPLES, DataConfig
from presage.schemas.dataset.fitted import FittedValues
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BLOCK, FILE_SHIFT, UNIQUE_INDEX, inverse_column

CHUNK_BYTES = 256 << 20
"""Bytes of a chunk's expanded samples, and of a part's samples that are kept in memory; a worker
needs about five times as much memory if nothing repeats."""
_POSITION = "_position_"
ORDERED_KEYS = 32
"""Minimum number of a block's session keys that are put in the order of time. It saves 1 to 7 % of
the bytes of short sessions; for long ones it costs 1 %, as histories continue in the next block
(benchmarks/storage.md)."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The order of a part's samples; all arrays have shape (num_samples,) and are in that order.

    Attributes:
        rows: int64, position of each sample in the input.
        starts_session: bool, first sample of a session within its split.
        session_samples: int64, where a session starts, its samples in the split; 0 elsewhere.
        opens_session: bool, first sample of a session.
        is_evaluation: bool, ascending.
        window: int32, windows since the epoch; 0 without windows.
        block: int64, index of the block in the part, ascending from 0.
    """

    rows: NDArray[np.int64]
    starts_session: NDArray[np.bool_]
    session_samples: NDArray[np.int64]
    opens_session: NDArray[np.bool_]
    is_evaluation: NDArray[np.bool_]
    window: NDArray[np.int32]
    block: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Clustered:
    """Consecutive samples of one part in their final order; arrays have shape (num_samples,).

    Attributes:
        samples: the samples.
        starts_session: bool, first sample of a session within its split.
        session_samples: int64, where a session starts, its samples in the split, including those
            of later chunks; 0 elsewhere.
        is_evaluation: bool, ascending.
        window: int32, windows since the epoch; 0 without windows.
        block: int64, ascending from 0; the first sample starts a block.
        num_sessions: sessions that start here; one that the split divides counts once.
        first_block: index of the first block in the part.
    """

    samples: Tuples
    starts_session: NDArray[np.bool_]
    session_samples: NDArray[np.int64]
    is_evaluation: NDArray[np.bool_]
    window: NDArray[np.int32]
    block: NDArray[np.int64]
    num_sessions: int
    first_block: int = 0


def cluster(samples: Tuples, data: DataConfig) -> Clustered:
    """Sort the samples of one part and divide them into blocks.

    `samples` are all of some session keys, in any order, with origins and list indices.
    """
    order = sort_samples(sort_keys(samples, data), data)
    return slice_clustered(samples.take(order.rows), order, slice(0, samples.num_samples))


def slice_clustered(samples: Tuples, order: SampleOrder, rows: slice) -> Clustered:
    """Return a range of sorted samples that consists of whole blocks.

    `samples` are those of the range, `order` is of all samples of the part.
    """
    block = order.block[rows]
    first = int(block[0]) if len(block) else 0
    return Clustered(
        samples,
        order.starts_session[rows],
        order.session_samples[rows],
        order.is_evaluation[rows],
        order.window[rows],
        block - first,
        int(order.opens_session[rows].sum()),
        first,
    )


@dataclass(frozen=True, slots=True)
class SortKeys:
    """The columns that determine the order of some samples.

    Attributes:
        keys: distinct session keys.
        key: (num_samples,) int32, the index of each sample's key in `keys`.
        time: (num_samples,) int64, microseconds.
        origin: (num_samples,) int64, position of the row in the input.
        index: (num_samples,) integers, list index of the sample within its row.
    """

    keys: pa.Array
    key: NDArray[np.int32]
    time: NDArray[np.int64]
    origin: NDArray[np.int64]
    index: NDArray[np.integer]


def sort_keys(samples: Tuples, data: DataConfig) -> SortKeys:
    """Return the sort columns of samples."""
    name = data.session.key
    group = next((g for g, table in samples.uniques.items() if name in table.column_names), None)
    table = samples.samples if group is None else samples.uniques[group]
    keys, key = distinct_values(table[name])
    return SortKeys(
        keys,
        key if group is None else key[samples.references[group]],
        samples.column(data.session.time).cast(pa.int64()).to_numpy(),
        samples.column(ORIGIN).to_numpy(),
        samples.column(LIST_INDEX).to_numpy(),
    )


def concat_sort_keys(parts: Sequence[SortKeys]) -> SortKeys:
    """Return the sort columns of all samples of several parts, at least one."""
    if len(parts) == 1:
        return parts[0]
    keys, numbers = distinct_values(pa.concat_arrays([p.keys for p in parts]))
    starts = np.cumsum([0, *(len(p.keys) for p in parts)])
    return SortKeys(
        keys,
        np.concatenate([numbers[s:][p.key] for s, p in zip(starts, parts, strict=False)]),
        np.concatenate([p.time for p in parts]),
        np.concatenate([p.origin for p in parts]),
        np.concatenate([p.index for p in parts]),
    )


def sort_samples(columns: SortKeys, data: DataConfig, *, shuffled: bool = True) -> SampleOrder:
    """Return the final order of samples.

    `columns` are those of all samples of some session keys, in any order. Blocks are in the order
    of hashes, or of times if not `shuffled`.
    """
    codes = ranks_of_keys(columns.keys)[columns.key]
    rows = np.lexsort((columns.index, columns.origin, columns.time))
    rows = rows[stable_order(codes[rows])]
    codes, time = codes[rows], columns.time[rows]
    starts = _session_starts(codes, time, data.session.gap)
    session = np.cumsum(starts, dtype=np.int64)
    window = _windows(time, starts, data.window.span)
    evaluation = np.zeros(len(time), bool)
    if data.split.evaluation_from is not None:
        evaluation = time >= microseconds(data.split.evaluation_from)
    del codes, starts
    by_range = _order_of_ranges(evaluation, window)
    rows, session, time = rows[by_range], session[by_range], time[by_range]
    window, evaluation = window[by_range], evaluation[by_range]
    in_split, opens = _changes(session, evaluation), _first_of_each(session)
    lengths = np.zeros(len(rows), np.int64)
    lengths[in_split] = np.diff(np.flatnonzero(in_split), append=len(rows))
    block = cut_blocks(_changes(window, evaluation), data.block_samples)
    del by_range, session
    by_block = _order_by_time(
        block if shuffled else np.zeros_like(block), columns.key[rows], time, columns.keys
    )
    return SampleOrder(
        rows[by_block],
        in_split[by_block],
        lengths[by_block],
        opens[by_block],
        evaluation,  # a block has one split and one window
        window,
        block,
    )


def _order_by_time(
    block: NDArray[np.int64], key: NDArray[np.int32], time: NDArray[np.int64], keys: pa.Array
) -> NDArray[np.int64]:
    """Return the order of samples by block, first time of the session key in it, and session key.

    Blocks of few keys keep their order.

    Args:
        block: (num_samples,) ascending.
        key: (num_samples,) index of each sample's session key in `keys`, side by side in a block.
        time: (num_samples,) ascending for each key of a block.
        keys: distinct session keys.
    """
    starts = np.flatnonzero(_changes(block, key))
    blocks = block[starts]
    is_ordered = np.bincount(blocks)[blocks] >= ORDERED_KEYS
    times = np.where(is_ordered, time[starts], 0)
    order = np.lexsort((times, blocks))
    is_tied = is_ordered[order] & ~_changes(blocks[order], times[order])
    is_tied[:-1] |= is_tied[1:]
    if is_tied.any():
        tied = order[is_tied]
        rank = pc.rank(take_values(keys, key[starts[tied]])).to_numpy()
        order[is_tied] = tied[np.lexsort((rank, times[tied], blocks[tied]))]
    return ranges(starts[order], np.diff(starts, append=len(block))[order])


def _order_of_ranges(evaluation: NDArray[np.bool_], window: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the stable order of samples by split and window."""
    ranges = window.astype(np.int64) - (window.min() if len(window) else 0)
    ranges += evaluation * (ranges.max(initial=0) + 1)
    return stable_order(ranges)


def ranks_of_keys(keys: pa.Array) -> NDArray[np.int32]:
    """Return the rank of each distinct session key by its hash, then by itself."""
    hashes = hash_session_keys(keys)
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) == 0).any():
        order = np.lexsort((pc.rank(keys).to_numpy(), hashes))
    ranks = np.empty(len(keys), np.int32)
    ranks[order] = np.arange(len(keys), dtype=np.int32)
    return ranks


def _first_of_each(numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the first of equal numbers, which are at most their count."""
    first = np.empty(len(numbers) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the last of equal indices is kept
    is_first = np.zeros(len(numbers), bool)
    is_first[first[numbers]] = True
    return is_first


def _session_starts(
    codes: NDArray[np.integer], time: NDArray[np.int64], gap: timedelta | None
) -> NDArray[np.bool_]:
    starts = _changes(codes)
    if gap is not None and len(time):
        starts[1:] |= np.diff(time) > microseconds(gap)
    return starts


def _windows(
    time: NDArray[np.int64], starts: NDArray[np.bool_], span: timedelta | None
) -> NDArray[np.int32]:
    if span is None:
        return np.zeros(len(time), np.int32)
    first = time[starts][np.cumsum(starts) - 1]  # time of the session's first sample
    return (first // microseconds(span)).astype(np.int32)


def _changes(*columns: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return the rows that differ from the previous one in any column; the first row counts."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def cut_blocks(starts_range: NDArray[np.bool_], block_samples: int) -> NDArray[np.int64]:
    """Return the block of each sample; blocks do not cross ranges.

    Args:
        starts_range: (num_samples,) bool, first sample of a (split, window).
        block_samples: maximum samples of a block.

    Example:
        >>> cut_blocks(np.array([True, False, False, True, False]), 2).tolist()
        [0, 0, 1, 2, 2]
    """
    starts = np.flatnonzero(starts_range)
    lengths = np.diff(np.append(starts, len(starts_range)))
    within = np.arange(len(starts_range)) - np.repeat(starts, lengths)
    return np.cumsum(within % block_samples == 0) - 1


# Chunks that fit in memory, with at most two reads of the samples. The first one takes the columns
# that determine the order. Samples that fit in memory are kept; otherwise a second read distributes
# their rows to the chunks, in a temporary file, and each chunk reads its own rows back. So a part
# may have any size, and one session key most of the log.


def cluster_chunks(
    parts: Iterable[Tuples], data: DataConfig, *, shuffled: bool = True
) -> Iterator[Clustered]:
    """Yield the samples of a part in their final order, in chunks of whole blocks.

    `parts` have all samples of some session keys, in any order. They are iterated twice, in the
    same order, if they do not fit in memory. Session keys are in the order of their hashes, or of
    their times if not `shuffled`.
    """
    keys, sizes = [], list[NDArray[np.int64]]()
    kept: list[Tuples] = []
    num_bytes = 0
    for part in parts:
        keys.append(sort_keys(part, data))
        sizes.append(expanded_bytes(part))
        num_bytes += part.num_bytes
        if num_bytes <= CHUNK_BYTES:
            kept.append(part)
        else:
            kept.clear()
    keys[:] = [concat_sort_keys(keys)]  # frees the parts before the samples are sorted
    order = sort_samples(keys.pop(), data, shuffled=shuffled)
    chunks = split_at_blocks(order.block, np.concatenate(sizes)[order.rows], CHUNK_BYTES)
    del sizes
    yield from _kept_chunks(kept, order, chunks) if kept else _spilled_chunks(parts, order, chunks)


def expanded_bytes(samples: Tuples) -> NDArray[np.int64]:
    """Return the bytes of each sample without deduplication, however samples are batched."""
    total = _bytes_per_row(samples.samples)
    for group, table in samples.uniques.items():
        total += _bytes_per_row(table)[samples.references[group]]
    return total


def _bytes_per_row(table: pa.Table) -> NDArray[np.int64]:
    is_number = [pa.types.is_primitive(kind) for kind in table.schema.types]
    numbers = (kind for kind, number in zip(table.schema.types, is_number, strict=True) if number)
    total = np.full(table.num_rows, sum(max(1, kind.bit_width // 8) for kind in numbers), np.int64)
    for column, number in zip(table.columns, is_number, strict=True):
        if not number:
            total += bytes_per_row(column)
    return total


def split_at_blocks(block: NDArray[np.int64], sizes: NDArray[np.int64], limit: int) -> list[slice]:
    """Return ranges of whole blocks with about equally many bytes.

    Args:
        block: (num_samples,) ascending.
        sizes: (num_samples,) bytes of each sample, at least 1.
        limit: bytes of a range, which at most one block exceeds.

    Example:
        >>> split_at_blocks(np.array([0, 0, 1, 1, 2, 3, 3]), np.full(7, 10), 40)
        [slice(0, 4, None), slice(4, 7, None)]
    """
    ends = np.flatnonzero(np.diff(block, append=-1)) + 1
    totals = np.cumsum(sizes)[ends - 1]  # up to the end of each block
    total = int(totals[-1]) if len(totals) else 0
    per_range = -(-total // max(1, -(-total // limit)))
    ranges: list[slice] = []
    start = before = 0
    while start < len(block):
        last = int(np.searchsorted(totals, before + per_range))
        end = int(ends[min(last, len(ends) - 1)])
        ranges.append(slice(start, end))
        start, before = end, int(totals[min(last, len(ends) - 1)])
    return ranges


def _kept_chunks(
    kept: Sequence[Tuples], order: SampleOrder, chunks: Sequence[slice]
) -> Iterator[Clustered]:
    samples = concat_tuples(kept)
    for chunk in chunks:
        yield slice_clustered(samples.take(order.rows[chunk]), order, chunk)


def _spilled_chunks(
    parts: Iterable[Tuples], order: SampleOrder, chunks: Sequence[slice]
) -> Iterator[Clustered]:
    with tempfile.TemporaryFile() as file:
        spill = Spill(file, chunks)
        position = np.empty(len(order.rows), np.int64)  # of each sample in the final order
        position[order.rows] = np.arange(len(position))
        for some in concat_batches(parts, CHUNK_BYTES // 4):
            spill.add(some, position[: some.num_samples])
            position = position[some.num_samples :]
        for index, chunk in enumerate(chunks):
            yield slice_clustered(spill.read(index), order, chunk)


class Spill:
    """The samples of chunks in a temporary file."""

    def __init__(self, file: BinaryIO, chunks: Sequence[slice]) -> None:
        """Write nothing yet.

        `chunks` are ascending ranges of the final order.
        """
        self._file, self._chunks = file, chunks
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in chunks]

    def add(self, samples: Tuples, position: NDArray[np.int64]) -> None:
        """Write samples to their chunks.

        `position` is (num_samples,), of each in the final order.
        """
        table = samples.samples.append_column(_POSITION, pa.array(position))
        placed = Tuples(table, samples.references, samples.uniques)
        chunk = np.searchsorted([c.stop for c in self._chunks], position, side="right")
        for index, rows in enumerate(partition_tuples(placed, chunk, len(self._chunks))):
            if rows is not None:
                data = to_ipc(rows)
                self._ranges[index].append((self._file.tell(), len(data)))
                self._file.write(data)

    def read(self, index: int) -> Tuples:
        """Return the samples of a chunk in the final order."""
        pieces: list[Tuples] = []
        for offset, num_bytes in self._ranges[index]:
            self._file.seek(offset)
            pieces.append(from_ipc(self._file.read(num_bytes)))
        samples = concat_tuples(pieces)
        position = samples.samples[_POSITION].to_numpy()
        rows = np.empty(len(position), np.int64)
        rows[position - self._chunks[index].start] = np.arange(len(rows))
        table = samples.samples.drop_columns([_POSITION])
        return Tuples(table, samples.references, samples.uniques).take(rows)


# The star schema.


@dataclass(frozen=True, slots=True)
class Star:
    """The tables of one part.

    Attributes:
        samples: one row per sample: block, columns without a group, inverse indices.
        groups: one row per unique tuple of a block, or per sample.
        samples_per_block: (num_blocks,) int64.
        unique_per_block: group to (num_blocks,) int64.
        samples_per_tuple: group to (num_unique,) int64.
        tuples: group to (num_unique,) int64; equal rows have equal numbers in all blocks.
    """

    samples: pa.Table
    groups: Mapping[str, pa.Table]
    samples_per_block: NDArray[np.int64]
    unique_per_block: Mapping[str, NDArray[np.int64]]
    samples_per_tuple: Mapping[str, NDArray[np.int64]]
    tuples: Mapping[str, NDArray[np.int64]]


def to_star(
    clustered: Clustered,
    file_index: int,
    data: DataConfig,
    fitted: FittedValues | None = None,
    repeated: Container[str] = (),
) -> Star:
    """Deduplicate each group within each block and apply the transforms.

    `file_index`, the number of the part, makes the upper bits of its block ids. The `repeated`
    groups are not deduplicated: they get a row for each sample.
    """
    fitted = fitted or FittedValues()
    num_blocks = int(clustered.block[-1]) + 1 if len(clustered.block) else 0
    check_num_blocks(clustered.first_block + num_blocks, data.block_samples)
    prefix = (np.int64(file_index) << np.int64(FILE_SHIFT)) + clustered.first_block
    tuples = clustered.samples
    columns = {
        c: tuples.samples[c] for c in tuples.samples.column_names if c not in (ORIGIN, LIST_INDEX)
    }
    samples = pa.table({BLOCK: pa.array(prefix + clustered.block), **columns})
    samples = apply_transforms(samples, SAMPLES, data.transforms.get(SAMPLES, {}), fitted)
    groups: dict[str, pa.Table] = {}
    unique_per_block: dict[str, NDArray[np.int64]] = {}
    samples_per_tuple: dict[str, NDArray[np.int64]] = {}
    stored_tuples: dict[str, NDArray[np.int64]] = {}
    for group, names in data.groups.items():
        if group in repeated:
            stored = inverse = np.arange(len(clustered.block))
        else:
            stored, inverse = unique_in_ranges(clustered.block, tuples.references[group])
        counts = np.bincount(clustered.block[stored], minlength=num_blocks).astype(np.int64)
        starts = offsets_of(counts)[:-1]
        unique_index = np.arange(len(stored)) - np.repeat(starts, counts)
        samples_per_tuple[group] = np.bincount(inverse, minlength=len(stored))
        stored_tuples[group] = tuples.references[group][stored]
        taken = take_rows(tuples.uniques[group], stored_tuples[group])
        table = pa.table(
            {
                BLOCK: pa.array(prefix + clustered.block[stored]),
                UNIQUE_INDEX: pa.array(unique_index.astype(np.int32)),
                **{c: taken[c] for c in names},
            }
        )
        groups[group] = apply_transforms(table, group, data.transforms.get(group, {}), fitted)
        local = (inverse - starts[clustered.block]).astype(np.int32)
        samples = samples.append_column(inverse_column(group), pa.array(local))
        unique_per_block[group] = counts
    per_block = np.bincount(clustered.block, minlength=num_blocks).astype(np.int64)
    return Star(samples, groups, per_block, unique_per_block, samples_per_tuple, stored_tuples)


def check_num_blocks(num_blocks: int, block_samples: int) -> None:
    """Raise SchemaError if a part has more blocks than its block ids can number, 2**20."""
    if num_blocks > 1 << FILE_SHIFT:
        raise SchemaError(
            f"part must have at most {1 << FILE_SHIFT} blocks, got {num_blocks} of "
            f"{block_samples} samples; raise data.block_samples"
        )
