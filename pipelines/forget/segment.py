"""One segment written again without the samples that were forgotten, by the code of builds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.parquet as pq

from pipelines.beam.ipc import to_bytes
from pipelines.beam.runner import run_pipeline
from pipelines.beam.tables import NumberAccesses
from pipelines.forget.retention import keep_times
from pipelines.forget.stored_parts import StoredPart, parts_left, stored_data, stored_features
from pipelines.parts.part import build_part, packed, unpacked
from pipelines.parts.pins import Pins, pin
from pipelines.segments.commit import finish_segment
from pipelines.sources.late import write_late
from pipelines.sources.reject_files import RejectCounts, merged, write_rejects
from pipelines.sources.rejects import Reject, as_table, from_table
from schemas.dataset import Dataset, Segment
from schemas.features import FeatureSet
from schemas.layout import EVENTS, MANIFEST, late_path
from schemas.manifest import (
    Reference,
    SegmentManifest,
    hash_of,
    read_segment,
    write_manifest,
)

COUNTED = (
    "num_samples",
    "num_sessions",
    "num_rejects",
    "num_source_rows",
    "dataset_bytes",
    "oracle_bytes",
    "splits",
    "groups",
    "tables",
    "blocks_sha256",
    "files_sha256",
    "columns",
    "learned",
)
"""What a rewriting changes in a segment's manifest, beside its id; the rest stays as it was."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """What is to be written again.

    Attributes:
        segment: an open segment.
        building: directory to write to.
        texts: ids as texts; lines of `rejects/` and `late/` that contain one are left out; all of
            them when None.
        learned: files of what transforms learned, path to sha256.
        beam_args: Beam options.
    """

    segment: Segment
    building: Path
    texts: frozenset[str] | None
    learned: Mapping[str, str]
    beam_args: list[str]


class _WritePart(beam.DoFn):
    """Writes a part again; what the commit must know of it, and its blocks, come out."""

    def __init__(self, root: Path, pins: Pins, features: FeatureSet) -> None:
        self.root, self.pins, self.features = root, pins, features

    def process(self, part: StoredPart) -> Iterator[Any]:
        number, data = part.file_index, part.data
        result = build_part(self.root, number, part, data, self.pins, self.features)
        yield packed(result)
        yield beam.pvalue.TaggedOutput("blocks", to_bytes(result.blocks))


def rewrite_segment(dataset: Dataset, rewriting: Rewriting) -> bool:
    """Write a segment again, all but its final name and anomalies.

    Returns:
        Whether any sample is left; nothing is written otherwise.
    """
    segment, building = rewriting.segment, rewriting.building
    data = stored_data(dataset.job, segment)
    parts = parts_left(segment, data)
    if not parts:
        return False
    building.mkdir(parents=True)
    features = stored_features(dataset.features, segment)
    stage = _WritePart(building, pin(parts[0], data, num_parts=len(parts)), features)

    def make(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        made = (
            pipeline
            | "list parts" >> beam.Create(parts)
            | "spread parts" >> beam.Reshuffle()
            | "write part" >> beam.ParDo(stage).with_outputs("blocks", main="parts")
        )
        number = NumberAccesses(building, data.tables, len(parts))
        return {"parts": made["parts"], "tables": made["blocks"] | "NumberAccesses" >> number}

    found = run_pipeline(make, rewriting.beam_args, building, len(parts)).values
    rejects = _write_rejects(segment, building, rewriting.texts)
    _copy_others(rewriting)
    m = segment.manifest
    finish_segment(
        building,
        m.id,
        unpacked(found["parts"]),
        rejects,
        dict(found["tables"]),
        m.listing,
        (m.job_sha256, m.schema_sha256),
        data,
        features,
        rewriting.learned,
    )
    keep_times(segment, building)
    return True


def _write_rejects(segment: Segment, building: Path, texts: frozenset[str] | None) -> RejectCounts:
    """Write the rejects in which no forgotten id stands, file by file."""
    paths = sorted(path for path in segment.files if path.startswith("rejects/"))
    tables = (as_table(_left(segment, path, texts)) for path in paths)
    return merged(write_rejects(building, n, [table]) for n, table in enumerate(tables))


def _left(segment: Segment, path: str, texts: frozenset[str] | None) -> list[Reject]:
    """Return the lines of a file of rejects or late events in which no forgotten id stands."""
    if texts is None:
        return []
    rows = from_table(segment.file(path).read())
    return [r for r in rows if not any(t in r.value or t in r.reason for t in texts)]


def _copy_others(rewriting: Rewriting) -> None:
    """Take over what counts and names no sample, and events that came late."""
    segment = rewriting.segment
    if EVENTS in segment.files:
        pq.write_table(segment.file(EVENTS).read(), rewriting.building / EVENTS)
    for path in segment.files:
        number = path.removeprefix("late/").removesuffix(".parquet")
        if path.startswith("late/") and path == late_path(int(number)):
            write_late(rewriting.building, int(number), _left(segment, path, rewriting.texts))


def link_segment(segment: Segment, building: Path) -> None:
    """Make a segment of the same files: links, to be given another manifest."""
    for path in sorted(p for p in segment.directory.rglob("*") if p.is_file()):
        place = building / path.relative_to(segment.directory)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.name == MANIFEST:
            shutil.copy(path, place)
        else:
            os.link(path, place)


def named_anew(before: SegmentManifest, building: Path, learned: Mapping[str, str]) -> Reference:
    """Write the final manifest: place and origin of the old segment, an id of its own.

    The id is a hash of the old one and of the new content; of what was forgotten it says nothing.

    Returns:
        The id, and the hash of the manifest.
    """
    made = replace(read_segment(building), learned=dict(learned))
    position, _, key = before.id.partition("-")
    content = [key, made.blocks_sha256, made.files_sha256, dict(learned)]
    name = f"{position}-{hash_of(content)[:12]}"
    counted = {field: getattr(made, field) for field in COUNTED}
    return Reference(
        id=name, manifest_sha256=write_manifest(building, replace(before, id=name, **counted))
    )


def texts_of(values: Sequence[Any]) -> frozenset[str]:
    """Return ids as they stand in texts."""
    return frozenset(str(value) for value in values if value is not None and str(value))
