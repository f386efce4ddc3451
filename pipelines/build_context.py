"""The context that the workers of a build share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pipelines.samples.statements import Steps
from pipelines.sources.listing import Folder
from pipelines.sources.raw_rows import InputSplit, file_and_row, files_and_rows
from pipelines.sources.rejects import BUILD_REJECTS_SCHEMA
from schemas.config.job import DataConfig
from schemas.dataset.manifest import InputFile
from schemas.features import FeatureSet
from schemas.storage.location import Location

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
        tunes_workers: whether the build may set memory options of the worker processes.
        has_files: False for rows of a user's pipeline; `listing` then has one entry that stands for
            them, and rejects have no position.
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
    tunes_workers: bool = True
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
