"""The oracle in a build: seconds of its Beam stages, lookups to files, and bytes of its files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.logs import build_job, job_path, raw_log
from pipelines.beam.jobs import NumberAccesses
from pipelines.beam.runner import run_pipeline
from pipelines.clustering.part import LOOKUPS, lookups_table
from pipelines.oracle.index import index_table
from pipelines.report.sizes import dataset_bytes
from pipelines.shuffle import to_ipc
from pipelines.table.indexes import PartBuilder, add_index
from pipelines.table.segment import sum_bytes
from schemas.arrays import Jagged
from schemas.config.job import OrderConfig
from schemas.dataset.checked_files import CheckedFile
from schemas.dataset.files import describe_file
from schemas.dataset.opened import Segment, open_dataset
from schemas.dataset.order import Order
from schemas.layout import FILE_SHIFT, TRAIN, part_path
from schemas.oracle.next_uses import distinct
from schemas.storage.location import Location

BLOCKS_PER_PART = 64


class _WriteLookups(beam.DoFn):
    """Writes the distinct rows of each block of one part of a table, as `BuildParts` does."""

    def __init__(self, root: Path, batch: int) -> None:
        self.root, self.batch = root, batch

    def process(self, task: tuple[int, int]) -> Iterator[int]:
        table, part = task
        rows = np.load(self.root / f"{table}.npy", mmap_mode="r")
        size = BLOCKS_PER_PART * self.batch
        of_part = np.asarray(rows[part * size : (part + 1) * size], np.int64)
        offsets = np.append(np.arange(0, len(of_part), self.batch), len(of_part))
        unique = distinct(Jagged(of_part, offsets))
        path = self.root / LOOKUPS / str(table) / part_path(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(lookups_table(unique), path, compression="lz4")
        yield 0


def _blocks(_: list[int], num_blocks: int) -> bytes:
    part, index = np.divmod(np.arange(num_blocks), BLOCKS_PER_PART)
    columns = {
        "block": (part << FILE_SHIFT) + index,
        "split": np.full(num_blocks, TRAIN),
        "window": np.zeros(num_blocks, np.int32),
    }
    return to_ipc(pa.table(columns))


def _index(root: Path, num_blocks: int, table: str, num_rows: int) -> int:
    """Index a table in steps of one block; return its entries."""
    paths = sorted((root / "access" / table).iterdir())
    entries = [describe_file(path, path.relative_to(root).as_posix()) for path in paths]
    files = [CheckedFile(root, entry) for entry in entries]
    manifest = SimpleNamespace(tables={table: SimpleNamespace(num_unique_rows=num_rows)})
    segment = SimpleNamespace(manifest=manifest, access_files=lambda _: files)
    order = Order((num_blocks,), 1, 1, OrderConfig())
    return sum(
        index_table(
            Location.parse(root / "index"), cast(Segment, segment), table, order
        ).num_entries
    )


def run_beam_stages(columns: list[np.ndarray], batch: int, root: Path) -> float:
    """Return the seconds from lookups to all files of access lists, edges and index.

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
        written = (
            pipeline
            | "list parts" >> beam.Create(tasks)
            | "spread parts" >> beam.Reshuffle()
            | "look up" >> beam.ParDo(_WriteLookups(root, batch))
            | "all parts" >> beam.combiners.ToList()
        )
        blocks = written | "blocks" >> beam.Map(lambda parts: _blocks(parts, num_blocks))
        names = [str(table) for table in range(len(columns))]
        numbered = blocks | "number" >> NumberAccesses(Location.parse(root), names)
        index = beam.MapTuple(
            lambda table, numbered: _index(root, num_blocks, table, numbered.num_rows)
        )
        return {"entries": numbered | "spread" >> beam.Reshuffle() | "index" >> index}

    start = time.perf_counter()
    run_pipeline(make, [], Location.parse(root), num_tasks=len(columns) - 3)
    return time.perf_counter() - start


BATCH_SAMPLES = 8_192
GOALS = {"kuairand": 0.10, "demo": 0.25, "mind": None}
"""Shipped job -> target for the size of access lists and index, as a share of the dataset."""
GOAL_BYTES_PER_ENTRY = 2.5


def measure_bytes(name: str, shared_data: Path, scratch: Path) -> dict[str, Any] | None:
    """Build a shipped job and index it at `BATCH_SAMPLES`; return None if its log is missing.

    Args:
        name: of the job.
        shared_data: directory of logs.
        scratch: directory to build in.
    """
    log = raw_log(name, shared_data, scratch)
    if log is None:
        return None
    build_job(job_path(name), log, scratch / "dataset")
    dataset = open_dataset(scratch / "dataset")
    block = dataset.job.data.block_samples
    order = dataset.order(-(-BATCH_SAMPLES // block) * block, 1, "none", 0)
    dataset = add_index(dataset, order, PartBuilder(dataset.directory, []))
    index = dataset.index_for(order)
    sizes = {
        part: sum(sum_bytes(list(s.files.values()), f"{part}/") for s in dataset.segments)
        for part in ("access", "edges")
    }
    entries = sum(map(index.num_accesses, dataset.job.data.tables))
    size = dataset_bytes(dataset)
    together = sizes["access"] + index.oracle_bytes
    return {
        "batch_samples": index.entry.batch_samples,
        "entries": entries,
        "dataset": size,
        **sizes,
        "index": index.oracle_bytes,
        "bytes_per_entry": round(together / entries, 3),
        "goal_bytes_per_entry": GOAL_BYTES_PER_ENTRY,
        "share_of_dataset": round(together / size, 4),
        "goal_share": GOALS[name],
        "share_with_edges": round((together + sizes["edges"]) / size, 4),
    }
