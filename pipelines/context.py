"""The request of a build, and what every worker of it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pipelines.samples.statements import Steps
from pipelines.shuffle import ByReference, ByValue, InMemory, ShuffleTransport
from pipelines.sources.listing import Folder
from pipelines.sources.rejects import BUILD_REJECTS_SCHEMA
from pipelines.sources.rows import FilePart, file_and_row, files_and_rows
from schemas.config.job import DataConfig, Job
from schemas.features import FeatureSet
from schemas.manifest import InputFile
from schemas.paths import schema_path


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What is to be built.

    Attributes:
        job_path: the job file.
        input_root: directory of raw files, or its URL.
        dataset: directory of the dataset.
        beam_args: Beam options.
        attempt: name of this attempt, unique among those that may run at once.
        check_sql: whether to compare the SQL's result on three cuts of the same rows first.
        append: whether the dataset must be there already.
        position: place among its segments, with `append`; the next free one when None.
        day: label of the segment, such as 2026-04-09, which is its place, too; none when None.
        replaces: whether it may take the place of another version of its day.
        in_order: whether it enters the dataset only behind all segments before its position.
        final: seal the dataset after this segment.
        progress: called with each progress message, one line.
        listing: input files, where they are known already.
        job_bytes: what becomes the dataset's job file, where that is not the job file as it is.
        allow_outside: whether the job's schema may lie outside the folder of the job file.
    """

    job_path: Path
    input_root: Path | str
    dataset: Path
    beam_args: list[str]
    attempt: str
    check_sql: bool = False
    append: bool = False
    position: int | None = None
    day: str | None = None
    replaces: bool = False
    in_order: bool = False
    final: bool = False
    progress: Callable[[str], None] = lambda _: None
    listing: tuple[InputFile, ...] | None = None
    job_bytes: bytes | None = None
    allow_outside: bool = False

    def schema_path(self, job: Job) -> Path:
        """Return the file of the job's schema.

        Raises:
            SchemaError: it lies outside the folder of the job file.
        """
        return schema_path(self.job_path, job.data.schema, allow_outside=self.allow_outside)


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every worker must know.

    Attributes:
        folder: input directory.
        segment_root: directory of the segment being built.
        listing: input files in order; a file's index is part of its rows' origins.
        data: the job's data section.
        features: declared columns.
        steps: the job's SQL with the origin carried through.
        num_parts: parts of the segment.
        empty_rows: by source and side table, a table without rows that has its columns.
        broadcast: side tables that every worker holds.
        key_types: by side table, the type in which its key is compared.
        learned: files of what the segments before learned, path to sha256.
        shuffle_by: how samples cross the shuffle: `references`, `values` or `memory`.
    """

    folder: Folder
    segment_root: Path
    listing: tuple[InputFile, ...]
    data: DataConfig
    features: FeatureSet
    steps: Steps
    num_parts: int
    empty_rows: Mapping[str, pa.Table]
    broadcast: frozenset[str] = frozenset()
    key_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    learned: Mapping[str, str] = field(default_factory=dict)
    shuffle_by: str = "references"

    @property
    def transport(self) -> ShuffleTransport:
        """How samples cross the shuffle."""
        groups = tuple(self.data.groups)
        if self.shuffle_by == "values":
            return ByValue(groups)
        if self.shuffle_by == "memory":
            return InMemory()
        return ByReference(self.segment_root, groups)

    @property
    def lookups_are_broadcast(self) -> bool:
        """Whether every look-up is in a table that the worker holds."""
        return all(join.side in self.broadcast for join in self.data.samples.joins)

    @property
    def shard(self) -> str | None:
        """Return the column that raw rows are grouped by before any SQL, None when they are not."""
        samples = self.data.samples
        if samples.events is not None:
            return samples.events.shard or samples.events.key[0]
        return samples.per.key if samples.per is not None else None

    def rejects(self, bad: pa.Table) -> pa.Table:
        """Return bad rows (`BAD_ROWS_SCHEMA`) as rejects, with the places that they came from."""
        files, positions = files_and_rows(bad["origin"], self.listing)
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [files, positions, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)

    def place_text(self, origin: int) -> str:
        """Return the place of a row as errors name it."""
        return "{}:{}".format(*file_and_row(origin, self.listing))

    def files(self) -> list[FilePart]:
        """Return one part per input file."""
        return [
            FilePart(f.source, f.path, i, num_bytes=f.num_bytes) for i, f in enumerate(self.listing)
        ]
