"""Open a dataset, select segments of it, and read columns that older segments lack."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.arrays import Jagged, concat, jagged_of, offsets_of
from schemas.config.job import Job, load_job
from schemas.deleted_samples import (
    deleted_rows,
    empty_tombstones,
    read_tombstones,
    tombstones_of_segment,
)
from schemas.errors import SchemaError
from schemas.features import FeatureSet, load_features
from schemas.files import CheckedFile, FileEntry, ListFiles, read_files
from schemas.layout import (
    BLOCK,
    BLOCKS,
    FILES,
    JOB,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    TRAIN,
    access_path,
    edges_path,
    index_path,
    num_unique_column,
)
from schemas.manifest import (
    DatasetManifest,
    IndexManifest,
    SegmentManifest,
    previous_names,
    read_dataset,
    read_index,
    read_segment,
)
from schemas.oracle import from_gaps
from schemas.order import Order


@dataclass(frozen=True)
class Segment:
    """One committed segment.

    Attributes:
        directory: where it lies.
        manifest: what it holds.
        files: path to entry, of every file in it.
        blocks: one row per block in training order, columns of `layout.blocks_schema`.
        tombstones: places of its samples that count no more, `schemas.deleted_samples`.
    """

    directory: Path
    manifest: SegmentManifest
    files: dict[str, FileEntry]
    blocks: pa.Table
    tombstones: pa.Table = field(default_factory=empty_tombstones)

    def file(self, path: str, texts_as_codes: bool = False) -> CheckedFile:
        """Return a file of the segment, verified as it is read; see `CheckedFile`.

        Raises:
            SchemaError: the segment does not list it.
        """
        entry = _entry(self.files, path, self.directory)
        return CheckedFile(self.directory, entry, texts_as_codes)

    def positions(self, split: str) -> NDArray[np.int64]:
        """Return the positions of a split's blocks in `blocks`, maybe none."""
        first, count = self.manifest.splits.get(split, (0, 0))
        return np.arange(first, first + count)

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a number column of `blocks` as int64."""
        return self.blocks[name].to_numpy().astype(np.int64)

    def num_unique(self, group: str) -> NDArray[np.int64]:
        """Return the unique tuples of a group in each block."""
        return self.column(num_unique_column(group))

    @cached_property
    def block_ids(self) -> NDArray[np.int64]:
        """Block ids in training order."""
        return self.column(BLOCK)

    def deleted_rows(self, file_index: int, row_group: int) -> NDArray[np.int64]:
        """Return the samples of a row group that count no more, by their place in it, ascending.

        They have weight 0 and are left out wherever samples are handed out one by one.
        """
        if not self.tombstones.num_rows:
            return np.empty(0, np.int64)
        chosen = (self.column("file") == file_index) & (self.column("row_group") == row_group)
        starts = offsets_of(self.column("num_samples")[chosen])[:-1]
        return deleted_rows(self.tombstones, self.block_ids[chosen], starts)

    def access_files(self, table: str) -> list[CheckedFile]:
        """Return the files of a table's access lists, in the order of the training blocks.

        Raises:
            SchemaError: there are none.
        """
        found: list[CheckedFile] = []
        while (path := access_path(table, len(found))) in self.files:
            found.append(self.file(path))
        if not found:
            raise SchemaError(
                f"table must have access lists, got none for {table!r}; rebuild the dataset",
                file=str(self.directory / MANIFEST),
            )
        return found

    def access(self, table: str) -> Jagged:
        """Return the ascending dense numbers that each training block looks up, all at once."""
        return concat([access_lists(file) for file in self.access_files(table)])

    def edge_files(self, table: str) -> list[CheckedFile]:
        """Return the files of a table's rows, in the order of their numbers."""
        found = [self.file(edges_path(table, 0))]
        while (path := edges_path(table, len(found))) in self.files:
            found.append(self.file(path))
        return found

    def rows(self, table: str) -> NDArray[np.int64]:
        """Return the row of each dense number."""
        files = self.edge_files(table)
        cuts = offsets_of(np.array([file.num_rows for file in files])).tolist()
        rows = np.empty(cuts[-1], np.int64)
        for file, start, end in zip(files, cuts[:-1], cuts[1:], strict=True):
            rows[start:end] = edge_rows(file)
            file.close()
        return rows


@dataclass(frozen=True)
class Index:
    """One committed index.

    Attributes:
        directory: where it lies.
        manifest: what it covers.
        files: path to entry, of every file in it.
    """

    directory: Path
    manifest: IndexManifest
    files: dict[str, FileEntry]

    def distance_files(self, table: str) -> list[CheckedFile]:
        """Return the files of a table's next uses, in the order of the steps."""
        found: list[CheckedFile] = []
        while (path := index_path(table, len(found))) in self.files:
            found.append(CheckedFile(self.directory, self.files[path]))
        return found

    def steps(self, table: str) -> ListFiles:
        """Return the int32 next-use distances of each step, decoded as steps are asked for."""
        return ListFiles(self.distance_files(table), step_distances)

    def distances(self, table: str) -> Jagged:
        """Return the next-use distance of each entry of each step, int32, all at once."""
        return concat([step_distances(file) for file in self.distance_files(table)])


def access_lists(file: CheckedFile) -> Jagged:
    """Decode a file of access lists: for each block its ascending dense numbers."""
    return from_gaps(jagged_of(file.read(["gaps"])["gaps"]))


def edge_rows(file: CheckedFile) -> NDArray[np.int64]:
    """Decode the rows of a file of edges."""
    return file.read(["row"])["row"].to_numpy()


def step_distances(file: CheckedFile) -> Jagged:
    """Decode a file of an index: for each step the distances of its entries."""
    return jagged_of(file.read(["distances"])["distances"])


@dataclass(frozen=True)
class Dataset:
    """A dataset whose manifests, job and schema have been verified.

    Attributes:
        directory: its root.
        manifest: the root manifest.
        job: the job that it was built by.
        features: its columns and their roles.
        segments: in order.
        indexes: the first is the default.
        unselected: segments left out by `select_segments`.
    """

    directory: Path
    manifest: DatasetManifest
    job: Job
    features: FeatureSet
    segments: tuple[Segment, ...]
    indexes: tuple[Index, ...]
    unselected: tuple[Segment, ...] = ()

    def order(self, batch_samples: int, epochs: int, shuffle: str, seed: int) -> Order:
        """Return the global order of a run over the training range.

        Raises:
            SchemaError: `batch_samples` is no multiple of the block size.
        """
        block = self.job.data.block_samples
        if batch_samples % block:
            raise SchemaError(
                f"batch_samples must be a multiple of block_samples, got {batch_samples} and "
                f"{block}; use {max(1, batch_samples // block) * block}"
            )
        config = type(self.job.data.oracle.order)(
            shuffle="blocks" if shuffle == "blocks" else "none", seed=seed
        )
        counts = tuple(len(s.positions("train")) for s in self.segments)
        return Order(counts, batch_samples // block, epochs, config)

    def index_for(self, order: Order) -> Index:
        """Return the index that was built for an order.

        Raises:
            SchemaError: there is none; the message has the command that builds it.
        """
        wanted = {
            "batch_samples": order.blocks_per_batch * self.job.data.block_samples,
            "epochs": order.epochs,
            "shuffle": order.config.shuffle,
            "seed": order.config.seed,
        }
        closest: list[str] | None = None
        for index in self.indexes:
            different = self._differences(index, wanted)
            if not different:
                return index
            closest = min(closest or different, different, key=len)
        settings = ", ".join(f"{name}={value}" for name, value in wanted.items())
        flags = " ".join(f"--{n.replace('_', '-')} {value}" for n, value in wanted.items())
        raise SchemaError(
            f"dataset must have an index for {settings}, got {', '.join(closest or ['none'])}; run "
            f"python -m pipelines oracle {self.directory} --reindex {flags}{self._of_chosen}",
            file=str(self.directory / MANIFEST),
        )

    def _differences(self, index: Index, wanted: Mapping[str, int | str]) -> list[str]:
        """Return what an index is for in the place of what is wanted; nothing where it fits."""
        own = {name: getattr(index.manifest, name) for name in wanted}
        different = [f"{name}={own[name]}" for name in wanted if own[name] != wanted[name]]
        if index.manifest.segments != tuple(s.manifest.id for s in self.segments):
            different.append(f"one of {len(index.manifest.segments)} segments")
        return different

    @property
    def _of_chosen(self) -> str:
        if not self.unselected:
            return ""
        return f" --segments {','.join(s.manifest.id for s in self.segments)}"


def _entry(files: dict[str, FileEntry], path: str, directory: Path) -> FileEntry:
    if path not in files:
        raise SchemaError(
            f"file must be listed, got {path!r}; rebuild the dataset", file=str(directory / FILES)
        )
    return files[path]


def verify_file(path: Path, sha256: str) -> Path:
    """Return the path after comparing the file's bytes with their hash.

    Raises:
        SchemaError: the file is missing or has changed.
    """
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise SchemaError(
            "file must exist, got none; restore it or rebuild the dataset", file=str(path)
        ) from error
    if found != sha256:
        raise SchemaError(
            f"file must have sha256 {sha256[:12]}, got {found[:12]}; "
            "restore it or rebuild the dataset",
            file=str(path),
        )
    return path


def versioned_path(path: Path, sha256: str) -> Path:
    """Return the file beside `path` that keeps one version of it."""
    return path.with_name(f"{path.name}.{sha256[:12]}")


def verify_version(path: Path, sha256: str) -> Path:
    """Return a root file in the version that the root manifest names.

    While a root is replaced, or when that was cut short, the file may be of
    the manifest before or after; then the version beside it counts.

    Raises:
        SchemaError: neither has the content.
    """
    try:
        return verify_file(path, sha256)
    except SchemaError:
        if not versioned_path(path, sha256).exists():
            raise
    return verify_file(versioned_path(path, sha256), sha256)


def open_segment(
    directory: Path, manifest: SegmentManifest, tombstones: pa.Table | None = None
) -> Segment:
    """Open a segment whose manifest has been verified.

    Args:
        directory: where it lies.
        manifest: what it holds.
        tombstones: of its samples; none when None.
    """
    files = read_files(verify_file(directory / FILES, manifest.files_sha256))
    blocks = pq.read_table(verify_file(directory / BLOCKS, manifest.blocks_sha256), memory_map=True)
    return Segment(
        directory, manifest, files, blocks, empty_tombstones() if tombstones is None else tombstones
    )


def open_dataset(path: str | Path) -> Dataset:
    """Open a dataset; everything is verified now but data files, which are as they are read.

    Raises:
        SchemaError: a manifest is missing, a byte has changed, or the format is another one.
    """
    root = Path(path)
    manifest = read_dataset(root)
    job = load_job(verify_version(root / JOB, manifest.job_sha256), stored=True)
    features = load_features(verify_version(root / SCHEMA, manifest.schema_sha256))
    tombstones = read_tombstones(root, manifest.tombstones_sha256)
    segments = tuple(
        open_segment(
            root / SEGMENTS / r.id,
            read_segment(root / SEGMENTS / r.id, r),
            tombstones_of_segment(tombstones, r.id),
        )
        for r in manifest.segments
    )
    indexes: list[Index] = []
    for reference in manifest.indexes:
        found = read_index(root / reference.id, reference)
        files = read_files(verify_file(root / reference.id / FILES, found.files_sha256))
        indexes.append(Index(root / reference.id, found, files))
    return Dataset(root, manifest, job, features, segments, tuple(indexes))


# Some segments of a dataset, as a dataset of their own: what training day by day is given.
#
# Nothing is copied and no file is made. An order, an index, a plan and a ledger over the chosen
# segments are those of a dataset that has no others, so each keeps its meaning: steps count from
# 0, and an index counts when it was made for exactly these segments.


def select_segments(dataset: Dataset, wanted: Sequence[str]) -> Dataset:
    """Return a dataset of the segments of some names, in dataset order.

    Args:
        dataset: open dataset.
        wanted: ids of segments, or their days; each at least once.

    Raises:
        SchemaError: the dataset has no segment of a name; names those it has.
    """
    for name in wanted:
        if not any(name in _names_of(segment) for segment in dataset.segments):
            known = ", ".join(_names_of(segment)[-1] for segment in dataset.segments[-3:])
            raise SchemaError(
                f"segment must be of the dataset, got {name!r}; the last are {known}",
                file=str(dataset.directory / MANIFEST),
            )
    return _where(dataset, lambda segment: not set(_names_of(segment)).isdisjoint(wanted))


def select_segments_by_hash(dataset: Dataset, wanted: Sequence[str]) -> Dataset:
    """Return a dataset of the segments whose manifests have these hashes.

    Raises:
        SchemaError: one is not there any more.
    """
    hashes = segment_hashes(dataset)
    for sha256 in wanted:
        if sha256 not in hashes.values():
            raise SchemaError(
                f"dataset must hold the segments of the run, got none with sha256 {sha256[:12]}; "
                "a new version has replaced it: train a new run",
                file=str(dataset.directory / MANIFEST),
            )
    return _where(dataset, lambda segment: hashes[segment.manifest.id] in wanted)


def segment_hashes(dataset: Dataset) -> dict[str, str]:
    """Return the hash of the manifest of each segment, by id."""
    return {reference.id: reference.manifest_sha256 for reference in dataset.manifest.segments}


def all_segment_hashes(dataset: Dataset) -> dict[str, frozenset[str]]:
    """Return by id those hashes, and the ones from before ids were forgotten in a segment."""
    lineage = dataset.manifest.lineage
    return {
        name: previous_names(lineage, name) | {sha256}
        for name, sha256 in segment_hashes(dataset).items()
    }


def _names_of(segment: Segment) -> tuple[str, ...]:
    """Return what a segment is called: its id, and its day if it has one."""
    manifest = segment.manifest
    return (manifest.id,) if manifest.day is None else (manifest.id, manifest.day)


def _where(dataset: Dataset, wanted: Callable[[Segment], bool]) -> Dataset:
    chosen = tuple(segment for segment in dataset.segments if wanted(segment))
    left = tuple(segment for segment in dataset.segments if not wanted(segment))
    ids = _ids(chosen)
    root = dataset.manifest
    segments = tuple(reference for reference in root.segments if reference.id in ids)
    return replace(
        dataset,
        manifest=replace(root, segments=segments),
        segments=chosen,
        unselected=(*dataset.unselected, *left),
    )


def _ids(segments: Iterable[Segment]) -> frozenset[str]:
    return frozenset(segment.manifest.id for segment in segments)


# Columns that were declared after a segment was built: what the segment answers for them.
#
# Types come from the manifests of the segments that have the column, values from the default that
# the schema declares; a column without one is null. A table that only such columns look into has
# no rows in the segment.


def type_name(kind: pa.DataType) -> str:
    """Return the word for a column's Arrow type; lists of any width have one word.

    Example:
        >>> type_name(pa.large_list(pa.int64())), type_name(pa.timestamp("us"))
        ('list<int64>', 'timestamp[us]')
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    return "string" if pa.types.is_large_string(kind) else str(kind)


def type_from_name(name: str) -> pa.DataType:
    """Undo `type_name`; a list is a large one.

    Raises:
        SchemaError: there is no such type.
    """
    if name.startswith("list<") and name.endswith(">"):
        return pa.large_list(type_from_name(name[5:-1]))
    try:
        return pa.type_for_alias(name)
    except ValueError as error:
        raise SchemaError(
            f"column type must be known, got {name!r}; rebuild the dataset"
        ) from error


def column_types(dataset: Dataset) -> dict[str, str]:
    """Return the type of every column that some segment has, chosen or not."""
    found: dict[str, str] = {}
    for segment in (*dataset.unselected, *dataset.segments):
        found.update(segment.manifest.columns)
    return found


def missing_column_defaults(dataset: Dataset, segment: Segment) -> dict[str, pa.Scalar]:
    """Return what a segment answers for each column that it was built without."""
    features = {f.name: f for f in dataset.features.features}
    return {
        name: pa.scalar(features[name].default if name in features else None, type_from_name(kind))
        for name, kind in column_types(dataset).items()
        if name not in segment.manifest.columns
    }


def read_with_defaults(
    read: Callable[[list[str]], pa.Table], columns: Sequence[str], absent: Mapping[str, pa.Scalar]
) -> pa.Table:
    """Return columns of a file, those that it lacks as constants.

    Args:
        read: returns the given columns of the file.
        columns: wanted ones, in order; at least one is stored.
        absent: what `missing_column_defaults` gave.
    """
    stored = read([c for c in columns if c not in absent])
    for name in (c for c in columns if c in absent):
        stored = stored.append_column(name, constant_column(absent[name], stored.num_rows))
    return stored.select(list(columns))


def constant_column(value: pa.Scalar, num_rows: int) -> pa.Array:
    """Return a column that holds one value, or null, in every row."""
    return pa.repeat(value, num_rows) if value.is_valid else pa.nulls(num_rows, value.type)


def read_accesses(
    dataset: Dataset, segment: Segment, table: str
) -> tuple[Jagged, NDArray[np.int64]]:
    """Return a segment's access lists of a table and the row of each of its numbers.

    A segment that was built before any feature of the table was declared looks nothing up.
    """
    if not has_accesses(dataset, segment, table):
        num_blocks = len(segment.positions(TRAIN))
        return Jagged(np.empty(0, np.int64), np.zeros(num_blocks + 1, np.int64)), np.empty(
            0, np.int64
        )
    return segment.access(table), segment.rows(table)


def has_accesses(dataset: Dataset, segment: Segment, table: str) -> bool:
    """Tell whether a segment has access lists of a table: it has one of its features."""
    absent = missing_column_defaults(dataset, segment)
    features = dataset.job.data.tables[table].features
    return not features or not all(f in absent for f in features)
