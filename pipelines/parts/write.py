"""Write one part of a segment: the same row groups in every table, whole blocks in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.parts.cluster import Clustered
from pipelines.parts.encodings import open_writer
from pipelines.parts.pins import Pins
from pipelines.parts.star import Star
from pipelines.parts.stored import directory_of, stored_tables
from pipelines.segments.partial import partial_of
from schemas.jagged import offsets_of
from schemas.layout import (
    BLOCK,
    EVALUATION,
    FILE_SHIFT,
    TRAIN,
    blocks_schema,
    num_unique_column,
    samples_path,
)

ROW_GROUP_BYTES = 64 << 20
"""Uncompressed bytes of samples and groups together in one row group; smaller ones cost 15-30 %
of the bytes, larger ones memory (ARCHITECTURE, measured)."""
WINDOWS_BYTES = 256 << 20
"""Uncompressed bytes that a reader holds who goes through the windows of all parts in order: row
groups of several windows are at most so large that one of each part fits into them."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one split that share a row group."""

    first: int
    end: int


def row_groups_of(
    is_evaluation: NDArray[np.bool_],
    window: NDArray[np.int32],
    bytes_per_block: float,
    limit: int = ROW_GROUP_BYTES,
    windows_limit: int = ROW_GROUP_BYTES,
) -> list[BlockRange]:
    """Cut blocks into row groups: each window by itself, but several where they are small.

    Args:
        is_evaluation: (num_blocks,) ascending.
        window: (num_blocks,) ascending in each split.
        bytes_per_block: mean uncompressed bytes of a block over all tables.
        limit: uncompressed bytes of a row group.
        windows_limit: uncompressed bytes of a row group of several windows.

    Example:
        >>> row_groups_of(np.zeros(5, bool), np.array([0, 0, 1, 2, 2]), 1.0, 8, 3)
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
            groups.extend(
                BlockRange(a, min(a + per_group, end)) for a in range(start, end, per_group)
            )
    return groups


class PartWriter:
    """Writes the files of one part, piece by piece, under their final names when they are whole."""

    def __init__(self, root: Path, file_index: int, pins: Pins) -> None:
        """Write nothing yet.

        Args:
            root: directory of the segment being built.
            file_index: number of the part.
            pins: how its tables are laid out and encoded.
        """
        self._root = root
        self._file_index = file_index
        self._pins = pins
        self._writers: dict[str, tuple[Path, pq.ParquetWriter]] = {}
        self._written: Counter[str] = Counter()
        self._num_row_groups = 0

    def add(self, star: Star, clustered: Clustered) -> pa.Table:
        """Write the next samples of the part.

        Args:
            star: their tables.
            clustered: the same samples, for splits and windows.

        Returns:
            Their rows of `blocks.parquet`.
        """
        first_sample = offsets_of(star.samples_per_block)[:-1]
        groups = row_groups_of(
            clustered.is_evaluation[first_sample],
            clustered.window[first_sample],
            _bytes_per_block(star),
            windows_limit=min(ROW_GROUP_BYTES, WINDOWS_BYTES // self._pins.num_parts),
        )
        counts = [int(star.samples_per_block[g.first : g.end].sum()) for g in groups]
        self._write(samples_path(self._file_index), star.samples, counts)
        for name in star.groups:
            unique = [int(star.unique_per_block[name][g.first : g.end].sum()) for g in groups]
            layout = self._pins.layouts[name]
            for file in stored_tables(
                name, star, layout, unique, self._file_index, dict(self._written)
            ):
                self._write(file.path, file.table, file.row_groups)
        blocks = _blocks_table(star, clustered, self._file_index, groups, self._num_row_groups)
        self._num_row_groups += len(groups)
        return blocks

    def _write(self, path: str, table: pa.Table, rows_per_group: Sequence[int]) -> None:
        if path not in self._writers:
            partial = partial_of(self._root / path)
            encodings = self._pins.encodings[directory_of(path)]
            writer = open_writer(str(partial), table.schema, encodings)
            self._writers[path] = partial, writer
        start = 0
        for count in rows_per_group:
            rows = table.slice(start, count)
            self._writers[path][1].write_table(rows, row_group_size=max(1, count))
            start += count
        self._written[path] += table.num_rows

    def close(self) -> None:
        """Finish the files and give them their names."""
        for path, (partial, writer) in self._writers.items():
            writer.close()
            partial.replace(self._root / path)


def _bytes_per_block(star: Star) -> float:
    total = star.samples.nbytes + sum(t.nbytes for t in star.groups.values())
    return total / len(star.samples_per_block)


def _blocks_table(
    star: Star,
    clustered: Clustered,
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
        **{num_unique_column(g): c.astype(np.int32) for g, c in star.unique_per_block.items()},
    }
    return pa.table({k: pa.array(v) for k, v in columns.items()}).cast(blocks_schema(star.groups))


def join_blocks(parts: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of `blocks.parquet` of all parts, in training order."""
    return in_training_order(pa.concat_tables(parts))


def in_training_order(blocks: pa.Table) -> pa.Table:
    """Sort the blocks of all parts: training before evaluation, windows in order, then parts."""
    is_evaluation = pa.compute.equal(blocks["split"], EVALUATION)
    keyed = blocks.append_column("is_evaluation", is_evaluation)
    order = [("is_evaluation", "ascending"), ("window", "ascending"), (BLOCK, "ascending")]
    return keyed.sort_by(order).drop_columns(["is_evaluation"]).combine_chunks()
