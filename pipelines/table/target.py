"""Where a segment goes, and the job and the schema that define it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from presage.schemas.config.job import Job, parse_job
from presage.schemas.config.parse import read_job_text
from presage.schemas.features import FeatureSet, parse_features, read_schema_text
from presage.schemas.paths import path_or_url, schema_path
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class SegmentTarget:
    """Where a segment goes.

    Attributes:
        dataset: directory of the dataset.
        attempt: name of this attempt, unique among concurrent ones.
        append: add a segment to an existing dataset.
        position: position of the segment, with `append`; the next free one when None.
        day: label of the segment, such as 2026-04-09, which also determines its position.
        replaces: whether the segment may replace another version of its day.
        in_order: commit only after all segments before `position`.
        wait_sec: maximum time for which `in_order` waits.
        final: seal the dataset after this segment.
    """

    dataset: Location
    attempt: str
    append: bool = False
    position: int | None = None
    day: str | None = None
    replaces: bool = False
    in_order: bool = False
    wait_sec: float = 3600.0
    final: bool = False


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The job and the schema of a segment, with the bytes that the dataset stores of them.

    Attributes:
        path: the job file, or its URL, for messages.
        config: the job, with the split of the segment's day.
        features: the declared columns.
        job_bytes: the content of the job file.
        schema_bytes: the content of the schema.
    """

    path: Path | Location
    config: Job
    features: FeatureSet
    job_bytes: bytes
    schema_bytes: bytes


def load_job_files(
    path: Path | Location, day: str | None = None, *, allow_outside: bool = False
) -> JobFiles:
    """Read a job file and its schema.

    `day` is that of the segment; `allow_outside` is whether the schema may be outside the folder of
    the job file.

    Raises:
        SchemaError: the job file or the schema is invalid.
    """
    text = read_job_text(path_or_url(path))
    job = parse_job(text, str(path))
    if day is not None:
        split = job.data.split.for_day(date.fromisoformat(day))
        job = replace(job, data=replace(job.data, split=split))
    schema_file = schema_path(path, job.data.schema, allow_outside=allow_outside)
    schema = read_schema_text(schema_file)
    features = parse_features(schema, str(schema_file))
    return JobFiles(path, job, features, text.encode(), schema.encode())
