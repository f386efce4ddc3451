"""Rewrite segments without deleted samples."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.clustering.part import deserialize_results
from pipelines.clustering.reader import read_sample_column, row_groups
from pipelines.clustering.writer import choose_segment_layout
from pipelines.quality.gate_files import parse_schema, pass_gate
from pipelines.runners import runner_module
from pipelines.samples.event_join import write_late
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, compact, distinct, hash_column
from pipelines.sources.rejects import (
    Reject,
    RejectCounts,
    merge_counts,
    rejects_from_table,
    rejects_table,
    write_rejects,
)
from pipelines.sources.rows import ORIGIN
from pipelines.table.commit import commit_root, finish_segment, set_segment_id
from pipelines.table.delete import (
    drop_rejects,
    expired_segments,
    id_column,
    id_type,
    keep_times,
    read_ids,
    remove_tombstones,
    write_tombstones,
)
from pipelines.table.indexes import build_index
from pipelines.table.locks import locked, remove_stale, scratch_directory
from pipelines.table.publish import default_order, indexed_orders, link
from pipelines.table.vacuum import remove_unused, unnamed_directories
from pipelines.table.view import write_view
from schemas.arrays import comparable_tuple, hash_keys, is_list, numpy_of, offsets_of, one_chunk
from schemas.config.job import DataConfig, Job
from schemas.dataset import Dataset, Segment, open_dataset, verify_version
from schemas.deleted_samples import merge_tombstones, read_tombstones
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.fitted import load_vocabulary_versions
from schemas.group_files import group_schema, read_group
from schemas.layout import (
    BLOCK,
    EVENTS,
    JOB,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    inverse_column,
    late_path,
    samples_path,
)
from schemas.manifest import (
    FORGOTTEN_PREFIX,
    Reference,
    SegmentManifest,
    hash_of,
    read_dataset,
    read_segment,
    replace_bytes,
    write_manifest,
)
from schemas.vocabulary import VOCABULARIES, encode_table, version_path


@dataclass(frozen=True, slots=True)
class VocabularyVersions:
    """Versions of vocabularies that are to be replaced.

    Attributes:
        paths: path of each to that of the file in its place.
        files: path of each new file to its bytes.
        hashes: path of each new file to its sha256.
    """

    paths: Mapping[str, str]
    files: Mapping[str, bytes]
    hashes: Mapping[str, str]

    def renamed(self, learned: Mapping[str, str]) -> dict[str, str]:
        """Return the files that a segment names from here on."""
        found = {self.paths.get(path, path): digest for path, digest in learned.items()}
        return {path: self.hashes.get(path, digest) for path, digest in sorted(found.items())}


def blank_vocabularies(dataset: Dataset) -> VocabularyVersions:
    """Return the versions of vocabularies with an entry that no sample left has."""
    paths: dict[str, str] = {}
    files: dict[str, bytes] = {}
    hashes: dict[str, str] = {}
    learned = {p: h for s in dataset.segments for p, h in s.manifest.learned.items()}
    for name, config in dataset.job.data.vocabularies.items():
        versions = load_vocabulary_versions(dataset.directory, learned, name)
        lost = _lost(dataset, config.columns) if versions else None
        old = sorted(p for p in learned if p.startswith(f"{VOCABULARIES}/{name}/"))
        for number, (path, table) in enumerate(zip(old, versions, strict=True)):
            gone = _is_in(table["value"], lost)
            if not gone.any():
                continue
            data = encode_table(_blanked(table, gone))
            paths[path] = version_path(name, number, data)
            files[paths[path]] = data
            hashes[paths[path]] = sha256(data).hexdigest()
    return VocabularyVersions(paths, files, hashes)


def _blanked(table: pa.Table, gone: np.ndarray) -> pa.Table:
    """Return a version without the values of some entries; a null keeps the row's number."""
    mask = pa.array(gone)
    null, zero = pa.scalar(None, table["value"].type), pa.scalar(0, pa.int64())
    columns = {name: table[name] for name in table.column_names}
    columns["value"] = pc.if_else(mask, null, table["value"])
    columns["count"] = pc.if_else(mask, zero, table["count"])
    return pa.table(columns, schema=table.schema)


def _is_in(values: pa.ChunkedArray, wanted: pa.Array | None) -> np.ndarray:
    if wanted is None or not len(wanted):
        return np.zeros(len(values), bool)
    found = pc.is_in(one_chunk(values), value_set=wanted.cast(values.type), skip_nulls=True)
    return np.asarray(found.to_numpy(zero_copy_only=False))


def _lost(dataset: Dataset, columns: tuple[str, ...]) -> pa.Array | None:
    """Return the values that forgotten samples have in some columns, and no other sample."""
    forgotten, left = [], []
    for column in columns:
        for segment in dataset.segments:
            if column not in segment.manifest.columns:
                continue
            for values, rows in _columns(dataset, segment, column):
                is_gone = np.zeros(len(values), bool)
                is_gone[rows] = True
                forgotten.append(_flat(values.filter(pa.array(is_gone))))
                left.append(_flat(values.filter(pa.array(~is_gone))))
    if not any(len(f) for f in forgotten):
        return None
    gone, kept = (pc.unique(pa.chunked_array(arrays)) for arrays in (forgotten, left))
    return gone.filter(pc.invert(pc.is_in(gone, value_set=kept)))


def _columns(
    dataset: Dataset, segment: Segment, column: str
) -> Iterator[tuple[pa.Array, np.ndarray]]:
    for place in row_groups(segment):
        values = read_sample_column(segment, *place, dataset.job.data, column)
        yield values, segment.deleted_rows(*place)


def _flat(values: pa.Array) -> pa.Array:
    """Return values, of lists their entries, as int64 or string; nulls left out."""
    flat = values.flatten() if is_list(values.type) else values
    kind = pa.int64() if pa.types.is_integer(flat.type) else pa.string()
    return flat.drop_null().cast(kind)


def write_versions(dataset: Path, versions: VocabularyVersions) -> None:
    """Write the new files beside the old ones; no root names them yet."""
    for path, data in versions.files.items():
        (dataset / path).parent.mkdir(parents=True, exist_ok=True)
        if not (dataset / path).exists():
            replace_bytes(dataset / path, data)


def remove_versions(dataset: Dataset) -> None:
    """Remove the files that other ones have taken the place of.

    Versions behind those that are named belong to a segment that is being built, and stay.
    """
    named = {p for s in dataset.segments for p in s.manifest.learned}
    for name in dataset.job.data.vocabularies:
        mine = sorted(p for p in named if p.startswith(f"{VOCABULARIES}/{name}/"))
        for path in sorted((dataset.directory / VOCABULARIES / name).glob("*.parquet")):
            relative = str(path.relative_to(dataset.directory))
            if relative not in named and int(path.name.partition("-")[0]) < len(mine):
                path.unlink(missing_ok=True)


def check_unused(dataset: Dataset) -> None:
    """Refuse to take files away from somebody who trains on them.

    Raises:
        SchemaError: a segment or an index of the dataset is held, maybe in a version that was
            replaced, or the filesystem has no locks.
    """
    named = [part.directory for part in (*dataset.indexes, *dataset.segments)]
    segments, indexes = unnamed_directories(dataset.directory)
    for folder in (*named, *segments, *indexes):
        try:
            with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError as error:
            raise _held(dataset.directory, folder) from error


def _held(dataset: Path, folder: Path) -> SchemaError:
    return SchemaError(
        f"dataset must not be in use while it is rewritten, got {folder.name}, which "
        "a run holds; end the run, or try again when it is done",
        file=str(dataset),
    )


def remove_unnamed(directory: Path) -> int:
    """Remove segments, indexes, versions and workplaces that no manifest names.

    What a build that is under way holds stays: its workplaces are hidden and locked.

    Returns:
        How many directories were removed.

    Raises:
        SchemaError: somebody holds one of them since a moment ago; all others are gone.
    """
    with locked(directory):  # whoever gives a segment its name holds it until the root names it
        dataset = open_dataset(directory)
        segments, indexes = unnamed_directories(directory)
        unnamed = [*segments, *indexes]
        held = [folder for folder in unnamed if remove_unused(folder) is None]
        refused = sorted(path for path in directory.glob(".refused-*") if path.is_dir())
        for path in refused:
            shutil.rmtree(path)
        remove_versions(dataset)
        remove_tombstones(directory, {dataset.manifest.tombstones_sha256})
        remove_stale(directory, ".index.*")
    with locked(directory / SEGMENTS):
        remove_stale(directory / SEGMENTS, ".*")
    if held:
        raise _held(directory, held[0])
    return len(unnamed) + len(refused)


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
        forgotten = self.segment.deleted_rows(self.file_index, row_group)
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


def remaining_parts(segment: Segment, data: DataConfig) -> list[StoredPart]:
    """Return the parts of a segment that have a sample left, in their order."""
    numbers = sorted(set(segment.column("file").tolist()))
    parts = [StoredPart(segment, number, data) for number in numbers]
    return [part for part in parts if any(True for _ in part)]


COUNTED = (
    "num_samples",
    "num_sessions",
    "num_rejects",
    "num_source_rows",
    "dataset_bytes",
    "oracle_bytes",
    "splits",
    "groups",
    "tables",
    "blocks_sha256",
    "files_sha256",
    "columns",
    "learned",
)
"""What a rewriting changes in a segment's manifest, beside its id; the rest stays as it was."""


@dataclass(frozen=True, slots=True)
class SegmentCompaction:
    """What is to be written again.

    Attributes:
        segment: an open segment.
        building: directory to write to.
        texts: ids as texts; lines of `rejects/` and `late/` that contain one are left out; all of
            them when None.
        learned: files of what transforms learned, path to sha256.
        beam_args: Beam options.
    """

    segment: Segment
    building: Path
    texts: frozenset[str] | None
    learned: Mapping[str, str]
    beam_args: list[str]


def compact_segment(dataset: Dataset, rewriting: SegmentCompaction) -> bool:
    """Write a segment again, all but its final name and anomalies.

    Returns:
        Whether any sample is left; nothing is written otherwise.
    """
    segment, building = rewriting.segment, rewriting.building
    data = stored_data(dataset.job, segment)
    parts = remaining_parts(segment, data)
    if not parts:
        return False
    building.mkdir(parents=True)
    features = stored_features(dataset.features, segment)
    pins = choose_segment_layout(parts[0], data, num_parts=len(parts))
    rewrite_parts = runner_module("compact").rewrite_parts
    found = rewrite_parts(building, parts, pins, features, data.tables, rewriting.beam_args)
    rejects = _write_rejects(segment, building, rewriting.texts)
    _copy_others(rewriting)
    m = segment.manifest
    finish_segment(
        building,
        m.id,
        deserialize_results(found["parts"]),
        rejects,
        dict(found["tables"]),
        m.listing,
        (m.job_sha256, m.schema_sha256),
        data,
        features,
        rewriting.learned,
    )
    keep_times(segment, building)
    return True


def _write_rejects(segment: Segment, building: Path, texts: frozenset[str] | None) -> RejectCounts:
    """Write the rejects in which no forgotten id stands, file by file."""
    paths = sorted(path for path in segment.files if path.startswith("rejects/"))
    tables = (rejects_table(_left(segment, path, texts)) for path in paths)
    return merge_counts(write_rejects(building, n, [table]) for n, table in enumerate(tables))


def _left(segment: Segment, path: str, texts: frozenset[str] | None) -> list[Reject]:
    """Return the lines of a file of rejects or late events in which no forgotten id stands."""
    if texts is None:
        return []
    rows = rejects_from_table(segment.file(path).read())
    return [r for r in rows if not any(t in r.value or t in r.reason for t in texts)]


def _copy_others(rewriting: SegmentCompaction) -> None:
    """Take over what counts and names no sample, and events that came late."""
    segment = rewriting.segment
    if EVENTS in segment.files:
        pq.write_table(segment.file(EVENTS).read(), rewriting.building / EVENTS)
    for path in segment.files:
        number = path.removeprefix("late/").removesuffix(".parquet")
        if path.startswith("late/") and path == late_path(int(number)):
            write_late(rewriting.building, int(number), _left(segment, path, rewriting.texts))


def link_segment(segment: Segment, building: Path) -> None:
    """Make a segment of the same files: links, to be given another manifest."""
    for path in sorted(p for p in segment.directory.rglob("*") if p.is_file()):
        place = building / path.relative_to(segment.directory)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.name == MANIFEST:
            shutil.copy(path, place)
        else:
            os.link(path, place)


def rename_segment(
    before: SegmentManifest, building: Path, learned: Mapping[str, str]
) -> Reference:
    """Write the final manifest: place and origin of the old segment, an id of its own.

    The id is a hash of the old one and of the new content; of what was forgotten it says nothing.

    Returns:
        The id, and the hash of the manifest.
    """
    made = replace(read_segment(building), learned=dict(learned))
    position, _, key = before.id.partition("-")
    content = [key, made.blocks_sha256, made.files_sha256, dict(learned)]
    name = f"{position}-{hash_of(content)[:12]}"
    counted = {field: getattr(made, field) for field in COUNTED}
    return Reference(
        id=name, manifest_sha256=write_manifest(building, replace(before, id=name, **counted))
    )


def id_texts(values: Sequence[Any]) -> frozenset[str]:
    """Return ids as they stand in texts."""
    return frozenset(str(value) for value in values if value is not None and str(value))


# The segments of a dataset written again without what was forgotten, in one replacement.
#
# Everything is made beside the dataset first: segments, then a staged dataset of links in which
# all indexes are built. Under the dataset's lock, if its root is still the one that was seen, all
# gets its name and the root is replaced; then the old files go. Whatever dies before leaves the
# dataset as it was, and what dies after is cleared by the next rewriting.

WORKPLACES = ".forget.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRequest:
    """What is to be written again.

    Attributes:
        dataset: directory of the dataset.
        older_than: least age of a tombstone for its segment to be written again; none is for its
            tombstones when None.
        ids: text or Parquet file of ids that must leave rejects and late events, too, or None.
        column: what these are values of; the session key when None.
        rejects_older_than: least age of rejects and late events that go as a whole; none do when
            None.
        at: now, UTC.
        beam_args: Beam options.
        attempt: name of this attempt, unique among those that may run at once.
        progress: called with each progress message, one line.
    """

    dataset: Path
    older_than: timedelta | None
    ids: Path | None
    column: str | None
    rejects_older_than: timedelta | None = None
    at: datetime
    beam_args: list[str]
    attempt: str
    progress: Callable[[str], None] = lambda _: None


def compact_dataset(request: CompactionRequest) -> dict[str, Any]:
    """Write the touched segments of a dataset again and remove every old file.

    Returns:
        `segments`: old id to new one, null for one of which nothing is left; `num_samples` that are
        gone; `removed`: how many files and directories that no manifest names.

    Raises:
        SchemaError: somebody trains on the dataset, or no sample would be left.
    """
    while True:
        dataset = open_dataset(request.dataset)
        check_unused(dataset)
        due = due_segments(dataset, request)
        renamed: dict[str, str | None] = {}
        expired = _expired(dataset, request)
        if due or expired:
            done = _rewritten(dataset, due, expired, request)
            if done is None:
                continue  # another process was faster
            renamed = done
        gone = sum(s.manifest.num_samples for s in dataset.segments) if due else 0
        left = open_dataset(request.dataset)
        if due:
            gone -= sum(s.manifest.num_samples for s in left.segments)
        return {
            "segments": renamed,
            "num_samples": gone,
            "removed": remove_unnamed(request.dataset),
        }


def due_segments(dataset: Dataset, request: CompactionRequest) -> list[Segment]:
    """Return the segments with a tombstone that is old enough, or with an id in their rejects."""
    if request.older_than is None:
        return []
    limit = pa.scalar((request.at - request.older_than).replace(tzinfo=None), pa.timestamp("us"))
    texts = _given_texts(dataset, request)

    def is_due(segment: Segment) -> bool:
        times = segment.tombstones["forgotten_at"]
        return bool(pc.any(pc.less_equal(times, limit)).as_py()) or _says(segment, texts)

    return [segment for segment in dataset.segments if is_due(segment)]


def _expired(dataset: Dataset, request: CompactionRequest) -> frozenset[str]:
    """Return the ids of the segments whose rejects and late events go."""
    if request.rejects_older_than is None:
        return frozenset()
    return expired_segments(dataset, request.at - request.rejects_older_than)


def _given_texts(dataset: Dataset, request: CompactionRequest) -> frozenset[str]:
    if request.ids is None:
        return frozenset()
    column = id_column(dataset, request.column)
    return id_texts(read_ids(request.ids, column, id_type(dataset, column)).to_pylist())


def _says(segment: Segment, texts: frozenset[str]) -> bool:
    """Tell whether one of some texts stands in the rejects or late events of a segment."""
    if not texts:
        return False
    for path in segment.files:
        if path.startswith(("rejects/", "late/")):
            table = segment.file(path).read()
            lines = [*table["value"].to_pylist(), *table["reason"].to_pylist()]
            if any(text in line for line in lines for text in texts):
                return True
    return False


def deleted_texts(dataset: Dataset, segment: Segment) -> frozenset[str]:
    """Return the values, as texts, by which the samples of a segment were forgotten.

    Of a list nobody knows any more which entry it was: there the ids must be given.
    """
    found: set[str] = set()
    for column in sorted(set(segment.tombstones["reason"].to_pylist())):
        for place in row_groups(segment):
            rows = segment.deleted_rows(*place)
            values = read_sample_column(segment, *place, dataset.job.data, column)
            if not is_list(values.type):
                found |= id_texts(pc.unique(values.take(pa.array(rows))).to_pylist())
    return frozenset(found)


def _rewritten(
    dataset: Dataset, due: list[Segment], expired: frozenset[str], request: CompactionRequest
) -> dict[str, str | None] | None:
    """Write segments again and replace the root; None when that has changed meanwhile."""
    place = request.dataset / SEGMENTS / f".forget.{request.attempt}"
    with scratch_directory(place, WORKPLACES):
        versions = blank_vocabularies(dataset) if due else VocabularyVersions({}, {}, {})
        made = _segments(dataset, due, expired, versions, place, request)
        references = [r for r in made.values() if r is not None]
        if not references:
            raise SchemaError(
                "dataset must keep a sample, got none that is not forgotten; remove the dataset",
                file=str(request.dataset),
            )
        write_versions(request.dataset, versions)
        indexes = _indexes(dataset, references, place, request)
        renamed = {
            old: None if new is None else new.id
            for old, new in made.items()
            if new is None or new.id != old
        }
        if not _replace(dataset, renamed, due, references, indexes, place):
            return None
    return renamed


def _segments(
    dataset: Dataset,
    due: list[Segment],
    expired: frozenset[str],
    versions: VocabularyVersions,
    place: Path,
    request: CompactionRequest,
) -> dict[str, Reference | None]:
    """Write what is due, in order; return old id to the segment in its place."""
    names = {s.manifest.id for s in due}
    given = _given_texts(dataset, request)
    gate = dataset.job.data.gate and replace(dataset.job.data.gate, action="warn")
    schema = parse_schema(_schema_bytes(dataset))
    found: dict[str, Reference | None] = {}
    earlier: Path | None = None
    for segment, reference in zip(dataset.segments, dataset.manifest.segments, strict=True):
        before, building = segment.manifest, place / segment.manifest.id
        learned = versions.renamed(before.learned)
        if before.id in names:
            request.progress(f"segment {before.id}: writing it again")
            said = given | deleted_texts(dataset, segment)
            texts = None if before.id in expired else said
            rewriting = SegmentCompaction(segment, building, texts, learned, request.beam_args)
            if not compact_segment(dataset, rewriting):
                found[before.id] = None
                continue
        elif before.id in expired or learned != dict(before.learned):
            link_segment(segment, building)
        else:
            found[before.id], earlier = reference, segment.directory
            continue
        if before.id in expired and before.id not in names:
            drop_rejects(building)
        if before.id in expired | names:
            aside = place / "refused"
            text = pass_gate(building, earlier, schema, gate, aside, request.progress)
            set_segment_id(building, before.id, text)
        made = rename_segment(before, building, learned)
        building.rename(place / made.id)
        found[before.id], earlier = made, place / made.id
    return found


def _schema_bytes(dataset: Dataset) -> bytes:
    root = dataset.directory
    return verify_version(root / SCHEMA, dataset.manifest.schema_sha256).read_bytes()


def _job_bytes(dataset: Dataset) -> bytes:
    root = dataset.directory
    return verify_version(root / JOB, dataset.manifest.job_sha256).read_bytes()


def _indexes(
    dataset: Dataset, references: list[Reference], place: Path, request: CompactionRequest
) -> list[Reference]:
    """Build every index of the dataset over its segments as they will be."""
    stage = place / "dataset"
    (stage / SEGMENTS).mkdir(parents=True)
    for reference in references:
        new = place / reference.id
        old = dataset.directory / SEGMENTS / reference.id
        link(stage / SEGMENTS / reference.id, new if new.exists() else old)
    name = dataset.manifest.name
    commit_root(stage, name, _job_bytes(dataset), _schema_bytes(dataset), references, ())
    staged = open_dataset(stage)
    orders = dict.fromkeys([default_order(staged), *indexed_orders(staged, dataset)])
    building = stage / ".index.building"
    return [build_index(staged, order, building, request.beam_args) for order in orders]


def _replace(
    dataset: Dataset,
    renamed: Mapping[str, str | None],
    due: list[Segment],
    references: list[Reference],
    indexes: list[Reference],
    place: Path,
) -> bool:
    """Give everything its name and replace the root, unless that has changed meanwhile."""
    root = dataset.directory
    with locked(root):
        if read_dataset(root) != dataset.manifest:
            return False
        check_unused(dataset)  # a run may have begun meanwhile
        for name, target, made in [
            *((r.id, root / SEGMENTS / r.id, place / r.id) for r in references),
            *((i.id, root / i.id, place / "dataset" / i.id) for i in indexes),
        ]:
            if made.exists() and not (target / MANIFEST).exists():
                assert name == target.name, "a directory is named by its id"
                shutil.rmtree(target, ignore_errors=True)  # a killed attempt's
                made.rename(target)
        sha256 = write_tombstones(root, _tombstones_left(dataset, due, renamed))
        manifest = replace(
            dataset.manifest,
            segments=tuple(references),
            indexes=tuple(indexes),
            lineage=_lineage(dataset, renamed),
            tombstones_sha256=sha256,
        )
        write_manifest(root, manifest)
        write_view(root)
        remove_tombstones(root, {sha256})
    return True


def _tombstones_left(
    dataset: Dataset, due: list[Segment], renamed: Mapping[str, str | None]
) -> pa.Table:
    """Return the tombstones of what was not written again, under their segments' names as now."""
    table = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
    gone = {s.manifest.id for s in due}
    stays = [name not in gone for name in table["segment"].to_pylist()]
    left = table.filter(pa.array(stays, pa.bool_()))
    now = [renamed.get(name) or name for name in left["segment"].to_pylist()]
    return merge_tombstones([left.set_column(0, "segment", pa.array(now, pa.string()))])


def _lineage(dataset: Dataset, renamed: Mapping[str, str | None]) -> dict[str, str]:
    """Return where the dataset came from, with the segments' names as they are now.

    What they were called before stays (`schemas/manifest.py`): who knows them by it finds them.
    """
    now = {old: new or "" for old, new in renamed.items()}
    found = {key: now.get(value, value) for key, value in dataset.manifest.lineage.items()}
    for reference in dataset.manifest.segments:
        if reference.id in now:
            for name in (reference.id, reference.manifest_sha256):
                found[f"{FORGOTTEN_PREFIX}{name}"] = now[reference.id]
    return {key: value for key, value in found.items() if value or key.startswith(FORGOTTEN_PREFIX)}
