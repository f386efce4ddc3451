"""Divide the sorted samples of a part into chunks that fit in memory, with at most two reads.

The first read takes the columns that determine the order. Samples that fit in memory are kept;
otherwise a second read distributes their rows to the chunks, in a temporary file, and each chunk
reads its own rows back. So a part may have any size, and one session key most of the log.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.clustering.star import (
    Clustered,
    SampleOrder,
    concat_sort_keys,
    slice_clustered,
    sort_keys,
    sort_samples,
)
from pipelines.samples.tuples import Tuples, concat_batches, concat_tuples, partition_tuples
from pipelines.shuffle import from_ipc, to_ipc
from schemas.arrays import bytes_per_row
from schemas.config.job import DataConfig

CHUNK_BYTES = 256 << 20
"""Bytes of a chunk's expanded samples, and of a part's samples that are kept in memory; a worker
needs about five times as much memory if nothing repeats."""
_POSITION = "_position_"


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
