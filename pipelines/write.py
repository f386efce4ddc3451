"""Write one part of a segment: the same row groups in every table, whole blocks in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.cluster import Clustered
from pipelines.encodings import Encodings, open_writer
from pipelines.pins import Pins
from pipelines.star import Star
from pipelines.stored import directory_of, stored_tables
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


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive blocks of one split and window that share a row group."""

    first: int
    end: int


def row_groups_of(
    ranges: NDArray[np.int64], bytes_per_block: float, limit: int = ROW_GROUP_BYTES
) -> list[BlockRange]:
    """Cut blocks into row groups.

    Args:
        ranges: (num_blocks,) the (split, window) number of each block, ascending.
        bytes_per_block: mean uncompressed bytes of a block over all tables.
        limit: uncompressed bytes of a row group.
    """
    per_group = max(1, int(limit // max(1.0, bytes_per_block)))
    cuts = np.flatnonzero(np.diff(ranges, prepend=-1))
    groups: list[BlockRange] = []
    for start, end in zip(cuts, [*cuts[1:], len(ranges)], strict=True):
        groups.extend(
            BlockRange(int(a), int(min(a + per_group, end))) for a in range(start, end, per_group)
        )
    return groups


def write_table(
    path: Path, table: pa.Table, rows_per_group: Sequence[int], encodings: Encodings
) -> None:
    """Write a table with the given row groups, under its final name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with open_writer(str(partial), table.schema, encodings) as writer:
        start = 0
        for count in rows_per_group:
            writer.write_table(table.slice(start, count), row_group_size=max(1, count))
            start += count
    partial.replace(path)


def write_part(
    root: Path,
    star: Star,
    clustered: Clustered,
    file_index: int,
    pins: Pins,
) -> pa.Table:
    """Write the samples and groups of one part.

    Args:
        root: directory of the segment being built.
        star: the part's tables.
        clustered: the part's samples, for splits and windows.
        file_index: number of the part.
        pins: how its tables are laid out and encoded.

    Returns:
        The part's rows of `blocks.parquet`.
    """
    num_blocks = len(star.samples_per_block)
    first_sample = offsets_of(star.samples_per_block)[:-1]
    evaluation = clustered.is_evaluation[first_sample]
    window = clustered.window[first_sample]
    ranges = np.cumsum(
        (np.diff(evaluation, prepend=False) != 0) | (np.diff(window, prepend=0) != 0)
    )
    total = star.samples.nbytes + sum(t.nbytes for t in star.groups.values())
    groups = row_groups_of(ranges, total / num_blocks)
    counts = [int(star.samples_per_block[g.first : g.end].sum()) for g in groups]
    path = samples_path(file_index)
    write_table(root / path, star.samples, counts, pins.encodings[directory_of(path)])
    for name in star.groups:
        unique = [int(star.unique_per_block[name][g.first : g.end].sum()) for g in groups]
        for file in stored_tables(name, star, pins.layouts[name], unique, file_index):
            encodings = pins.encodings[directory_of(file.path)]
            write_table(root / file.path, file.table, file.row_groups, encodings)
    lengths = [g.end - g.first for g in groups]
    sessions = np.add.reduceat(clustered.starts_session.astype(np.int32), first_sample)
    columns = {
        BLOCK: (np.int64(file_index) << np.int64(FILE_SHIFT)) + np.arange(num_blocks),
        "split": np.where(evaluation, EVALUATION, TRAIN),
        "window": window,
        "file": np.full(num_blocks, file_index, np.int32),
        "row_group": np.repeat(np.arange(len(groups), dtype=np.int32), lengths),
        "num_samples": star.samples_per_block.astype(np.int32),
        "num_sessions": sessions,
        **{num_unique_column(g): c.astype(np.int32) for g, c in star.unique_per_block.items()},
    }
    return pa.table({k: pa.array(v) for k, v in columns.items()}).cast(blocks_schema(star.groups))


def in_training_order(blocks: pa.Table) -> pa.Table:
    """Sort the blocks of all parts: training before evaluation, windows in order, then parts."""
    is_evaluation = pa.compute.equal(blocks["split"], EVALUATION)
    keyed = blocks.append_column("is_evaluation", is_evaluation)
    order = [("is_evaluation", "ascending"), ("window", "ascending"), (BLOCK, "ascending")]
    return keyed.sort_by(order).drop_columns(["is_evaluation"]).combine_chunks()
