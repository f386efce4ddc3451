"""The last step of a pipeline that makes a segment: all of it enters the dataset, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from pipelines.beam.context import BuildContext
from pipelines.beam.transforms import REJECTED, EachReject
from pipelines.build import finish_written, hashes_of
from pipelines.prepare import BuildRequest
from pipelines.segments.admit import admit, finished_segments, proposal_of
from pipelines.segments.lock import locked, workplace
from pipelines.segments.publish import publish
from pipelines.stages import REJECTS
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.job import Job
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import InputFile

SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A segment that a pipeline makes."""

    request: BuildRequest
    job: Job
    features: FeatureSet
    context: BuildContext


class _Commit(beam.DoFn):
    """Finishes the segment when all of it is there; done twice, it is there once."""

    def __init__(self, wanted: Wanted, names: tuple[str, ...]) -> None:
        self.wanted, self.names = wanted, names

    def process(self, listing: tuple[InputFile, ...], *values: list[Any]) -> Iterator[str]:
        yield commit(self.wanted, listing, dict(zip(self.names, values, strict=True)))


def commit(wanted: Wanted, listing: tuple[InputFile, ...], values: Mapping[str, list[Any]]) -> str:
    """Make what a pipeline wrote part of the dataset.

    Returns:
        The segment's name; that of the same segment when it is there already.

    Raises:
        SchemaError: it must not enter the dataset.
    """
    request, job, features = wanted.request, wanted.job, wanted.features
    incoming = wanted.context.segment_root
    hashes, key = hashes_of(job, features, listing)
    reference = admit(request, job, features, key, listing)
    if reference is None:
        building = request.dataset / SEGMENTS / f".{key}.{request.attempt}"
        with (
            ExitStack() as held,
            workplace(building, ".*", lambda: finished_segments(request.dataset, key)),
        ):
            if not (building / MANIFEST).exists():
                held.enter_context(locked(_parts_of(wanted)))
                if not (incoming / MANIFEST).exists():
                    finish_written(request, wanted.context, key, hashes, values)
                # One call: all of it moves, with the lock, or nothing does.
                incoming.rename(building)
            reference = publish(proposal_of(request, job, features, key, building))
    shutil.rmtree(incoming, ignore_errors=True)
    return reference.id


def _parts_of(wanted: Wanted) -> Path:
    """Return the directory that the pipeline wrote to.

    Raises:
        SchemaError: it is gone, so an attempt that failed had moved it, and another build swept it.
    """
    incoming = wanted.context.segment_root
    if not incoming.is_dir():
        raise SchemaError(
            "parts of the segment must be there, got none; run the pipeline again",
            file=str(incoming),
        )
    return incoming


def committed(listing: Any, made: Mapping[str, Any], wanted: Wanted) -> dict[str, beam.PCollection]:
    """Add the commit to a pipeline.

    Args:
        listing: PCollection of one tuple, the input as the manifest names it.
        made: outputs, `REJECTED` among them, of `segment.segment_of_rows`.
        wanted: the segment.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`.
    """
    outputs = {name: values for name, values in made.items() if name != REJECTED}
    lists = [
        pvalue.AsSingleton(values | f"all {name} to commit" >> beam.combiners.ToList())
        for name, values in outputs.items()
    ]
    stage = beam.ParDo(_Commit(wanted, tuple(outputs)), *lists)
    done = listing | "commit" >> stage.with_output_types(str)
    return {SEGMENT: done, REJECTS: made[REJECTED] | "each reject" >> EachReject()}
