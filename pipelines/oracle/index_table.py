"""One table's part of an index: at once where it fits a worker, a plan where it does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipelines.oracle.files import cut_files, jagged, write_index_file
from pipelines.oracle.linking import LinkingPlan, step_lengths
from pipelines.oracle.stitching import stitch_files
from schemas.absent import looks_up
from schemas.accesses import TableAccesses
from schemas.checked import CheckedFile
from schemas.dataset import Dataset, Segment
from schemas.layout import access_path
from schemas.oracle import next_use
from schemas.order import Order

SCRATCH = ".links"
"""Directory below an index being built for what the rounds leave."""


@dataclass(frozen=True, slots=True)
class TableTotals:
    """What the manifest says of one table's part of the index."""

    table: str
    num_rows: int
    num_entries: int


def totals_of(table: str, plan: LinkingPlan, entries: Iterable[int]) -> TableTotals:
    """Return the totals of a table that was linked in rounds."""
    return TableTotals(table, plan.num_numbers, sum(entries))


def index_table(
    root: Path, dataset: Dataset, table: str, order: Order, worker_entries: int
) -> tuple[int, int] | LinkingPlan:
    """Link the entries of a table that fits a worker, or plan how to link one that does not.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.
        worker_entries: entries, over all epochs, that fit.

    Returns:
        The number of distinct rows and of entries over all steps, or a plan.
    """
    files = [access_files(dataset, segment, table) for segment in dataset.segments]
    entries = sum(file.num_values("gaps") for each in files for file in each)
    if entries * order.epochs <= worker_entries:
        return write_index(root, dataset, table, order)
    scratch = root / SCRATCH
    edges = [
        segment.edge_files(table) if each else []
        for segment, each in zip(dataset.segments, files, strict=True)
    ]
    num_numbers, maps = sum(file.num_rows for each in edges for file in each), list[Path]()
    if sum(map(bool, edges)) > 1:
        maps = [scratch / table / f"map-{segment}" for segment in range(len(edges))]
        num_numbers = stitch_files(edges, maps, max(1, worker_entries // 2))
    return LinkingPlan(
        root=root,
        scratch=scratch,
        order=order,
        table=table,
        num_numbers=num_numbers,
        files=tuple(map(tuple, files)),
        maps=tuple(maps),
    )


def access_files(dataset: Dataset, segment: Segment, table: str) -> list[CheckedFile]:
    """Return a segment's files of access lists, none when it looks nothing up in the table."""
    found: list[CheckedFile] = []
    if looks_up(dataset, segment, table):
        found.append(segment.file(access_path(table, 0)))
    while found and (path := access_path(table, len(found))) in segment.files:
        found.append(segment.file(path))
    return found


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
    bounds = cut_files(step_lengths(order, accesses.list_lengths))
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        write_index_file(root, table, file_index, start, jagged(distances[start:end]))
    return len(accesses.rows), sum(map(len, distances))
