"""Beam stages that number the rows of every table once all parts are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.compute as pc

from pipelines.beam.ipc import from_bytes
from pipelines.beam.memory import keep_freed_memory
from pipelines.oracle.numbering import NUMBERING, WORKER_ENTRIES, number_table
from pipelines.oracle.rounds import InRounds
from pipelines.parts.write import join_blocks
from schemas.layout import BLOCK, TRAIN

SPREAD_PARTS = 4
"""Parts from which on the rounds of large tables spread over workers."""

_DONE, _PLANS = "done", "plans"


class _NumberTable(beam.DoFn):
    """Numbers a small table; plans the rounds of a large one."""

    def __init__(self, root: Path, worker_entries: int) -> None:
        self.root, self.worker_entries = root, worker_entries

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, table: str, parts: list[bytes]) -> Iterator[Any]:
        if parts:
            blocks = join_blocks(from_bytes(part) for part in parts)
            training = blocks.filter(pc.equal(blocks["split"], TRAIN))
            made = number_table(self.root, table, training[BLOCK].to_numpy(), self.worker_entries)
            if isinstance(made, int):
                yield beam.pvalue.TaggedOutput(_DONE, (table, made))
            else:
                yield table, made


class NumberAccesses(beam.PTransform):
    """From blocks of all parts, as bytes, to (table, distinct rows) of tables that are numbered."""

    def __init__(self, root: Path, tables: Iterable[str], num_parts: int) -> None:
        """Name the tables.

        Args:
            root: directory of the segment being built.
            tables: names.
            num_parts: parts of the segment.
        """
        super().__init__()
        self.spread = num_parts >= SPREAD_PARTS
        self.root, self.tables = root, sorted(tables)

    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        """Number each table at once where it fits a worker, in rounds where it does not."""
        joined = input_or_inputs | "all blocks" >> beam.combiners.ToList()
        number = beam.ParDo(
            _NumberTable(self.root, WORKER_ENTRIES), beam.pvalue.AsSingleton(joined)
        )
        made = (
            input_or_inputs.pipeline
            | "list tables" >> beam.Create(self.tables)
            | "spread tables" >> beam.Reshuffle()
            | "number tables" >> number.with_outputs(_DONE, main=_PLANS)
        )
        counted = (
            made[_PLANS]
            | "large tables" >> InRounds(NUMBERING, self.spread)
            | "count rows" >> beam.MapTuple(_total)
        )
        return (made[_DONE], counted) | "join tables" >> beam.Flatten()


def _total(table: str, done: Iterable[tuple[Any, int, int]]) -> tuple[str, int]:
    return table, sum(result for _, _, result in done)
