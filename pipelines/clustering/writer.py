"""Write one part of a segment: the same row groups in every table, whole blocks in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.atomic_files import partial_path
from pipelines.clustering.dedup import (
    Layouts,
    Star,
    choose_layouts,
    directory_of,
    stored_tables,
    to_star,
)
from pipelines.clustering.encodings import TRIAL_ROWS, Encodings, choose_encodings, open_writer
from pipelines.clustering.order import Clustered, cluster, sort_keys
from pipelines.partition import hash_session_keys
from pipelines.samples.tuples import Tuples, compact, join
from schemas.arrays import offsets_of
from schemas.config.job import DataConfig
from schemas.fitted import FittedValues
from schemas.layout import (
    BLOCK,
    EVALUATION,
    FILE_SHIFT,
    TRAIN,
    blocks_schema,
    num_unique_column,
    samples_path,
)

# What all parts of a segment have in common, learned from the sessions of one of them.
#
# Looking at a few whole sessions once is much cheaper than in every part, and parts are equal
# ranges of a hash: what suits one suits all. The samples are chosen by the hash of their session,
# so that workers, files and retries do not change the choice.

LAYOUT_SAMPLES = TRIAL_ROWS
"""Samples that are looked at, about."""


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """What is the same in all parts of a segment.

    Attributes:
        layouts: group to what its tuples share.
        encodings: directory of the segment (`samples`, `groups/user`) to how its files are written.
        num_parts: parts of the segment.
    """

    layouts: Layouts
    encodings: Mapping[str, Encodings]
    num_parts: int = 1


def choose_segment_layout(
    parts: Iterable[Tuples],
    data: DataConfig,
    learned: FittedValues | None = None,
    num_parts: int = 1,
) -> SegmentLayout:
    """Learn from the samples of one part, in any order.

    Args:
        parts: all samples of the part's sessions, at least one; gone through twice.
        data: the job's data section.
        learned: what transforms learned.
        num_parts: parts of the segment.
    """
    star = to_star(cluster(join(sample_sessions(parts, data)), data), 0, data, learned)
    layouts = choose_layouts(star, data.storage)
    encodings = {name: choose_encodings(table) for name, table in iter_tables(star, layouts)}
    return SegmentLayout(layouts, encodings, num_parts)


def iter_tables(star: Star, layouts: Layouts) -> Iterator[tuple[str, pa.Table]]:
    """Yield the tables of a part by directory as they are stored, samples first."""
    yield directory_of(samples_path(0)), star.samples
    for group, layout in layouts.items():
        for file in stored_tables(group, star, layout, [star.groups[group].num_rows], 0):
            yield directory_of(file.path), file.table


def sample_sessions(
    parts: Iterable[Tuples], data: DataConfig, limit: int = LAYOUT_SAMPLES
) -> list[Tuples]:
    """Return the sessions with the smallest hashes, of about `limit` samples or more.

    A last session that would make it twice as many is cut where it has that many.

    Args:
        parts: samples in any order; gone through twice.
        data: names the session key.
        limit: samples.
    """
    keys = [sort_keys(p, data) for p in parts]
    hashes = [hash_session_keys(k["key"]) for k in keys]
    joined = np.sort(np.concatenate(hashes))
    largest = joined[min(limit, len(joined)) - 1]
    mine = [np.flatnonzero(h <= largest) for h in hashes]
    if sum(map(len, mine)) > 2 * limit:
        mine = _first(keys, hashes, mine, 2 * limit)
    return [compact(p.take(rows)) for p, rows in zip(parts, mine, strict=True) if len(rows)]


def _first(
    keys: Sequence[pa.Table],
    hashes: Sequence[NDArray[np.uint64]],
    mine: Sequence[NDArray[np.int64]],
    limit: int,
) -> list[NDArray[np.int64]]:
    """Return the rows of each part that come first by hash, time and place in the input."""
    part = np.repeat(np.arange(len(mine)), [len(rows) for rows in mine])
    columns = [
        np.concatenate([k[c].to_numpy()[rows] for k, rows in zip(keys, mine, strict=True)])
        for c in ("index", "origin", "time")
    ]
    hashed = np.concatenate([h[rows] for h, rows in zip(hashes, mine, strict=True)])
    first = np.sort(np.lexsort((*columns, hashed))[:limit])
    rows = np.concatenate(mine)
    return [rows[first[part[first] == index]] for index in range(len(mine))]


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


def plan_row_groups(
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

    def __init__(self, root: Path, file_index: int, pins: SegmentLayout) -> None:
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
        groups = plan_row_groups(
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
            partial = partial_path(self._root / path)
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


def merge_blocks(parts: Iterable[pa.Table]) -> pa.Table:
    """Return the rows of `blocks.parquet` of all parts, in training order."""
    return in_training_order(pa.concat_tables(parts))


def in_training_order(blocks: pa.Table) -> pa.Table:
    """Sort the blocks of all parts: training before evaluation, windows in order, then parts."""
    is_evaluation = pa.compute.equal(blocks["split"], EVALUATION)
    keyed = blocks.append_column("is_evaluation", is_evaluation)
    order = [("is_evaluation", "ascending"), ("window", "ascending"), (BLOCK, "ascending")]
    return keyed.sort_by(order).drop_columns(["is_evaluation"]).combine_chunks()
