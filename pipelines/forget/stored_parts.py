"""The samples of a part as a build had them before it wrote them, without those forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.expand import row_groups
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, compact, distinct, hash_column
from pipelines.sources.rows import ORIGIN
from schemas.columns import comparable_tuple, numpy_of
from schemas.dataset import Segment
from schemas.features import FeatureSet
from schemas.jagged import hash_keys, offsets_of
from schemas.job import DataConfig, Job
from schemas.layout import BLOCK, inverse_column, samples_path
from schemas.stored import group_schema, read_group


def stored_data(job: Job, segment: Segment) -> DataConfig:
    """Return a data section that makes of stored columns what the job's made of raw ones.

    What transforms and vocabularies made is a stored column like any other, behind those of the
    job as it was then; a column that was declared later is none of the segment's.
    """
    columns = segment.manifest.columns
    file_index = int(segment.column("file")[0])
    groups = {
        group: tuple(
            f.name for f in group_schema(lambda p: segment.file(p).schema, group, file_index)
        )
        for group in job.data.groups
    }
    tables = {
        name: replace(table, features=tuple(f for f in table.features if f in columns))
        for name, table in job.data.tables.items()
        if name in segment.manifest.tables
    }
    return replace(job.data, groups=groups, tables=tables, transforms={}, vocabularies={})


def stored_features(features: FeatureSet, segment: Segment) -> FeatureSet:
    """Return the declared columns that a segment has."""
    columns = segment.manifest.columns
    return FeatureSet(tuple(f for f in features.features if f.name in columns))


@dataclass(frozen=True)
class StoredPart:
    """One part of a segment; gone through as often as one likes.

    Attributes:
        segment: an open segment.
        file_index: number of the part.
        data: its data section, from `stored_data`.
    """

    segment: Segment
    file_index: int
    data: DataConfig

    def __iter__(self) -> Iterator[Tuples]:
        """Yield the samples of each row group that has some left."""
        for file_index, row_group in row_groups(self.segment):
            if file_index == self.file_index:
                kept = self._kept(row_group)
                if len(kept):
                    yield compact(self._tuples(row_group).take(kept))

    def _kept(self, row_group: int) -> NDArray[np.int64]:
        samples = self.segment.column("num_samples")
        count = int(samples[self._chosen(row_group)].sum())
        forgotten = self.segment.forgotten_rows(self.file_index, row_group)
        return np.setdiff1d(np.arange(count), forgotten)

    def _chosen(self, row_group: int) -> NDArray[np.bool_]:
        in_file = self.segment.column("file") == self.file_index
        return in_file & (self.segment.column("row_group") == row_group)

    def _tuples(self, row_group: int) -> Tuples:
        segment, chosen = self.segment, self._chosen(row_group)
        samples = segment.file(samples_path(self.file_index)).read_row_group(row_group)
        per_block = segment.column("num_samples")[chosen]
        block = np.repeat(np.arange(len(per_block)), per_block)
        references: dict[str, NDArray[np.int64]] = {}
        uniques: dict[str, pa.Table] = {}
        hidden = [BLOCK]
        for group, members in self.data.groups.items():
            table = read_group(segment.file, group, self.file_index, row_group)
            starts = offsets_of(segment.num_unique(group)[chosen])[:-1]
            rows = numpy_of(samples[inverse_column(group)]) + starts[block]
            same, uniques[group] = distinct(_hashed(table.select(members), group))
            references[group] = same[rows]
            hidden.append(inverse_column(group))
        place = np.arange(samples.num_rows) + (row_group << 32)  # stored in their final order
        own = samples.drop_columns(hidden).append_column(ORIGIN, pa.array(place))
        index = np.zeros(samples.num_rows, np.int64)
        return Tuples(own.append_column(LIST_INDEX, pa.array(index)), references, uniques)


def _hashed(table: pa.Table, group: str) -> pa.Table:
    hashes = hash_keys(comparable_tuple(table, table.column_names))
    return table.add_column(0, hash_column(group), pa.array(hashes))


def parts_left(segment: Segment, data: DataConfig) -> list[StoredPart]:
    """Return the parts of a segment that have a sample left, in their order."""
    numbers = sorted(set(segment.column("file").tolist()))
    parts = [StoredPart(segment, number, data) for number in numbers]
    return [part for part in parts if any(True for _ in part)]
