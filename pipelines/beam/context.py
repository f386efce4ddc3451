"""What every worker of a build must know; it travels with each step of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from pipelines.beam.shuffle import ByReference, ByValue, Crossing, InMemory
from pipelines.samples.steps import Steps
from pipelines.sources.folder import Folder
from pipelines.sources.rejects import FOUND_SCHEMA
from pipelines.sources.rows import FilePart, place_of, places_of_rows
from schemas.features import FeatureSet
from schemas.job import DataConfig
from schemas.manifest import InputFile


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
    def crossing(self) -> Crossing:
        """How samples cross the shuffle."""
        groups = tuple(self.data.groups)
        if self.shuffle_by == "values":
            return ByValue(groups)
        if self.shuffle_by == "memory":
            return InMemory()
        return ByReference(self.segment_root, groups)

    @property
    def joins_at_hand(self) -> bool:
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
        files, positions = places_of_rows(bad["origin"], self.listing)
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [files, positions, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=FOUND_SCHEMA)

    def place_text(self, origin: int) -> str:
        """Return the place of a row as errors name it."""
        return "{}:{}".format(*place_of(origin, self.listing))

    def files(self) -> list[FilePart]:
        """Return one part per input file."""
        return [
            FilePart(f.source, f.path, i, num_bytes=f.num_bytes) for i, f in enumerate(self.listing)
        ]
