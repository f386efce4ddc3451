"""A dataset at a path or URL: what is in it, and its samples as Arrow, DuckDB or Polars."""

from __future__ import annotations

import datetime
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from presage.display import Listing, columns_text, format_bytes
from presage.schemas.dataset import opened as datasets
from presage.schemas.dataset.samples import (
    column_names,
    num_live_samples,
    read_columns,
    samples_schema,
)
from presage.schemas.errors import SchemaError, pluralize
from presage.schemas.layout import EVALUATION, TRAIN
from presage.schemas.storage.location import Location

if TYPE_CHECKING:
    import duckdb
    import polars

    from presage.batch import Batch

BATCH_SAMPLES = 1 << 16
"""Largest number of samples of a record batch."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the samples.

    Attributes:
        name: unique in the dataset.
        type: Arrow type in the samples.
        role: use in training: sparse, dense, label, weight, label_time or kept.
        group: dedup group that it is stored with, or None.
        derived: whether a transform or the sampling made it. Such columns are read only by name.
    """

    name: str
    type: pa.DataType
    role: str
    group: str | None
    derived: bool


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """One segment.

    Attributes:
        id: position and hash; `select` takes it.
        day: day of its logs, or None.
        num_samples: samples of the selected split that are not deleted.
        num_sessions: sessions of all splits.
        dataset_bytes: stored bytes of samples and groups.
    """

    id: str
    day: str | None
    num_samples: int
    num_sessions: int
    dataset_bytes: int


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Deduplication of one group.

    Attributes:
        name: name of the group.
        num_unique: unique tuples, summed over blocks.
        dedup_factor: samples per unique tuple.
        columns: number of its columns.
    """

    name: str
    num_unique: int
    dedup_factor: float
    columns: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the selected segments.

    Attributes:
        num_samples: samples of the selected split that are not deleted.
        num_sessions: sessions of all splits.
        num_segments: segments.
        dataset_bytes: stored bytes of samples and groups.
        oracle_bytes: stored bytes of access lists and edges.
        groups: deduplication of each group, over all splits.
    """

    num_samples: int
    num_sessions: int
    num_segments: int
    dataset_bytes: int
    oracle_bytes: int
    groups: Listing[GroupSizes]


class Head:
    """The first samples and the first batch; prints both.

    Attributes:
        samples: first samples, with all columns.
    """

    def __init__(self, samples: pa.Table, dataset: datasets.OpenDataset, split: str | None) -> None:
        """Store the arguments; the batch is read when it is first used."""
        self.samples = samples
        self._dataset = dataset
        self._split = split

    @cached_property
    def batch(self) -> Batch:
        """First batch of the job's size, of the training split unless evaluation is selected.

        Raises:
            ModuleNotFoundError: torch is not installed.
            SchemaError: the job cannot be trained, for instance without a label.
        """
        # The import of torchrec uses a deprecated function of torch, which warns.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        loader_class = import_module("presage.loader").DataLoader
        loader = loader_class(
            self._dataset,
            batch_samples=self._dataset.job.train.batch_samples,
            split=self._split or TRAIN,
        )
        return loader.first_batch()

    def __repr__(self) -> str:
        """Return the samples, a line for each column, and the shapes of the batch."""
        count = self.samples.num_rows
        return f"first {count} samples\n{columns_text(self.samples)}\n{self._batch_text()}"

    def _batch_text(self) -> str:
        try:
            batch = self.batch
        except ModuleNotFoundError as error:
            return f"no batch: {error.name} is not installed; install Presage's extra trainer"
        except SchemaError as error:
            return f"no batch: {error}"
        return f"first {batch}"


class Dataset:
    """The samples of one version of a dataset, all or selected by day, segment and split.

    Unlike most constructors of Presage this one reads: the newest version of the dataset is opened
    once, so that all that is read from the object, and from `select`, belongs to one version.

    Deleted samples are omitted. Columns that a segment was built without have their default there.

    Example:
        >>> import presage
        >>> dataset = presage.Dataset("s3://bucket/clicks")  # doctest: +SKIP
        >>> dataset.select(days=["2026-04-09"]).to_polars(["item_id", "label"])  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Location,
        *,
        days: Iterable[str | datetime.date] | None = None,
        segments: Iterable[str] | None = None,
        split: str | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            url: its directory, as a path or URL.
            days: days of the segments to read; default: all segments.
            segments: ids of the segments to read; default: all segments.
            split: `train` or `evaluation`; default: both.

        Raises:
            SchemaError: there is no dataset, a file has changed, or nothing has a given name.
            StorageError: the store cannot be reached.
        """
        self.opened = datasets.open_dataset(Location.parse(url))
        """The open dataset of the selected segments."""
        self.split: str | None = None
        """Selected split, or None for all."""
        self._narrow(days, segments, split)

    def select(
        self,
        *,
        days: Iterable[str | datetime.date] | None = None,
        segments: Iterable[str] | None = None,
        split: str | None = None,
    ) -> Dataset:
        """Return a part of this dataset; arguments and errors are those of the constructor."""
        part = object.__new__(Dataset)
        part.opened, part.split = self.opened, self.split
        part._narrow(days, segments, split)
        return part

    def _narrow(
        self,
        days: Iterable[str | datetime.date] | None,
        segments: Iterable[str] | None,
        split: str | None,
    ) -> None:
        for names in (days, segments):
            if names is not None:
                names = [names] if isinstance(names, str | datetime.date) else names
                self.opened = datasets.select_segments(self.opened, [str(name) for name in names])
        if split is not None:
            if split not in (TRAIN, EVALUATION) or self.split not in (None, split):
                expected = self.split or f"{TRAIN} or {EVALUATION}"
                raise SchemaError(f"split must be {expected}, got {split!r}")
            self.split = split

    @property
    def url(self) -> str:
        """Path or URL of the dataset."""
        return str(self.opened.directory)

    @property
    def schema(self) -> Listing[Column]:
        """All columns, in the order of the dataset's schema."""
        dataset = self.opened
        names = column_names(dataset, model_inputs=True)
        derived = set(names) - set(column_names(dataset, model_inputs=False))
        groups = dataset.job.data.group_of_column
        return Listing(
            Column(
                f.name, f.type, dataset.features[f.name].role, groups.get(f.name), f.name in derived
            )
            for f in samples_schema(dataset, names)
        )

    @property
    def segments(self) -> Listing[SegmentSizes]:
        """The selected segments, in order."""
        return Listing(
            SegmentSizes(
                id=segment.id,
                day=segment.day,
                num_samples=num_live_samples(segment, self.split),
                num_sessions=segment.manifest.num_sessions,
                dataset_bytes=segment.manifest.dataset_bytes,
            )
            for segment in self.opened.segments
        )

    @property
    def days(self) -> list[str]:
        """Days of the selected segments, ascending."""
        return sorted({s.day for s in self.opened.segments if s.day is not None})

    @property
    def sizes(self) -> Sizes:
        """Sizes of the selected segments, from their manifests."""
        manifests = [segment.manifest for segment in self.opened.segments]
        return Sizes(
            num_samples=len(self),
            num_sessions=sum(m.num_sessions for m in manifests),
            num_segments=len(manifests),
            dataset_bytes=sum(m.dataset_bytes for m in manifests),
            oracle_bytes=sum(m.oracle_bytes for m in manifests),
            groups=Listing(self._group_sizes(g) for g in self.opened.job.data.groups),
        )

    def _group_sizes(self, group: str) -> GroupSizes:
        manifests = [s.manifest for s in self.opened.segments if group in s.manifest.groups]
        num_unique = sum(m.groups[group].num_unique for m in manifests)
        num_samples = sum(m.num_samples for m in manifests)
        members = Counter(self.opened.job.data.group_of_column.values())
        factor = round(num_samples / max(1, num_unique), 6)
        return GroupSizes(group, num_unique, factor, members[group])

    def __len__(self) -> int:
        return sum(num_live_samples(segment, self.split) for segment in self.opened.segments)

    def __repr__(self) -> str:
        """Return sizes, days, columns by role and deduplication, a line each."""
        sizes, roles = self.sizes, Counter(column.role for column in self.schema)
        lines = [
            f"{sizes.num_samples:,} samples{f' of split {self.split}' if self.split else ''}, "
            f"{sizes.num_sessions:,} sessions, {pluralize(sizes.num_segments, 'segment')}",
            f"{format_bytes(sizes.dataset_bytes)} of samples, "
            f"{format_bytes(sizes.oracle_bytes)} of oracle",
        ]
        if days := self.days:
            lines.append(f"{pluralize(len(days), 'day')}: {days[0]} to {days[-1]}")
        lines.append(f"columns: {', '.join(f'{count} {role}' for role, count in roles.items())}")
        if sizes.groups:
            factors = ", ".join(f"{g.name} {g.dedup_factor:.2f}" for g in sizes.groups)
            lines.append(f"samples per unique tuple: {factors}")
        return "\n  ".join([f"Dataset {self.url}", *lines])

    def head(self, num_samples: int = 5) -> Head:
        """Return the first samples, and the first batch of training with its shapes.

        Print the result to see both. The batch needs the extra `trainer`, and is read when it is
        first used.
        """
        names = self.schema.values("name")
        rows = [samples_schema(self.opened, names).empty_table()]
        missing = num_samples
        for table in read_columns(self.opened, names, self.split):
            rows.append(table.slice(0, missing))
            missing -= rows[-1].num_rows
            if missing <= 0:
                break
        return Head(pa.concat_tables(rows), self.opened, self.split)

    # Reading.

    def batches(
        self, columns: Sequence[str] | None = None, *, max_samples: int = BATCH_SAMPLES
    ) -> Generator[pa.RecordBatch]:
        """Yield the samples, one row each, in stored order.

        At most two row groups are in memory, of 64 MiB before they are expanded.

        Args:
            columns: columns to read, in the order of the result; the bytes of others are not read.
                Default: the columns of the job's SQL, as `presage expand` writes them.
            max_samples: largest number of samples of a record batch.

        Raises:
            SchemaError: the dataset has no column of a name, or a byte has changed.
        """
        names = self._names(columns)
        for table in read_columns(self.opened, names, self.split):
            yield from table.to_batches(max_chunksize=max_samples)

    def to_reader(self, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        """Return `batches` as a stream that Arrow libraries read once."""
        schema = samples_schema(self.opened, self._names(columns))
        return pa.RecordBatchReader.from_batches(schema, self.batches(columns))

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the samples in memory; arguments and errors are those of `batches`."""
        return self.to_reader(columns).read_all()

    def to_duckdb(
        self,
        columns: Sequence[str] | None = None,
        *,
        connection: duckdb.DuckDBPyConnection | None = None,
        table: str = "samples",
    ) -> duckdb.DuckDBPyRelation:
        """Copy the samples to a new table of DuckDB, batch by batch; return the table.

        Args:
            columns: as in `batches`.
            connection: database; default: a new one in memory.
            table: name of the table.
        """
        database = _import_library("duckdb").connect() if connection is None else connection
        database.from_arrow(self.to_reader(columns)).create(table)
        return database.table(table)

    def to_polars(self, columns: Sequence[str] | None = None) -> polars.DataFrame:
        """Return the samples in memory as a data frame; arguments are those of `batches`."""
        return _import_library("polars").from_arrow(self.to_arrow(columns))

    def _names(self, columns: Sequence[str] | None) -> list[str]:
        if isinstance(columns, str):
            raise TypeError(f"columns must be a list, got {columns!r}; write [{columns!r}]")
        return column_names(self.opened, model_inputs=False) if columns is None else list(columns)


def _import_library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is not installed; run pip install {name}", name=name
        ) from error
