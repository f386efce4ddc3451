"""Beam pipeline that rewrites the parts of a segment without deleted samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.beam.runner import run_pipeline
from pipelines.beam.tables import NumberAccesses
from pipelines.clustering.part import build_part, serialize_result
from pipelines.clustering.writer import SegmentLayout
from pipelines.shuffle import encode_tables
from pipelines.table.compact import StoredPart
from schemas.config.job import TableConfig
from schemas.features import FeatureSet


class _WritePart(beam.DoFn):
    def __init__(self, root: Path, layout: SegmentLayout, features: FeatureSet) -> None:
        self.root, self.layout, self.features = root, layout, features

    def process(self, part: StoredPart) -> Iterator[Any]:
        number, data = part.file_index, part.data
        result = build_part(self.root, number, part, data, self.layout, self.features)
        yield serialize_result(result)
        yield beam.pvalue.TaggedOutput("blocks", encode_tables(result.blocks))


def rewrite_parts(
    building: Path,
    parts: Sequence[StoredPart],
    layout: SegmentLayout,
    features: FeatureSet,
    tables: Mapping[str, TableConfig],
    beam_args: list[str],
) -> Mapping[str, Any]:
    """Write the parts of a segment to `building` and number the accesses of its tables.

    Returns:
        `parts`: results of the parts; `tables`: number of rows of each table.
    """
    stage = _WritePart(building, layout, features)

    def add_transforms(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        written = (
            pipeline
            | "list parts" >> beam.Create(parts)
            | "spread parts" >> beam.Reshuffle()
            | "write part" >> beam.ParDo(stage).with_outputs("blocks", main="parts")
        )
        number = NumberAccesses(building, tables, len(parts))
        return {"parts": written["parts"], "tables": written["blocks"] | "NumberAccesses" >> number}

    return run_pipeline(add_transforms, beam_args, building, len(parts))
