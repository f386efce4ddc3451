"""Beam pipeline of `rewrite --layout flat`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import pyarrow as pa

from pipelines.beam.runner import run_pipeline
from pipelines.beam.transforms import ReadRows
from pipelines.rewrite.command import FlatPart, FlatStage
from pipelines.stages import REJECTS, SAMPLES


def _send_rows(rows: tuple[str, pa.Table], stage: FlatStage) -> Iterator[tuple[int, Any]]:
    return stage.send(rows[1])


def _write_flat(part: tuple[int, Iterable[Any]], stage: FlatStage) -> FlatPart:
    return stage.write(*part)


def flat_pipeline(pipeline: beam.Pipeline, stage: FlatStage) -> Mapping[str, beam.PCollection[Any]]:
    """Add the clustering of all rows to a pipeline."""
    rows = pipeline | "ReadRows" >> ReadRows(stage.context)
    send: Any = beam.FlatMap(_send_rows, stage)
    parts = (
        rows[SAMPLES]
        | "send rows" >> send.with_output_types(tuple[int, stage.context.transport.element])
        | "cluster by session" >> beam.GroupByKey()
        | "write flat" >> beam.Map(_write_flat, stage)
    )
    return {"parts": parts, "rejects": rows[REJECTS]}


def run_flat(stage: FlatStage, beam_args: list[str]) -> Mapping[str, list[Any]]:
    """Rewrite all rows on Beam; return `parts` and `rejects`, as `rewrite.command.run_flat`."""
    context = stage.context
    return run_pipeline(
        lambda p: flat_pipeline(p, stage), beam_args, context.segment_root, context.num_parts
    )
