"""Open a dataset and select segments; deleted samples; columns that older segments lack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.arrays import Jagged, jagged_of, offsets_of
from presage.schemas.config.job import Job, OrderConfig, parse_job
from presage.schemas.dataset.checked_files import (
    CheckedFile,
    DecodedListCache,
    ListFiles,
    in_turn,
    rows_before,
)
from presage.schemas.dataset.files import FileEntry, decode_parquet, parse_files, read_verified
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    IndexEntry,
    IndexManifest,
    Reference,
    SegmentManifest,
    hash_of,
    new_index,
    previous_names,
    read_index,
    read_root,
    read_segment,
    shuffle_key_of,
)
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.tombstones import (
    NO_TOMBSTONES,
    deleted_rows,
    read_tombstones,
    tombstones_of_segment,
)
from presage.schemas.errors import SchemaError, pluralize, shown
from presage.schemas.features import FeatureSet, parse_features
from presage.schemas.layout import (
    BLOCK,
    BLOCKS,
    EVALUATION,
    FILE_SHIFT,
    FILES,
    JOB,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    TRAIN,
    num_unique_column,
    part_path,
    reuse_schema,
)
from presage.schemas.oracle.next_uses import from_gaps
from presage.schemas.oracle.reuse import reuse_bounds
from presage.schemas.storage.location import Location

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True)
class Segment:
    """One committed segment.

    Attributes:
        reference: its entry in the root manifest.
        tombstones: positions of its deleted samples, see `TOMBSTONES_SCHEMA`.
        lists: access lists and rows of the tables that histories look up, instead of its own.
    """

    directory: Location
    reference: Reference
    manifest: SegmentManifest
    tombstones: pa.Table = field(default_factory=lambda: NO_TOMBSTONES)
    lists: StoredFiles | IndexPart | None = None

    @property
    def id(self) -> str:
        """Position in the dataset, and hash of job, schema and input."""
        return self.reference.id

    @property
    def day(self) -> str | None:
        """Day of its logs, if it has one."""
        return self.reference.day

    @cached_property
    def files(self) -> dict[str, FileEntry]:
        """Path to entry of every file."""
        path = self.directory / FILES
        return parse_files(read_verified(path, self.manifest.files_sha256), path)

    @cached_property
    def blocks(self) -> pa.Table:
        """One row per block in training order, with the columns of `layout.blocks_schema`."""
        return decode_parquet(read_verified(self.directory / BLOCKS, self.manifest.blocks_sha256))

    @cached_property
    def splits(self) -> dict[str, tuple[int, int]]:
        """First position and number of blocks of each split that has blocks.

        Raises:
            SchemaError: those of the manifest are others.
        """
        stored = split_ranges(self.blocks)
        claimed = {name: bounds for name, bounds in self.manifest.splits.items() if bounds[1]}
        if claimed != stored:
            raise SchemaError(
                f"splits differ from those of {BLOCKS}: {shown(claimed)} instead of {stored}; "
                "rebuild it",
                file=str(self.directory / MANIFEST),
            )
        return stored

    def file(self, path: str, texts_as_codes: bool = False, by_column: bool = False) -> CheckedFile:
        """Return a file of the segment; raise SchemaError if the segment does not list it."""
        if path not in self.files:
            raise SchemaError(
                f"file is not listed: {path!r}; rebuild the dataset",
                file=str(self.directory / FILES),
            )
        return CheckedFile(self.directory, self.files[path], texts_as_codes, by_column)

    def positions(self, split: str) -> NDArray[np.int64]:
        """Return the positions of a split's blocks in `blocks`."""
        first, count = self.splits.get(split, (0, 0))
        return np.arange(first, first + count)

    def row_groups(self, split: str) -> bytes:
        """Return the row groups of a split's blocks, as in `Order.row_groups`."""
        positions = self.positions(split)
        keys = (self.column("file") << FILE_SHIFT | self.column("row_group"))[positions]
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[inverse].astype(np.int32).tobytes()

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a numeric column of `blocks` as int64."""
        return self.blocks[name].to_numpy().astype(np.int64)

    def num_unique(self, group: str) -> NDArray[np.int64]:
        """Return the number of unique tuples of a group in each block."""
        return self.column(num_unique_column(group))

    @cached_property
    def block_ids(self) -> NDArray[np.int64]:
        """Block ids in training order."""
        return self.column(BLOCK)

    def deleted_rows(self, file_index: int, row_group: int) -> NDArray[np.int64]:
        """Return the rows of the deleted samples in a row group, ascending.

        They have weight 0 in training and are omitted wherever samples are listed.
        """
        if not self.tombstones.num_rows:
            return np.empty(0, np.int64)
        selected = (self.column("file") == file_index) & (self.column("row_group") == row_group)
        starts = offsets_of(self.column("num_samples")[selected])[:-1]
        return deleted_rows(self.tombstones, self.block_ids[selected], starts)

    @property
    def deleted_samples(self) -> pa.Table:
        """`block` and `sample_index` of each deleted sample, once whatever it was deleted for."""
        return self.tombstones.group_by([BLOCK, "sample_index"]).aggregate([])

    @property
    def num_deleted_per_block(self) -> NDArray[np.int64]:
        """Deleted samples of each block."""
        if not self.tombstones.num_rows:
            return np.zeros(self.blocks.num_rows, np.int64)
        counts = np.zeros(self.blocks.num_rows, np.int64)
        order = np.argsort(self.block_ids)
        blocks = self.deleted_samples[BLOCK].to_numpy()
        np.add.at(counts, order[np.searchsorted(self.block_ids, blocks, sorter=order)], 1)
        return counts

    def access_files(self, table: str) -> list[CheckedFile]:
        """Return the files of a table's access lists, in the order of the training blocks.

        Raises:
            SchemaError: there are none.
        """
        return self._files_of("access", table)

    def edge_files(self, table: str) -> list[CheckedFile]:
        """Return the files of a table's rows, in the order of their numbers."""
        return self._files_of("edges", table)

    def _files_of(self, folder: str, table: str) -> list[CheckedFile]:
        if self.lists is not None and (files := self.lists.of(folder, table)):
            return files
        paths = _parts_in(self.files, folder, table)
        if not paths:
            raise SchemaError(
                f"table has no files in {folder}/: {table!r}; rebuild the dataset",
                file=str(self.directory / MANIFEST),
            )
        return list(map(self.file, paths))

    def rows(self, table: str) -> NDArray[np.int64]:
        """Return the row of each dense number."""
        return _columns(self.edge_files(table), np.int64, "row")[0]


@dataclass(frozen=True)
class StoredFiles:
    """Files below a directory, by path."""

    directory: Location
    files: Mapping[str, FileEntry]

    def of(self, *folders: str) -> list[CheckedFile]:
        """Return the files of all parts in a folder, in order."""
        paths = _parts_in(self.files, *folders)
        return [CheckedFile(self.directory, self.files[path]) for path in paths]


@dataclass(frozen=True)
class IndexPart:
    """The part of an index for one segment."""

    directory: Location
    manifest: IndexManifest

    @cached_property
    def files(self) -> dict[str, FileEntry]:
        """Path to entry of every file."""
        path = self.directory / FILES
        return parse_files(read_verified(path, self.manifest.files_sha256), path)

    def steps(self, table: str, cache: DecodedListCache | None = None) -> ListFiles:
        """Return the int32 next-use distances of each step of the stored epochs, on demand.

        They are those within segment and epoch, in ascending order of the segment's own numbers.
        """
        return ListFiles(self.of(table), step_distances, cache)

    def uses(self, table: str, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the first and last step of the segment that uses each number in an epoch."""
        files = self.of(table, f"uses-{epoch:05d}")
        first, last = _columns(files, np.int32, "first_step", "last_step")
        return first, last

    def reuse(self, table: str, columns: Sequence[str]) -> dict[str, NDArray[np.int32]]:
        """Return columns of the reuse of a table's rows, by step of the stored epochs.

        Columns of distances that the steps of the segment do not have are left out.
        """
        files = self.of(table, "reuse")
        names = set(reuse_schema(reuse_bounds(self.manifest.num_steps)).names)
        stored = [name for name in columns if name in names]
        return dict(zip(stored, _columns(files, np.int32, *stored), strict=True))

    def of(self, *folders: str) -> list[CheckedFile]:
        """Return the files of all parts in a folder, in order."""
        return StoredFiles(self.directory, self.files).of(*folders)


def split_ranges(blocks: pa.Table) -> dict[str, tuple[int, int]]:
    """Return (first position, number of blocks) of each split that has blocks."""
    names = blocks["split"].to_pylist()
    counts = {name: names.count(name) for name in (TRAIN, EVALUATION)}
    return {n: (names.index(n), counts[n]) for n in (TRAIN, EVALUATION) if counts[n]}


def _parts_in(files: Mapping[str, FileEntry], *folders: str) -> list[str]:
    paths = (part_path(number, *folders) for number in count())
    return list(takewhile(files.__contains__, paths))


def _columns(
    files: Sequence[CheckedFile], dtype: type[Number], *names: str
) -> list[NDArray[Number]]:
    """Return columns of consecutive files, joined."""
    for file in files[:1]:
        file.prefetch()
    offsets = rows_before(files).tolist()
    columns = [np.empty(offsets[-1], dtype) for _ in names]
    for file, (start, end) in zip(in_turn(files), pairwise(offsets), strict=True):
        table = file.read(list(names))
        for name, column in zip(names, columns, strict=True):
            column[start:end] = table[name].to_numpy()
    return columns


@dataclass(frozen=True)
class Index:
    """An index over the segments of a dataset, all or selected.

    Attributes:
        directory: directory that holds the parts.
        entry: its settings, and the parts of all segments.
        order: global order over the segments.
        parts: the part of each segment, in dataset order.
    """

    directory: Location
    entry: IndexEntry
    order: Order
    parts: tuple[IndexPart, ...]

    @property
    def oracle_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.manifest.oracle_bytes for part in self.parts)

    def num_accesses(self, table: str) -> int:
        """Return the entries of a table, summed over all steps of the run."""
        per_epoch = [sum(part.manifest.num_accesses.get(table, ())) for part in self.parts]
        return sum(per_epoch) * (self.order.epochs // self.order.distinct_epochs)


def access_lists(file: CheckedFile, row_group: int) -> Jagged:
    """Decode a row group of access lists: the ascending dense numbers of each block."""
    return from_gaps(jagged_of(file.read_row_group(row_group, ["gaps"])["gaps"]))


def step_distances(file: CheckedFile, row_group: int) -> Jagged:
    """Decode a row group of an index: the distances of each step's entries."""
    return jagged_of(file.read_row_group(row_group, ["distances"])["distances"])


@dataclass(frozen=True)
class OpenDataset:
    """A dataset whose manifests, job and schema have been verified.

    Attributes:
        manifest: root manifest.
        job: job that it was built with.
        unselected: segments left out by `select_segments`.
        histories: length and step of the windows that samples see, of `reading_histories`.
    """

    directory: Location
    manifest: DatasetManifest
    job: Job
    features: FeatureSet
    segments: tuple[Segment, ...]
    unselected: tuple[Segment, ...] = ()
    histories: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @property
    def every_segment(self) -> list[Segment]:
        """All segments, selected or not, in order."""
        every = (*self.unselected, *self.segments)
        return sorted(every, key=lambda segment: segment.reference.position)

    @cached_property
    def column_types(self) -> Mapping[str, str]:
        """Type of every column of any segment, selected or not."""
        types: dict[str, str] = {}
        for segment in (*self.unselected, *self.segments):
            types.update(segment.manifest.columns)
        return types

    @cached_property
    def _parts(self) -> dict[Location, IndexPart]:
        """Parts of indexes by directory: their lists of files are read once."""
        return {}

    def order(
        self, batch_samples: int, epochs: int, shuffle: str, seed: int, split: str = TRAIN
    ) -> Order:
        """Return the global order of a run over a split.

        Raises:
            SchemaError: `batch_samples` is not a multiple of the block size.
        """
        block = self.job.data.block_samples
        if batch_samples % block:
            raise SchemaError(
                f"batch_samples must be a multiple of block_samples, got {batch_samples} and "
                f"{block}; use {max(1, batch_samples // block) * block}"
            )
        config = OrderConfig(shuffle="blocks" if shuffle == "blocks" else "none", seed=seed)
        counts = tuple(len(s.positions(split)) for s in self.segments)
        keys = tuple(shuffle_key_of(segment.reference) for segment in self.segments)
        row_groups = tuple(segment.row_groups(split) for segment in self.segments)
        return Order(counts, batch_samples // block, epochs, config, keys, row_groups)

    def index_entry(self, order: Order) -> IndexEntry:
        """Return the index with the settings of an order; one without parts if there is none."""
        samples = order.blocks_per_batch * self.job.data.block_samples
        config = order.config
        new = new_index(samples, order.epochs, config.shuffle, config.seed, self.histories)
        return next((e for e in self.manifest.indexes if e.settings == new.settings), new)

    def complete_indexes(self) -> list[IndexEntry]:
        """Return the indexes of the dataset's accesses that have a part of every segment.

        The default one comes first.
        """
        return [e for e in self.all_complete_indexes() if e.histories == self.histories]

    def all_complete_indexes(self) -> list[IndexEntry]:
        """Return the indexes that have a part of every segment, with and without histories."""
        ids = {segment.id for segment in self.segments}
        return [entry for entry in self.manifest.indexes if ids <= entry.parts.keys()]

    def open_index(self, entry: IndexEntry) -> Index:
        """Open the parts of an index that has one of every segment.

        Raises:
            SchemaError: a file is missing or changed, or belongs to another segment.
        """
        directory = self.directory / entry.id
        order = self.order(entry.batch_samples, entry.epochs, entry.shuffle, entry.seed)
        parts: list[IndexPart] = []
        for segment in (s.reference for s in self.segments):
            reference = entry.parts[segment.id]
            path = directory / reference.directory
            part = self._parts.setdefault(path, IndexPart(path, _committed_part(path, reference)))
            if part.manifest.segment_sha256 != segment.manifest_sha256:
                raise SchemaError(
                    f"part must be of the segment {segment.id} with sha256 "
                    f"{segment.manifest_sha256[:12]}, got {part.manifest.segment_sha256[:12]}; "
                    "restore the dataset",
                    file=str(path / MANIFEST),
                )
            if entry.histories:
                earlier = hash_of_earlier(segment, self.every_segment)
                if part.manifest.earlier_sha256 != earlier:
                    raise SchemaError(
                        f"part for {segment.id} has the events of other earlier segments; remove "
                        f"{path} and run python -m presage.pipelines oracle {self.directory} "
                        "--reindex with its settings",
                        file=str(path / MANIFEST),
                    )
            parts.append(part)
        return Index(directory, entry, order, tuple(parts))

    def index_for(self, order: Order) -> Index:
        """Return the index of an order over the segments.

        Raises:
            SchemaError: it is not built; the message has the command that builds it.
        """
        entry = self.index_entry(order)
        num_parts = sum(segment.id in entry.parts for segment in self.segments)
        if num_parts == len(self.segments) and entry in self.manifest.indexes:
            return self.open_index(entry)
        names = ("batch_samples", "epochs", "shuffle", "seed")
        settings = {name: getattr(entry, name) for name in names}
        closest = [f"parts of {num_parts} of {pluralize(len(self.segments), 'segment')}"]
        if not num_parts:
            differences = [
                [f"{n}={getattr(other, n)}" for n in names if getattr(other, n) != settings[n]]
                for other in self.complete_indexes()
            ]
            closest = min(differences, key=len, default=["none"])
        expected = ", ".join(f"{name}={value}" for name, value in settings.items())
        flags = " ".join(f"--{n.replace('_', '-')} {value}" for n, value in settings.items())
        for name, (length, step) in entry.histories.items():
            expected += f", history {name}={length}:{step}"
            flags += f" --history {name}={length}:{step}"
        raise SchemaError(
            f"dataset has no index for {expected}, closest: {', '.join(closest)}; run python -m "
            f"presage.pipelines oracle {self.directory} --reindex {flags}",
            file=str(self.directory),
        )


def hash_of_earlier(segment: Reference, every: Iterable[Segment]) -> str:
    """Return the hash of the manifests of the segments before one."""
    earlier = [s.reference for s in every if s.reference.position < segment.position]
    return hash_of([reference.manifest_sha256 for reference in earlier])


def reading_histories(dataset: OpenDataset, windows: Mapping[str, tuple[int, ...]]) -> OpenDataset:
    """Return a dataset whose accesses are those of samples that see windows of histories.

    Those are in any complete index with these windows; without one, accesses are of samples alone,
    and no index has the order of a run. `windows` are length and step by name.
    """
    if not windows:
        return dataset
    histories = dict(sorted(windows.items()))
    dataset = replace(dataset, histories=histories)
    if not (complete := dataset.complete_indexes()):
        return dataset
    parts = dataset.open_index(complete[0]).parts
    return replace(dataset, segments=tuple(map(with_lists, dataset.segments, parts)))


def with_lists(segment: Segment, part: IndexPart) -> Segment:
    """Return a segment with the accesses of a part of an index."""
    tables = {**segment.manifest.tables, **part.manifest.tables}
    manifest = replace(segment.manifest, tables=tables)
    return replace(segment, manifest=manifest, lists=part)


def version_name(name: str, sha256: str) -> str:
    """Return the name of the job or schema file with a hash, in a dataset.

    Example:
        >>> version_name("job.yaml", "0123456789abcdef")
        'job.yaml.0123456789ab'
    """
    return f"{name}.{sha256[:12]}"


def read_version(root: Location, name: str, sha256: str) -> bytes:
    """Read the job or schema file that a root manifest names by its hash.

    Raises:
        SchemaError: it is missing or changed.
    """
    return read_verified(root / version_name(name, sha256), sha256)


_OPEN_THREADS = 16


# Committed files do not change: the manifests of segments and of parts of indexes are read once.
committed_segment = lru_cache(maxsize=1 << 14)(read_segment)


_committed_part = lru_cache(maxsize=1 << 14)(read_index)


def open_dataset(path: str | Path | Location) -> OpenDataset:
    """Open the newest version of a dataset.

    The manifests, the job and the schema are verified now, other files when they are read.

    Raises:
        SchemaError: a file is missing or changed, or has another format.
    """
    directory = Location.parse(path)
    root = read_root(directory)
    while True:
        try:
            return open_root(directory, root.manifest)
        except SchemaError:
            newest = read_root(directory)
            if newest.version.number == root.version.number:
                raise
            root = newest  # the other was replaced, and its files may have been removed


def open_root(directory: Location, manifest: DatasetManifest) -> OpenDataset:
    """Open one version of a dataset; raises as `open_dataset`."""
    name = directory / version_name(JOB, manifest.job_sha256)
    job = parse_job(read_verified(name, manifest.job_sha256).decode(), str(name))
    name = directory / version_name(SCHEMA, manifest.schema_sha256)
    features = parse_features(read_verified(name, manifest.schema_sha256).decode(), str(name))
    tombstones = read_tombstones(directory, manifest.tombstones_sha256)
    places = [directory / SEGMENTS / r.directory for r in manifest.segments]
    with ThreadPoolExecutor(_OPEN_THREADS) as pool:
        manifests = list(pool.map(committed_segment, places, manifest.segments))
    segments = tuple(
        Segment(place, reference, segment, tombstones_of_segment(tombstones, reference.id))
        for place, reference, segment in zip(places, manifest.segments, manifests, strict=True)
    )
    return OpenDataset(directory, manifest, job, features, segments)


# Selection of segments, as a dataset of their own, for daily training. Nothing is copied: steps
# count from 0.


def select_segments(dataset: OpenDataset, names: Sequence[str]) -> OpenDataset:
    """Return a dataset of the segments with some ids or days, in dataset order.

    Raises:
        SchemaError: the dataset has no segment of a name.
    """
    for name in names:
        if not any(name in _names_of(segment) for segment in dataset.segments):
            known = ", ".join(_names_of(segment)[-1] for segment in dataset.segments[-3:])
            raise SchemaError(
                f"dataset has no segment {name!r}; the last are {known}",
                file=str(dataset.directory),
            )
    return _where(dataset, lambda segment: not set(_names_of(segment)).isdisjoint(names))


def select_segments_by_hash(dataset: OpenDataset, manifest_hashes: Sequence[str]) -> OpenDataset:
    """Return a dataset of the segments with the given manifest hashes.

    Raises:
        SchemaError: the dataset has no segment with a hash.
    """
    hashes = segment_hashes(dataset)
    for sha256 in manifest_hashes:
        if sha256 not in hashes.values():
            raise SchemaError(
                f"dataset has no segment with sha256 {sha256[:12]}, which the run trained; a new "
                "version has replaced it: train a new run",
                file=str(dataset.directory),
            )
    return _where(dataset, lambda segment: hashes[segment.id] in manifest_hashes)


def segment_hashes(dataset: OpenDataset) -> dict[str, str]:
    """Return the manifest hash of each segment, by id."""
    return {reference.id: reference.manifest_sha256 for reference in dataset.manifest.segments}


def all_segment_hashes(dataset: OpenDataset) -> dict[str, frozenset[str]]:
    """Return the manifest hash and previous names of each segment, by id."""
    lineage = dataset.manifest.lineage
    return {
        name: previous_names(lineage, name) | {sha256}
        for name, sha256 in segment_hashes(dataset).items()
    }


def _names_of(segment: Segment) -> tuple[str, ...]:
    return (segment.id,) if segment.day is None else (segment.id, segment.day)


def _where(dataset: OpenDataset, is_selected: Callable[[Segment], bool]) -> OpenDataset:
    selected = tuple(segment for segment in dataset.segments if is_selected(segment))
    unselected = tuple(segment for segment in dataset.segments if not is_selected(segment))
    ids = {segment.id for segment in selected}
    root = dataset.manifest
    references = tuple(reference for reference in root.segments if reference.id in ids)
    return replace(
        dataset,
        manifest=replace(root, segments=references),
        segments=selected,
        unselected=(*dataset.unselected, *unselected),
    )
