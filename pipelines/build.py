"""Build one segment from raw files: the page to read first.

list inputs -> read rows -> samples by SQL -> cluster by session -> write parts
-> number accesses -> commit segment -> index -> replace the root manifest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow.compute as pc

from pipelines.commit import (
    commit_root,
    commit_segment,
    finish_segment,
    join_blocks,
    reference_of,
)
from pipelines.index import build_index
from pipelines.lock import locked, workplace
from pipelines.oracle import write_access
from pipelines.part import PartResult
from pipelines.prepare import BuildRequest, check_map, prepare
from pipelines.progress import watched
from pipelines.rejects import Reject, sort_key
from pipelines.runner import run_pipeline
from pipelines.sampling_units import MergeCounts, write_units
from pipelines.transforms import (
    REJECTS,
    SAMPLES,
    SAMPLING,
    BuildContext,
    BuildParts,
    MakeSamples,
    ReadRows,
)
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet, load_features
from schemas.job import DataConfig, Job, load_job
from schemas.layout import BLOCK, MANIFEST, SEGMENTS, TRAIN
from schemas.manifest import (
    Reference,
    SegmentManifest,
    hash_of,
    read_dataset,
    read_segment,
)

PART_INPUT_BYTES = 32 << 20
"""Input bytes of one part: small enough that a part's samples fit a worker of 2 GiB even when
they are 20 times larger in memory, large enough for row groups of 64 MiB."""


class _NumberAccesses(beam.DoFn):
    """Writes one table's access lists once all parts are known."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def process(self, table: str, results: list[PartResult]) -> Iterator[tuple[str, int]]:
        if results:
            blocks = join_blocks(results)
            training = blocks.filter(pc.equal(blocks["split"], TRAIN))
            yield table, write_access(self.root, table, training[BLOCK].to_numpy())


def segment_pipeline(
    pipeline: beam.Pipeline, context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the whole build of one segment to a pipeline."""
    rows = pipeline | "ReadRows" >> ReadRows(context)
    samples = rows[SAMPLES] | "MakeSamples" >> MakeSamples(context)
    parts = samples[SAMPLES] | "BuildParts" >> BuildParts(context)
    joined = parts | "all parts" >> beam.combiners.ToList()
    tables = (
        pipeline
        | "list tables" >> beam.Create(sorted(context.data.tables))
        | "spread tables" >> beam.Reshuffle()
        | "number accesses"
        >> beam.ParDo(_NumberAccesses(context.segment_root), beam.pvalue.AsSingleton(joined))
    )
    rejects = (rows[REJECTS], samples[REJECTS]) | "join rejects" >> beam.Flatten()
    units = samples[SAMPLING] | "count units" >> beam.CombineGlobally(MergeCounts())
    return {"parts": parts, "tables": tables, "rejects": rejects, "units": units}


def build_segment(
    request: BuildRequest, job: Job, features: FeatureSet, index: int
) -> tuple[Reference, SegmentManifest, dict[str, int]]:
    """Build and commit one segment; one that is already there is kept.

    Args:
        request: what is to be built.
        job: the job file.
        features: declared columns.
        index: position of the segment in the dataset.
    """
    prepared = prepare(request, job, features)
    listing = prepared.listing
    size = sum(f.num_bytes for f in listing)
    request.say(f"input: {len(listing)} files, {size / 1e6:.1f} MB")
    if request.check_sql:
        rows = check_map(request, job.data, prepared)
        request.say(f"check-sql: equal samples from {rows} rows cut three ways")
    hashes = hash_of(asdict(job.data)), hash_of([asdict(f) for f in features.features])
    segment_id = f"{index:05d}-{hash_of([*hashes, [asdict(f) for f in listing]])[:12]}"
    final = request.dataset / SEGMENTS / segment_id
    refuse_other(request.dataset, index, segment_id)
    if (final / MANIFEST).exists():
        reference = reference_of(final)
        return reference, read_segment(final, reference), {}
    building = request.dataset / SEGMENTS / f".{segment_id}.{request.attempt}"
    context = BuildContext(
        input_root=request.input_root,
        segment_root=building,
        listing=listing,
        data=job.data,
        features=features,
        statement=prepared.statement,
        empty_rows=prepared.empty_rows,
        num_parts=max(1, -(-size // PART_INPUT_BYTES)),
    )
    with workplace(building, ".*"):
        with watched(building, context.num_parts, request.say):
            outcome = run_pipeline(
                lambda p: segment_pipeline(p, context), request.beam_args, building
            )
        check_usable(outcome.values["parts"], outcome.values["rejects"], job.data)
        write_units(building, outcome.values["units"])
        manifest = finish_segment(
            building,
            segment_id,
            outcome.values["parts"],
            outcome.values["rejects"],
            dict(outcome.values["tables"]),
            listing,
            hashes,
        )
        reference = commit_segment(building, request.dataset, segment_id)
    return reference, manifest, dict(outcome.counters)


def check_usable(parts: list[PartResult], rejects: list[Reject], data: DataConfig) -> None:
    """Refuse a build without samples, and any reject when the job says so.

    Raises:
        SchemaError: naming the first reject by file and position.
    """
    first = min(rejects, key=sort_key, default=None)
    if first is not None and data.on_error == "fail":
        raise SchemaError(f"{first}; repair the row, or set data.on_error: reject")
    if not parts:
        reason = f"first reject: {first}" if first else "the SQL yields no rows"
        raise SchemaError(f"samples must not be empty, got none; {reason}")


def build(request: BuildRequest) -> dict[str, Any]:
    """Build a dataset of one segment with its default index.

    Returns:
        What `build --json` prints.

    Raises:
        SchemaError: the job, the input or the dataset does not fit.
    """
    started = time.perf_counter()
    job = load_job(request.job_path)
    schema_path = request.job_path.parent / job.data.schema
    features = load_features(schema_path)
    request.dataset.mkdir(parents=True, exist_ok=True)
    reference, manifest, _ = build_segment(request, job, features, 0)
    files = request.job_path.read_bytes(), schema_path.read_bytes()

    def commit(*indexes: Reference) -> None:
        with locked(request.dataset):
            refuse_other(request.dataset, 0, reference.id)  # it may have been faster
            known = [i for i in indexes_of(request.dataset) if i not in indexes]
            commit_root(request.dataset, job.name, *files, [reference], [*indexes, *known])

    commit()
    request.say(f"segment {reference.id}: {manifest.num_samples} samples committed")
    index = default_index(request)
    request.say(f"{index.id} committed")
    commit(index)
    return summary(request.dataset, manifest, time.perf_counter() - started)


def refuse_other(dataset: Path, index: int, segment_id: str) -> None:
    """Refuse to build over a dataset that holds something else.

    Raises:
        SchemaError: the dataset has another segment at that position.
    """
    if not (dataset / MANIFEST).exists():
        return
    segments = read_dataset(dataset).segments
    if len(segments) != index + 1 or segments[index].id != segment_id:
        raise SchemaError(
            f"output must be empty or hold the same segment, got {[s.id for s in segments]} "
            f"instead of {segment_id}; choose another --output",
            file=str(dataset),
        )


def indexes_of(dataset: Path) -> tuple[Reference, ...]:
    """Return the indexes that a dataset has already."""
    return read_dataset(dataset).indexes if (dataset / MANIFEST).exists() else ()


def default_index(request: BuildRequest) -> Reference:
    """Build the index that the job's `data.oracle` asks for."""
    dataset = open_dataset(request.dataset)
    oracle = dataset.job.data.oracle
    order = dataset.order(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )
    building = request.dataset / f".index.{request.attempt}"
    return build_index(dataset, order, building, request.beam_args)


def summary(dataset: Path, manifest: SegmentManifest, wall_sec: float) -> dict[str, Any]:
    """Return what `build --json` prints, but for the start-up."""
    opened = open_dataset(dataset)
    index_bytes = sum(i.manifest.oracle_bytes for i in opened.indexes)
    return {
        "num_samples": manifest.num_samples,
        "num_sessions": manifest.num_sessions,
        "num_blocks": manifest.num_blocks,
        "num_rejects": manifest.num_rejects,
        "input_bytes": manifest.input_bytes,
        "dataset_bytes": manifest.dataset_bytes,
        "oracle_bytes": manifest.oracle_bytes + index_bytes,
        "wall_sec": round(wall_sec, 3),
        "rows_per_sec": round(manifest.num_samples / wall_sec, 1),
        "groups": {
            name: {"num_unique": g.num_unique, "dedup_factor": g.dedup_factor}
            for name, g in manifest.groups.items()
        },
    }
