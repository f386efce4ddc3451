"""Rewrite files to one flat dataset, ordered by session and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.pipelines.clustering.part import ROW_GROUP_BYTES
from presage.pipelines.clustering.star import cluster_chunks
from presage.pipelines.clustering.storage_layout import (
    choose_encodings,
    num_bytes,
    open_writer,
    try_encodings,
)
from presage.pipelines.exchange import ElementRef, ReadElements, TaskResult, Worker
from presage.pipelines.executor import Bundle, TaskOutputs, open_exchange, split_inputs
from presage.pipelines.prepare import holds_in_memory
from presage.pipelines.rewrite.input import BATCH_ROWS, decoded, encoded, ordering
from presage.pipelines.runner_options import LocalOptions
from presage.pipelines.samples.sql import LIST_INDEX
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.sources.raw_rows import ORIGIN
from presage.pipelines.stages import REJECTS, SAMPLES, BuildContext
from presage.pipelines.table.expand import ContentHash, content_hash
from presage.schemas.arrays import take_rows
from presage.schemas.dataset.files import sync_file
from presage.schemas.layout import part_path

KEY, TIME = "_key", "_time"
"""Temporary columns that order the rows."""
ORDER_SHARE = 0.01
"""Rows of a flat file leave the order of sessions if that saves more than this share of bytes."""


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One written file."""

    num_bytes: int
    num_sessions: int
    content: ContentHash


@dataclass(frozen=True, slots=True)
class FlatStage:
    """The two stages of a flat rewrite: rows to parts by session, parts to files."""

    context: BuildContext
    schema: pa.Schema
    session: str
    time: str | None

    def samples(self, table: pa.Table) -> Tuples:
        """Return rows with the columns that determine their part and their order."""
        return Tuples(with_order(decoded(table), self.session, self.time), {}, {})

    def write(self, part: int, samples: Iterable[Tuples]) -> FlatPart:
        """Write the file of one part in row groups of about 64 MiB; flush it to disk.

        Rows are clustered by session, unless the order of time or of the input takes less.
        """
        num_sessions, content = 0, ContentHash()
        writer: pq.ParquetWriter | None = None
        path = self.context.segment_root / part_path(part)
        with path.new_file() as partial, ExitStack() as opened:
            order = None
            for clustered in cluster_chunks(samples, self.context.data, shuffled=False):
                table = clustered.samples.samples
                if writer is None:
                    order = self._smallest_order(table)
                rows = ordered(table, order).select(self.schema.names)
                stored = encoded(rows, self.schema)
                per_group = max(1, int(ROW_GROUP_BYTES * rows.num_rows / max(1, stored.nbytes)))
                if writer is None:
                    encodings = choose_encodings(stored.slice(0, per_group))
                    writer = opened.enter_context(open_writer(partial, self.schema, encodings))
                for start in range(0, rows.num_rows, per_group):
                    writer.write_table(stored.slice(start, per_group), row_group_size=per_group)
                num_sessions += clustered.num_sessions
                batches = range(0, rows.num_rows, BATCH_ROWS)
                content += content_hash(rows.slice(start, BATCH_ROWS) for start in batches)
            opened.close()
            sync_file(partial)
            num_bytes = partial.stat().st_size
        return FlatPart(num_bytes, num_sessions, content)

    def _smallest_order(self, table: pa.Table) -> str | None:
        """Return the column by which rows in the order of sessions are to be sorted, or None."""
        sizes = {
            order: num_bytes(try_encodings(encoded(ordered(table, order), self.schema)))
            for order in (None, TIME, ORIGIN)
        }
        best = min(sizes, key=sizes.__getitem__)
        return best if sizes[best] < (1 - ORDER_SHARE) * sizes[None] else None


def ordered(table: pa.Table, column: str | None) -> pa.Table:
    """Return rows in the order of a column of integers; ties, or all if None, stay in order."""
    if column is None:
        return table
    return take_rows(table, np.argsort(table[column].to_numpy(), kind="stable"))


def run_flat(stage: FlatStage, options: LocalOptions) -> Mapping[str, list[Any]]:
    """Rewrite all rows on local workers; return `parts` and `rejects`."""
    context = stage.context
    in_memory = holds_in_memory(options, sum(f.num_bytes for f in context.listing))
    with open_exchange(context, options.num_workers, in_memory) as exchange:
        bundles, _ = split_inputs(context, exchange)
        exchange.run("map", _send_rows, bundles, stage)
        samples = exchange.take(SAMPLES)
        tasks = ((part, samples.pop(part)) for part in list(samples))
        parts = exchange.run("part", _write_part, tasks, stage)
        rejects = [rows for sent in exchange.take(REJECTS).values() for rows in ReadElements(sent)]
    return {"parts": parts, "rejects": rejects}


def _send_rows(worker: Worker, bundle: Bundle, stage: FlatStage) -> TaskResult:
    outputs = TaskOutputs(worker)
    for split in bundle:
        for table in outputs.read(split):
            outputs.add_tuples(stage.samples(table))
    return outputs.result()


def _write_part(
    worker: Worker, samples: tuple[int, Sequence[ElementRef]], stage: FlatStage
) -> TaskResult:
    part, sent = samples
    return TaskResult(replace(stage, context=worker.context).write(part, ReadElements(sent)))


def with_order(table: pa.Table, session: str, time: str | None) -> pa.Table:
    """Add the columns that `cluster` sorts by; rows without a key form one session."""
    times = ordering(table[time]) if time else pa.array(np.zeros(table.num_rows, np.int64))
    index = pa.array(np.zeros(table.num_rows, np.int32))
    keyed = table.append_column(KEY, table[session]).append_column(TIME, times)
    return keyed.append_column(LIST_INDEX, index)
