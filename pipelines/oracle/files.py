"""Files of the oracle, and scratch files of its external sort."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.atomic_files import atomic_write
from pipelines.clustering.encodings import choose_encodings, open_writer
from schemas.arrays import Jagged, large_list, offsets_of
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

_OPENING = Lock()


def open_array(path: Path, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
    """Map a numpy file.

    Numpy reads the header with `ast.literal_eval`, which ends in "AST constructor recursion depth
    mismatch" now and then where threads of Python 3.11 do so at once; hence one after the other.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no numpy file.
    """
    with _OPENING:
        return np.load(path, mmap_mode=mode, allow_pickle=False)


LISTS_PER_FILE = 1 << 20
"""Access lists, and steps, of one file at most."""
ENTRIES_PER_FILE = 1 << 21
"""Entries after which a file ends: 16 MiB as int64, so that a worker holds all of one."""


def write_file(root: Path, path: str, table: pa.Table) -> None:
    """Write a whole table as one row group, under its final name only when it is whole."""
    with (
        atomic_write(root / path) as partial,
        open_writer(str(partial), table.schema, choose_encodings(table)) as writer,
    ):
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def split_into_files(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
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


def concat_lists(lists: Sequence[NDArray[np.generic]]) -> Jagged:
    """Return separate arrays as one."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.concatenate(lists) if lists else np.empty(0, np.int32)
    return Jagged(flat, offsets_of(lengths))


# Scratch files of an external sort: columns in buckets, each bucket mapped into memory alone.
#
# One file per writer, one record batch per bucket: whoever works on a bucket opens the files of
# all writers and reads its own batch of each, without a copy.

Columns = Mapping[str, NDArray[Any]]


def write_batches(path: Path, batches: Iterable[Columns], schema: pa.Schema) -> None:
    """Write batches of columns as they come; the file has its name when it is whole."""
    with (
        atomic_write(path) as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for columns in batches:
            arrays = [pa.array(columns[name]) for name in schema.names]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def write_buckets(
    path: Path, bucket: NDArray[np.integer], columns: Columns, num_buckets: int
) -> None:
    """Write rows by bucket, those of a bucket in the order in which they stand.

    Args:
        path: the file.
        bucket: (n,) bucket of each row, in [0, num_buckets).
        columns: (n,) arrays by name.
        num_buckets: batches of the file, empty ones too.
    """
    small = bucket.astype(np.uint16 if num_buckets <= 1 << 16 else np.int64)
    order = np.argsort(small, kind="stable")  # of 16 bits: a radix sort
    cuts = np.searchsorted(small[order], np.arange(num_buckets + 1))
    ordered = {name: column[order] for name, column in columns.items()}
    schema = pa.schema([(name, pa.from_numpy_dtype(c.dtype)) for name, c in columns.items()])
    parts = (
        {name: column[cuts[i] : cuts[i + 1]] for name, column in ordered.items()}
        for i in range(num_buckets)
    )
    write_batches(path, parts, schema)


def read_bucket(path: Path, index: int) -> dict[str, NDArray[Any]]:
    """Return one bucket of a file: read-only arrays over mapped memory."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(index)
    return {name: batch[name].to_numpy() for name in batch.schema.names}


def read_bucket_chunks(
    paths: Iterable[Path], index: int, most: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield a bucket of many files, joined to chunks of about `most` rows."""
    held: list[dict[str, NDArray[Any]]] = []
    rows = 0
    for path in paths:
        held.append(read_bucket(path, index))
        rows += len(next(iter(held[-1].values())))
        if rows >= most:
            yield _joined(held)
            held, rows = [], 0
    if held:
        yield _joined(held)


def _joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# Work on tables in rounds: what a round leaves on disk, every task of the next one may read.
#
# plan -> tasks -> results -> tasks -> results -> ... -> value
#
# Tasks of all tables spread over all workers; a table goes on when all tasks of its round are
# done. Tasks write whole files that depend on nothing but the plan, so that one that runs twice,
# or elsewhere, leaves the same bytes.


@dataclass(frozen=True, slots=True)
class Stage:
    """One round.

    Attributes:
        name: of the Beam stage.
        tasks: from a plan and the results of the round before, in the order of its tasks, to the
            tasks; at least one.
        work: does a task.
    """

    name: str
    tasks: Callable[[Any, list[Any]], Iterable[Any]]
    work: Callable[[Any, Any], Any]


def run_stages(plan: Any, rounds: Sequence[Stage]) -> list[Any]:
    """Do all rounds of a plan here, one task after the other; return the results of the last."""
    results: list[Any] = []
    for each in rounds:
        results = [each.work(plan, task) for task in each.tasks(plan, results)]
    return results
