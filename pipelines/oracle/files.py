"""The oracle's files as they lie on disk: each one piece of a table that fits a worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.encodings import choose, open_writer
from pipelines.segments.partial import whole
from schemas.columns import large_list
from schemas.jagged import Jagged, offsets_of
from schemas.layout import (
    BLOCK,
    EDGES_SCHEMA,
    access_path,
    access_schema,
    edges_path,
    index_path,
    index_schema,
)
from schemas.oracle import to_gaps

LISTS_PER_FILE = 1 << 20
"""Access lists, and steps, of one file at most."""
ENTRIES_PER_FILE = 1 << 21
"""Entries after which a file ends: 16 MiB as int64, so that a worker holds all of one."""


def write_file(root: Path, path: str, table: pa.Table) -> None:
    """Write a whole table as one row group, under its final name only when it is whole."""
    with (
        whole(root / path) as partial,
        open_writer(str(partial), table.schema, choose(table)) as writer,
    ):
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def cut_files(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Cut consecutive lists into files: a function of their lengths alone.

    Args:
        lengths: (num_lists,) entries of each list.

    Returns:
        (num_files + 1,) first list of each file and the number of lists; at least one file.
    """
    files = offsets_of(lengths)[:-1] // ENTRIES_PER_FILE
    blocks = np.arange(len(lengths)) // LISTS_PER_FILE
    starts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
    return np.array([0, *starts.tolist(), len(lengths)], np.int64)


def write_access_file(
    root: Path, table: str, file_index: int, blocks: NDArray[np.int64], numbers: Jagged
) -> None:
    """Write the access lists of consecutive training blocks.

    Args:
        root: directory of the segment being built.
        table: table name.
        file_index: number of the file.
        blocks: ids of the blocks.
        numbers: for each block its ascending numbers.
    """
    gaps = large_list(to_gaps(numbers), numbers.offsets)
    columns = {BLOCK: pa.array(blocks, pa.int64()), "gaps": gaps}
    write_file(root, access_path(table, file_index), pa.table(columns).cast(access_schema()))


def write_edges_file(
    root: Path,
    table: str,
    file_index: int,
    row: NDArray[np.int64],
    first: NDArray[np.integer],
    last: NDArray[np.integer],
) -> None:
    """Write the rows, in order of their numbers, that an access list file is the first to use."""
    columns = {"row": row, "first_position": first, "last_position": last}
    edges = pa.table({name: pa.array(column) for name, column in columns.items()})
    write_file(root, edges_path(table, file_index), edges.cast(EDGES_SCHEMA))


def write_index_file(
    root: Path, table: str, file_index: int, first_step: int, distances: Jagged
) -> None:
    """Write the next-use distances of consecutive steps.

    Args:
        root: directory of the index being built.
        table: table name.
        file_index: number of the file.
        first_step: the first of the steps.
        distances: one list per step.
    """
    columns = {
        "step": pa.array(np.arange(first_step, first_step + distances.num_rows, dtype=np.int64)),
        "distances": large_list(distances.values.astype(np.int32), distances.offsets),
    }
    write_file(root, index_path(table, file_index), pa.table(columns).cast(index_schema()))


def jagged(lists: Sequence[NDArray[np.generic]]) -> Jagged:
    """Return separate arrays as one."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.concatenate(lists) if lists else np.empty(0, np.int32)
    return Jagged(flat, offsets_of(lengths))
