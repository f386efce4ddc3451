"""The oracle end to end: look-ups to access lists and next uses, in files, by the Beam stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.oracle_tables import NUM_ROWS
from pipelines.beam.runner import run_pipeline
from pipelines.beam.tables import NumberAccesses, RunStages
from pipelines.clustering.part import lookups_table
from pipelines.oracle.linking import LINKING_STAGES, LinkingPlan
from pipelines.oracle.numbering import lookups_path
from pipelines.shuffle import encode_tables
from schemas.arrays import Jagged
from schemas.config.job import OrderConfig
from schemas.files import CheckedFile, describe_file
from schemas.layout import FILE_SHIFT, TRAIN, access_path
from schemas.oracle import distinct
from schemas.order import Order

BLOCKS_PER_PART = 64


class _LookUp(beam.DoFn):
    """Finds the distinct rows of each block of one part of a table, as `BuildParts` does."""

    def __init__(self, root: Path, batch: int) -> None:
        self.root, self.batch = root, batch

    def process(self, task: tuple[int, int]) -> Iterator[int]:
        table, part = task
        rows = np.load(self.root / f"{table}.npy", mmap_mode="r")
        size = BLOCKS_PER_PART * self.batch
        mine = np.asarray(rows[part * size : (part + 1) * size], np.int64)
        offsets = np.append(np.arange(0, len(mine), self.batch), len(mine))
        found = distinct(Jagged(mine, offsets), NUM_ROWS[table])
        path = lookups_path(self.root, str(table), part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(lookups_table(found), path, compression="lz4")
        yield 0


def _blocks(_: list[int], num_blocks: int) -> bytes:
    part, index = np.divmod(np.arange(num_blocks), BLOCKS_PER_PART)
    columns = {
        "block": (part << FILE_SHIFT) + index,
        "split": np.full(num_blocks, TRAIN),
        "window": np.zeros(num_blocks, np.int32),
    }
    return encode_tables(pa.table(columns))


def _plan(root: Path, num_blocks: int, table: str, num_rows: int) -> tuple[str, LinkingPlan]:
    files: list[CheckedFile] = []
    while (root / access_path(table, len(files))).exists():
        entry = describe_file(root, access_path(table, len(files)))
        files.append(CheckedFile(root, entry))
    plan = LinkingPlan(
        root=root / "index",
        scratch=root / "scratch",
        order=Order((num_blocks,), 1, 1, OrderConfig()),
        table=table,
        num_numbers=num_rows,
        files=(tuple(files),),
        maps=(),
    )
    return table, plan


def through_beam(columns: list[np.ndarray], batch: int, root: Path) -> float:
    """Return the seconds from look-ups to all files of access lists, edges and index.

    Args:
        columns: for each table the row of each sample.
        batch: samples of a block and of a step.
        root: an empty directory.
    """
    for table, rows in enumerate(columns):
        np.save(root / f"{table}.npy", rows)
    num_blocks = -(-len(columns[0]) // batch)
    num_parts = -(-num_blocks // BLOCKS_PER_PART)
    tasks = [(table, part) for table in range(len(columns)) for part in range(num_parts)]

    def make(pipeline: beam.Pipeline) -> Mapping[str, Any]:
        done = (
            pipeline
            | "list parts" >> beam.Create(tasks)
            | "spread parts" >> beam.Reshuffle()
            | "look up" >> beam.ParDo(_LookUp(root, batch))
            | "all parts" >> beam.combiners.ToList()
        )
        blocks = done | "blocks" >> beam.Map(lambda found: _blocks(found, num_blocks))
        names = [str(table) for table in range(len(columns))]
        numbered = blocks | "number" >> NumberAccesses(root, names, num_parts)
        plans = numbered | "plan" >> beam.MapTuple(lambda t, n: _plan(root, num_blocks, t, n))
        linked = plans | "link" >> RunStages(LINKING_STAGES, spread=True)
        return {"entries": linked | "count" >> beam.MapTuple(lambda _, d: sum(r for *_, r in d))}

    started = time.perf_counter()
    run_pipeline(make, [], root, num_tasks=len(columns) - 3)
    return time.perf_counter() - started
