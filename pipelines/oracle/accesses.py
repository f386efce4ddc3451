"""The oracle's files: access lists and edges of a segment, the index of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.parts.encodings import choose, open_writer
from pipelines.parts.part import LOOKUPS
from pipelines.segments.partial import whole
from schemas.accesses import TableAccesses, indexed_steps
from schemas.columns import jagged_of, large_list
from schemas.dataset import Dataset
from schemas.jagged import Jagged, concat
from schemas.layout import (
    BLOCK,
    FILE_SHIFT,
    access_path,
    access_schema,
    edges_path,
    index_path,
    index_schema,
    part_name,
)
from schemas.oracle import first_and_last, next_use, number_by_first_use, to_gaps
from schemas.order import Order
from schemas.plan import plan_ttl, summarize

LISTS_PER_FILE = 1 << 20
"""Access lists, and steps, of one file."""


@dataclass(frozen=True, slots=True)
class TableReport:
    """What `oracle --json` says of one table under a plan."""

    num_lookups: int
    num_lookups_dedup: int
    num_accesses: int
    num_unique_rows: int
    fetched_rows: int
    hit_rate: float
    peak_cache_rows: int


def write_file(root: Path, path: str, table: pa.Table) -> None:
    """Write a whole table as one row group, under its final name only when it is whole."""
    with (
        whole(root / path) as partial,
        open_writer(str(partial), table.schema, choose(table)) as writer,
    ):
        writer.write_table(table, row_group_size=max(1, table.num_rows))


def read_lookups(root: Path, table: str, blocks: NDArray[np.int64]) -> Jagged:
    """Return the rows that each of some blocks looks up, in the order of the blocks.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: (n,) block ids.
    """
    files = blocks >> FILE_SHIFT
    parts: dict[int, Jagged] = {}
    for file_index in np.unique(files).tolist():
        path = root / LOOKUPS / table / part_name(file_index)
        parts[file_index] = jagged_of(pq.read_table(path, memory_map=True)["rows"])
    starts = dict(zip(parts, np.cumsum([0, *(p.num_rows for p in parts.values())]), strict=False))
    if not parts:
        return Jagged(np.empty(0, np.int64), np.zeros(1, np.int64))
    first = np.array([starts[f] for f in files.tolist()], np.int64)
    return concat(list(parts.values())).take(first + (blocks & ((1 << FILE_SHIFT) - 1)))


def write_access(root: Path, table: str, blocks: NDArray[np.int64]) -> int:
    """Number one table's rows by first use; write its access lists and edges.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: ids of the training blocks, in training order.

    Returns:
        The number of distinct rows.
    """
    numbers, rows = number_by_first_use(read_lookups(root, table, blocks))
    gaps = Jagged(to_gaps(numbers), numbers.offsets)
    for file_index, start in enumerate(range(0, max(1, len(blocks)), LISTS_PER_FILE)):
        part = gaps.take(np.arange(start, min(start + LISTS_PER_FILE, len(blocks))))
        columns = {
            BLOCK: pa.array(blocks[start : start + LISTS_PER_FILE]),
            "gaps": large_list(part.values, part.offsets),
        }
        write_file(root, access_path(table, file_index), pa.table(columns).cast(access_schema()))
    first, last = first_and_last(numbers, len(rows))
    edges = {"row": rows, "first_position": first, "last_position": last}
    write_file(root, edges_path(table), pa.table({k: pa.array(v) for k, v in edges.items()}))
    return len(rows)


def write_index(root: Path, dataset: Dataset, table: str, order: Order) -> tuple[int, int]:
    """Link each entry of each step to its next use; write one table's part of the index.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.

    Returns:
        The number of distinct rows, and of entries over all steps.
    """
    accesses = TableAccesses(dataset, table, order)
    distances = next_use(list(accesses.steps()), len(accesses.rows))
    for file_index, start in enumerate(range(0, max(1, len(distances)), LISTS_PER_FILE)):
        part = distances[start : start + LISTS_PER_FILE]
        offsets = np.cumsum([0, *(len(d) for d in part)])
        flat = np.concatenate([*part, np.empty(0, np.int32)]).astype(np.int32)
        columns = {
            "step": pa.array(np.arange(start, start + len(part), dtype=np.int64)),
            "distances": large_list(flat, offsets.astype(np.int64)),
        }
        write_file(root, index_path(table, file_index), pa.table(columns).cast(index_schema()))
    return len(accesses.rows), sum(len(d) for d in distances)


def report_table(
    dataset: Dataset, table: str, order: Order, lookahead: int, prefetch_steps: int,
    cache_rows: int | None,
) -> TableReport:  # fmt: skip
    """Run the plan over one table and add up what it does.

    Raises:
        PlanError: the cache is too small.
    """
    index = dataset.index_for(order)
    plan = plan_ttl(indexed_steps(dataset, index, table, order), lookahead, cache_rows)
    summary = summarize(plan, prefetch_steps)
    manifests = [s.manifest for s in dataset.segments]  # older ones may lack a table
    counts = [m.tables[table] for m in manifests if table in m.tables]
    return TableReport(
        num_lookups=order.epochs * sum(c.num_lookups for c in counts),
        num_lookups_dedup=order.epochs * sum(c.num_lookups_dedup for c in counts),
        num_accesses=summary.num_accesses,
        num_unique_rows=index.manifest.num_rows[table],
        fetched_rows=summary.fetched_rows,
        hit_rate=summary.hit_rate,
        peak_cache_rows=summary.peak_cache_rows,
    )


def flat_accesses(dataset: Dataset, table: str, order: Order) -> NDArray[np.int64]:
    """Return the numbers of all entries of all steps, in order: a trace for cache curves."""
    steps: Sequence[NDArray[np.int64]] = list(TableAccesses(dataset, table, order).steps())
    return np.concatenate([*steps, np.empty(0, np.int64)])
