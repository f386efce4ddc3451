"""The request of a build, the choice of its runner, and the context that its workers share."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from pipelines.samples.statements import Steps
from pipelines.sources.listing import Folder
from pipelines.sources.raw_rows import InputSplit, file_and_row, files_and_rows
from pipelines.sources.rejects import BUILD_REJECTS_SCHEMA
from schemas.config.job import DataConfig, Job
from schemas.dataset.manifest import InputFile
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.paths import schema_path
from schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of a build.

    Attributes:
        job_path: the job file, or its URL.
        input_root: directory of raw files, or its URL.
        dataset: directory of the dataset.
        beam_args: Beam options.
        attempt: name of this attempt, unique among concurrent ones.
        check_sql: map all rows twice, in other chunks, and compare the samples.
        append: add a segment to an existing dataset.
        position: position of the segment, with `append`; the next free one when None.
        day: label of the segment, such as 2026-04-09, which also determines its position.
        replaces: whether the segment may replace another version of its day.
        in_order: commit only after all segments before `position`.
        wait_sec: maximum time for which `in_order` waits.
        final: seal the dataset after this segment.
        progress: called with each progress message, one line.
        only: paths below `input_root` of the files to read; all when empty.
        listing: input files; listed when None.
        job_bytes: the dataset's job file; the content of `job_path` when None.
        schema_bytes: the schema; read from the place that the job names when None.
        allow_outside: whether the job's schema may be outside the folder of the job file.
        check: called with the complete segment and its job before it is committed; raises to
            refuse it.
    """

    job_path: Path | Location
    input_root: Path | str
    dataset: Location
    beam_args: list[str]
    attempt: str
    check_sql: bool = False
    append: bool = False
    position: int | None = None
    day: str | None = None
    replaces: bool = False
    in_order: bool = False
    wait_sec: float = 3600.0
    final: bool = False
    progress: Callable[[str], None] = lambda _: None
    only: tuple[str, ...] = ()
    listing: tuple[InputFile, ...] | None = None
    job_bytes: bytes | None = None
    schema_bytes: bytes | None = None
    allow_outside: bool = False
    check: Callable[[Location, Job], None] = lambda *_: None

    def schema_path(self, job: Job) -> Path | Location:
        """Return the path or URL of the schema; raise SchemaError if it is outside the folder."""
        return schema_path(self.job_path, job.data.schema, allow_outside=self.allow_outside)

    def read_schema(self, job: Job) -> bytes:
        """Return the content of the schema; raises as `schema_path`."""
        known = self.schema_bytes
        return self.schema_path(job).read_bytes() if known is None else known


_KEY_PARTITIONS, _KEY_PARTITION_BYTES = 8, 2 << 20


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The read-only state that every worker of a build receives.

    Attributes:
        folder: input directory.
        segment_root: directory of the segment being built, where all workers can write.
        listing: input files in order; a row's origin contains the index of its file.
        data: the job's data section.
        features: declared columns.
        steps: the job's SQL, extended to pass the origin through.
        num_parts: partitions of session keys, each of which becomes one part of the segment.
        empty_rows: by source and side table, an empty table with its columns.
        broadcast: side tables that are copied to every worker.
        key_types: by side table, the type in which its key is compared.
        fitted: files that earlier segments fitted, path to sha256.
        owns_workers: False in a user's pipeline, whose processes are not configured.
        has_files: False if the rows come from a user's pipeline and have no position; the only
            listed file names them then.
        notes: on the input, one line each.
        checks_all_rows: whether all rows are mapped twice, to compare their samples.
    """

    folder: Folder
    segment_root: Location
    listing: tuple[InputFile, ...]
    data: DataConfig
    features: FeatureSet
    steps: Steps
    num_parts: int
    empty_rows: Mapping[str, pa.Table]
    broadcast: frozenset[str] = frozenset()
    key_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    fitted: Mapping[str, str] = field(default_factory=dict)
    owns_workers: bool = True
    has_files: bool = True
    notes: tuple[str, ...] = ()
    checks_all_rows: bool = False

    @property
    def num_key_partitions(self) -> int:
        """Partitions of raw rows by key; several even in a small build, for its workers."""
        num_bytes = sum(f.num_bytes for f in self.listing if f.source in self.data.sources)
        return max(self.num_parts, min(_KEY_PARTITIONS, -(-num_bytes // _KEY_PARTITION_BYTES)))

    @property
    def local_root(self) -> Path:
        """The local directory of the segment being built.

        Raises:
            StorageError: the segment is built at an object store.
        """
        return Path(self.segment_root)

    @property
    def lookups_are_broadcast(self) -> bool:
        """Whether every looked-up side table is broadcast."""
        return all(join.side in self.broadcast for join in self.data.samples.joins)

    @property
    def shard(self) -> str | None:
        """The column by which raw rows are grouped before the SQL, if any."""
        samples = self.data.samples
        if samples.events is not None:
            return samples.events.shard or samples.events.key[0]
        return samples.per.key if samples.per is not None else None

    def rejects(self, bad: pa.Table) -> pa.Table:
        """Return bad rows (`BAD_ROWS_SCHEMA`) as rejects with their file and position."""
        if self.has_files:
            files, positions = files_and_rows(bad["origin"], self.listing)
        else:
            files = pa.repeat(pa.scalar(self.listing[0].path, pa.string()), bad.num_rows)
            positions = pa.nulls(bad.num_rows, pa.int64())
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [files, positions, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)

    def location_text(self, origin: int) -> str:
        """Return the location of a row for error messages."""
        return "{}:{}".format(*file_and_row(origin, self.listing))

    def files(self) -> list[InputSplit]:
        """Return one split for each whole input file."""
        return [
            InputSplit(f.source, f.path, i, num_bytes=f.num_bytes)
            for i, f in enumerate(self.listing)
        ]


IN_PROCESS = "InProcess"
"""Value of `--runner` that holds the samples in memory, whatever the size of the input."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a command runs on this machine, without Beam.

    Attributes:
        num_workers: maximum number of workers; 0 for all that fit the machine.
        in_memory: whether a segment is held in memory, by threads, or exchanged in files, by
            processes; None lets its size decide.
    """

    num_workers: int = 0
    in_memory: bool | None = None


def local_options(beam_args: Sequence[str]) -> LocalOptions | None:
    """Return how a command runs without Beam, None if its options name a runner of Beam.

    `beam_args` are options that the command itself does not define.

    Raises:
        SchemaError: an option is unknown or invalid.

    Example:
        >>> local_options(["--direct_num_workers=2"])
        LocalOptions(num_workers=2, in_memory=None)
        >>> local_options(["--runner", "FlinkRunner"])
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--runner")
    try:
        runner, words = parser.parse_known_args(beam_args)
        parser.add_argument("--direct_num_workers", type=int, default=0)
        parser.add_argument("--direct_running_mode")
        known, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise SchemaError(f"option is invalid: {error}; see --help") from error
    if runner.runner not in (None, IN_PROCESS):
        return None
    if runner.runner == IN_PROCESS and words:
        raise SchemaError(
            f"runner {IN_PROCESS} takes no Beam options: {words[0]}; leave it out, or choose "
            "another --runner"
        )
    if known.direct_num_workers < 0:
        raise SchemaError(
            f"direct_num_workers must not be negative, got {known.direct_num_workers}; 0 means "
            "all processors"
        )
    if others:
        raise SchemaError(
            f"unknown option: {others[0]}; see --help, and --runner for those of Beam"
        )
    in_memory = True if runner.runner == IN_PROCESS else None
    if known.direct_running_mode == "multi_processing":
        in_memory = False
    return LocalOptions(known.direct_num_workers, in_memory)


def beam_build() -> ModuleType:
    """Import `pipelines.beam.jobs`, and with it Beam, which takes seconds."""
    return importlib.import_module("pipelines.beam.jobs")
