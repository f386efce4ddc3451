"""A step that counts rows and reports rejects."""

from __future__ import annotations

from collections.abc import Iterator

import apache_beam as beam
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from pipelines.build_context import BuildContext
from pipelines.stages import REJECTS, Outputs
from pipelines.transforms.fit import FITTED
from pipelines.workers import keep_freed_memory
from schemas.errors import SchemaError

EVENTS = "events"


def tagged(outputs: Outputs) -> Iterator[pvalue.TaggedOutput]:
    """Yield what stages have produced beside their main results."""
    partials = [(key, each) for key, several in outputs.partials.items() for each in several]
    for tag, values in (
        (REJECTS, outputs.rejects),
        (FITTED, partials),
        (EVENTS, outputs.events),
    ):
        for value in values:
            yield pvalue.TaggedOutput(tag, value)


class Counted(beam.DoFn):
    """DoFn with the counters `in-rows, in-bytes, out-rows, out-bytes`."""

    def __init__(self, context: BuildContext, label: str) -> None:
        self.context = context
        self.counters = {
            name: Metrics.counter(label, name)
            for name in ("in-rows", "in-bytes", "out-rows", "out-bytes")
        }

    def setup(self) -> None:
        """Keep freed memory in processes that the runner owns."""
        if self.context.tunes_workers:
            keep_freed_memory()
            self._check_root()

    def _check_root(self) -> None:
        """Raise SchemaError if this worker does not see the directory that the launcher made."""
        local = self.context.segment_root.local
        if local is not None and not local.is_dir():
            raise SchemaError(
                f"worker does not see the directory of the dataset: {local}; use a directory that "
                "all workers share, or the URL of an object store"
            )

    def count_input(self, table: pa.Table) -> None:
        """Count rows that arrive."""
        self.counters["in-rows"].inc(table.num_rows)
        self.counters["in-bytes"].inc(table.nbytes)

    def count_output(self, table: pa.Table) -> None:
        """Count rows that are yielded."""
        self.counters["out-rows"].inc(table.num_rows)
        self.counters["out-bytes"].inc(table.nbytes)
