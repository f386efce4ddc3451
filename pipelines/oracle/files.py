"""Files of the oracle, scratch files of its external sort, and the stages that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.clustering.layout import Encodings, open_writer
from pipelines.scratch import atomic_write
from schemas.arrays import Jagged, large_list, offsets_of
from schemas.layout import (
    BLOCK,
    EDGES_SCHEMA,
    USES_SCHEMA,
    access_path,
    access_schema,
    edges_path,
    index_path,
    index_schema,
    uses_path,
)
from schemas.oracle import to_gaps
from schemas.storage import Location

LISTS_PER_FILE = 1 << 20
"""Maximum number of access lists, or steps, of a file."""
ENTRIES_PER_FILE = 1 << 21
"""Entries after which a file ends: 16 MiB as int64, so that a worker can hold a file."""


ENCODINGS = Encodings(
    {
        BLOCK: "DELTA_BINARY_PACKED",
        "step": "DELTA_BINARY_PACKED",
        "first_position": "DELTA_BINARY_PACKED",
        "last_position": "BYTE_STREAM_SPLIT",
        "first_step": "BYTE_STREAM_SPLIT",
        "last_step": "BYTE_STREAM_SPLIT",
        "row": "BYTE_STREAM_SPLIT",
        "gaps.list.element": "BYTE_STREAM_SPLIT",
        "distances.list.element": "BYTE_STREAM_SPLIT",
    }
)
"""Encodings of all files, by column path."""


def write_file(root: Location | Path, path: str, table: pa.Table) -> None:
    """Write a table as one row group; the file gets its final name when it is complete."""
    with (
        (Location.parse(root) / path).new_file() as partial,
        open_writer(partial, table.schema, ENCODINGS) as writer,
    ):
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def split_into_files(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Assign consecutive lists to files by their lengths, (num_lists,).

    Returns:
        (num_files + 1,) the first list of each file, and the number of lists; at least one file.
    """
    files = offsets_of(lengths)[:-1] // ENTRIES_PER_FILE
    blocks = np.arange(len(lengths)) // LISTS_PER_FILE
    starts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
    return np.array([0, *starts.tolist(), len(lengths)], np.int64)


def write_access_file(
    root: Location | Path, table: str, file_index: int, blocks: NDArray[np.int64], numbers: Jagged
) -> None:
    """Write the access lists of consecutive training blocks; `numbers` ascend in each block."""
    gaps = large_list(to_gaps(numbers), numbers.offsets)
    columns = {BLOCK: pa.array(blocks, pa.int64()), "gaps": gaps}
    write_file(root, access_path(table, file_index), pa.table(columns).cast(access_schema()))


def write_edges_file(
    root: Location | Path,
    table: str,
    file_index: int,
    row: NDArray[np.int64],
    first: NDArray[np.integer],
    last: NDArray[np.integer],
) -> None:
    """Write the rows that an access list file is the first to use, in order of their numbers."""
    columns = {"row": row, "first_position": first, "last_position": last}
    edges = pa.table({name: pa.array(column) for name, column in columns.items()})
    write_file(root, edges_path(table, file_index), edges.cast(EDGES_SCHEMA))


def write_index_file(
    root: Path, table: str, file_index: int, first_step: int, distances: Jagged
) -> None:
    """Write the next-use distances of consecutive steps, one list per step."""
    columns = {
        "step": pa.array(np.arange(first_step, first_step + distances.num_rows, dtype=np.int64)),
        "distances": large_list(distances.values.astype(np.int32), distances.offsets),
    }
    write_file(root, index_path(table, file_index), pa.table(columns).cast(index_schema()))


def write_uses_file(
    root: Path,
    table: str,
    epoch: int,
    file_index: int,
    first: NDArray[np.int32],
    last: NDArray[np.int32],
) -> None:
    """Write the first and last step in a shuffled epoch that use consecutive numbers."""
    uses = pa.table({"first_step": pa.array(first), "last_step": pa.array(last)})
    write_file(root, uses_path(table, epoch, file_index), uses.cast(USES_SCHEMA))


def concat_lists(lists: Sequence[NDArray[np.generic]]) -> Jagged:
    """Return separate arrays as one jagged array."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.concatenate(lists) if lists else np.empty(0, np.int32)
    return Jagged(flat, offsets_of(lengths))


# Scratch files of an external sort: each task of a stage writes one file with one record batch per
# bucket; a task of the next stage maps its bucket of all files into memory, without a copy.

Columns = Mapping[str, NDArray[Any]]

_OPENING = Lock()


def open_array(path: Path, mode: Literal["r", "r+"] = "r") -> NDArray[Any]:
    """Map a numpy file.

    Files are opened one at a time: numpy parses the header with `ast.literal_eval`, which sometimes
    fails with "AST constructor recursion depth mismatch" in concurrent threads of Python 3.11.
    """
    with _OPENING:
        return np.load(path, mmap_mode=mode, allow_pickle=False)


def write_batches(path: Path, batches: Iterable[Columns], schema: pa.Schema) -> None:
    """Write batches of columns; the file gets its final name when it is complete."""
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
    """Write rows by bucket; the rows of a bucket keep their order.

    Args:
        path: the file.
        bucket: (n,) bucket of each row, in [0, num_buckets).
        columns: (n,) arrays by name.
        num_buckets: number of record batches, including empty ones.
    """
    narrow = bucket.astype(np.uint16 if num_buckets <= 1 << 16 else np.int64)
    order = np.argsort(narrow, kind="stable")  # 16 bits: a radix sort
    bounds = np.searchsorted(narrow[order], np.arange(num_buckets + 1))
    ordered = {name: column[order] for name, column in columns.items()}
    schema = pa.schema([(name, pa.from_numpy_dtype(c.dtype)) for name, c in columns.items()])
    batches = (
        {name: column[bounds[i] : bounds[i + 1]] for name, column in ordered.items()}
        for i in range(num_buckets)
    )
    write_batches(path, batches, schema)


def read_bucket(path: Path, index: int) -> dict[str, NDArray[Any]]:
    """Return one bucket of a file as read-only arrays over mapped memory."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(index)
    return {name: batch[name].to_numpy() for name in batch.schema.names}


def read_bucket_chunks(
    paths: Iterable[Path], index: int, num_rows: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield a bucket of many files in chunks of about `num_rows` rows."""
    parts: list[dict[str, NDArray[Any]]] = []
    rows = 0
    for path in paths:
        parts.append(read_bucket(path, index))
        rows += len(next(iter(parts[-1].values())))
        if rows >= num_rows:
            yield _concat(parts)
            parts, rows = [], 0
    if parts:
        yield _concat(parts)


def _concat(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of work on a table.

    A stage starts when all tasks of the previous stage are done, and its tasks may read the files
    that those wrote. A task writes complete files that depend on the plan only, so a task that runs
    twice, or on another worker, writes the same bytes.

    Attributes:
        name: name of the Beam step.
        tasks: returns the tasks, at least one, from the plan and the results of the previous stage
            in the order of its tasks.
        work: runs a task and returns its result.
    """

    name: str
    tasks: Callable[[Any, list[Any]], Iterable[Any]]
    work: Callable[[Any, Any], Any]


def run_stages(plan: Any, stages: Sequence[Stage]) -> list[Any]:
    """Run all stages of a plan in this process; return the results of the last one."""
    results: list[Any] = []
    for stage in stages:
        results = [stage.work(plan, task) for task in stage.tasks(plan, results)]
    return results
