"""Rewrite segments without deleted samples: `pipelines erase --rewrite`.

The new segments and their index parts are written into directories of their own. Then the root is
committed, if it has not changed since, and everything that was replaced is removed. If the process
dies before the commit, the dataset is unchanged; if it dies after it, the next run removes the old
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from pipelines.build_context import beam_build, local_options
from pipelines.clustering.part import build_part, sum_statistics
from pipelines.clustering.writer import SegmentLayout, choose_segment_layout
from pipelines.oracle.numbering import number_table, training_blocks
from pipelines.quality.gate import parse_schema, pass_gate
from pipelines.samples.event_join import write_late
from pipelines.samples.sql import LIST_INDEX
from pipelines.samples.tuples import Tuples, distinct_rows, drop_unused_tuples
from pipelines.sources.raw_rows import ORIGIN
from pipelines.sources.rejects import (
    Reject,
    RejectCounts,
    merge_counts,
    rejects_from_table,
    rejects_table,
    write_rejects,
)
from pipelines.table.commit import (
    anomalies_text_of,
    discard,
    discarded_on_error,
    write_anomalies,
)
from pipelines.table.delete import (
    REJECT_PREFIXES,
    expired_segments,
    id_column,
    id_type,
    read_ids,
    write_tombstones,
)
from pipelines.table.indexes import PartBuilder
from pipelines.table.root import commit_manifest, until_committed, write_copies
from pipelines.table.segment import (
    directories_of,
    finish_segment,
    rewritten_key,
    segment_directory,
)
from pipelines.table.vacuum import check_unused, remove_replaced
from pipelines.transforms.fit import free_path
from schemas.arrays import is_list, one_chunk
from schemas.config.job import DataConfig, Job
from schemas.dataset.files import sha256_of, write_files
from schemas.dataset.fitted import (
    VOCABULARIES,
    encode_table,
    load_vocabulary_versions,
    version_path,
)
from schemas.dataset.group_files import group_schema, read_group
from schemas.dataset.layout import (
    BLOCK,
    BLOCKS,
    EVENTS,
    FILES,
    MANIFEST,
    SCHEMA,
    SEGMENTS,
    inverse_column,
    part_path,
)
from schemas.dataset.manifest import (
    ERASED_PREFIX,
    DatasetManifest,
    Reference,
    Root,
    read_root,
    read_segment,
    shuffle_key_of,
    write_manifest,
)
from schemas.dataset.opened import (
    Dataset,
    Segment,
    merge_tombstones,
    open_dataset,
    open_root,
    read_tombstones,
    read_version,
)
from schemas.dataset.samples import (
    blocks_of_row_group,
    read_sample_column,
    row_groups,
    tuples_of_samples,
)
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.machine import num_cores
from schemas.storage.location import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRequest:
    """The arguments of a compaction.

    `older_than` is the minimum age of tombstones; None rewrites no segment for them. The file `ids`
    has ids, of `column` or the session key, to remove from rejects and late events as well. Rejects
    and late events older than `rejects_older_than` are removed as a whole, none when None. `at` is
    the current time, UTC.
    """

    dataset: Location
    older_than: timedelta | None
    ids: Path | Location | None
    column: str | None
    rejects_older_than: timedelta | None = None
    at: datetime
    beam_args: list[str]
    attempt: str
    progress: Callable[[str], None] = lambda _: None


def compact_dataset(request: CompactionRequest) -> dict[str, Any]:
    """Rewrite segments without deleted samples, and remove all old files.

    Returns:
        `segments`: old id to new id, null if nothing is left; `num_samples`: removed samples;
        `removed`: number of files and directories that were replaced and are removed.

    Raises:
        SchemaError: a run uses the dataset, or no sample would be left.
    """

    def attempt(root: Root) -> dict[str, Any] | None:
        dataset = open_root(request.dataset, root.manifest)
        check_unused(request.dataset)
        due = due_segments(dataset, request)
        expired: frozenset[str] = frozenset()
        if request.rejects_older_than is not None:
            expired = expired_segments(dataset, request.at - request.rejects_older_than)
        renamed: dict[str, str | None] | None = {}
        if due or expired:
            renamed = _rewrite(root, dataset, due, expired, request)
        if renamed is None:
            return None  # another process has committed
        num_removed = 0
        if due:
            remaining = open_dataset(request.dataset).segments
            num_removed = sum(s.manifest.num_samples for s in dataset.segments)
            num_removed -= sum(s.manifest.num_samples for s in remaining)
        write_copies(request.dataset, read_root(request.dataset))  # one that was killed has not
        removed = remove_replaced(request.dataset)
        check_unused(request.dataset)  # a run that started meanwhile has kept the old files
        return {"segments": renamed, "num_samples": num_removed, "removed": removed}

    return until_committed(request.dataset, read_root, attempt)


def due_segments(dataset: Dataset, request: CompactionRequest) -> list[Segment]:
    """Return the segments with an old enough tombstone, or with one of the ids in their rejects."""
    if request.older_than is None:
        return []
    limit = pa.scalar((request.at - request.older_than).replace(tzinfo=None), pa.timestamp("us"))
    texts = _requested_texts(dataset, request)

    def is_due(segment: Segment) -> bool:
        times = segment.tombstones["erased_at"]
        is_old = bool(pc.any(pc.less_equal(times, limit)).as_py())
        return is_old or _has_text_in_rejects(segment, texts)

    return [segment for segment in dataset.segments if is_due(segment)]


def _requested_texts(dataset: Dataset, request: CompactionRequest) -> frozenset[str]:
    if request.ids is None:
        return frozenset()
    column = id_column(dataset, request.column)
    return id_texts(read_ids(request.ids, column, id_type(dataset, column)).to_pylist())


def id_texts(values: Sequence[Any]) -> frozenset[str]:
    """Return ids as texts to search for."""
    return frozenset(str(value) for value in values if value is not None and str(value))


def _has_text_in_rejects(segment: Segment, texts: frozenset[str]) -> bool:
    """Return whether the rejects or late events of a segment contain one of some texts."""
    paths = [path for path in segment.files if path.startswith(REJECT_PREFIXES)] if texts else []
    return any(len(_remaining_lines(segment, p, texts)) < segment.file(p).num_rows for p in paths)


def _rewrite(
    root: Root,
    dataset: Dataset,
    due: list[Segment],
    expired: frozenset[str],
    request: CompactionRequest,
) -> dict[str, str | None] | None:
    """Rewrite segments and commit; return None if another process has committed meanwhile."""
    blanked = blank_vocabularies(dataset) if due else {}
    directories = {s.id: _new_directory(request, s.id) for s in dataset.segments}
    with discarded_on_error(request.dataset, *directories.values()):
        rewritten = _write_segments(dataset, due, expired, blanked, request)
        references = [r for r in rewritten.values() if r is not None]
        if not references:
            raise SchemaError(
                "all samples of the dataset are deleted; remove the dataset itself",
                file=str(request.dataset),
            )
        renamed = {
            old: None if new is None else new.id
            for old, new in rewritten.items()
            if new is None or new.id != old
        }
        manifest = _manifest_of(dataset, renamed, due, references, blanked)
        segments = [_opened(dataset, reference) for reference in references]
        builder = PartBuilder(request.dataset, request.beam_args)
        indexes = builder.updated_indexes(dataset, dataset.job.data, segments)
        check_unused(request.dataset)  # a run may have started in the meantime
        committed = commit_manifest(request.dataset, root, replace(manifest, indexes=indexes))
    if committed is None:
        for old in renamed:
            discard(request.dataset, directories[old])
        return None
    return renamed


def _new_directory(request: CompactionRequest, segment_id: str) -> Location:
    return request.dataset / SEGMENTS / f"erase-{request.attempt}-{segment_id}"


def _opened(dataset: Dataset, reference: Reference) -> Segment:
    directory = dataset.directory / SEGMENTS / reference.directory
    return Segment(directory, reference, read_segment(directory, reference))


def _write_segments(
    dataset: Dataset,
    due: list[Segment],
    expired: frozenset[str],
    blanked: BlankedVocabularies,
    request: CompactionRequest,
) -> dict[str, Reference | None]:
    """Write new versions of segments in order; return old id to the segment that replaces it."""
    due_ids = {s.id for s in due}
    requested = _requested_texts(dataset, request)
    gate = dataset.job.data.gate and replace(dataset.job.data.gate, action="warn")
    schema_bytes = read_version(dataset.directory, SCHEMA, dataset.manifest.schema_sha256)
    schema = parse_schema(schema_bytes)
    refused = request.dataset / f".refused-{request.attempt}"
    rewritten: dict[str, Reference | None] = {}
    previous: Segment | None = None
    for segment in dataset.segments:
        directory = _new_directory(request, segment.id)
        fitted = with_blanked_files(segment.manifest.fitted, blanked)
        if segment.id in due_ids:
            request.progress(f"segment {segment.id}: rewriting")
            deleted = requested | deleted_texts(dataset, segment)
            texts = None if segment.id in expired else deleted
            if not compact_segment(dataset, segment, directory, texts, fitted, request):
                rewritten[segment.id] = None
                continue
        elif segment.id in expired or fitted != dict(segment.manifest.fitted):
            copy_segment(segment, directory, fitted, with_rejects=segment.id not in expired)
        else:
            rewritten[segment.id], previous = segment.reference, segment
            continue
        text = anomalies_text_of(segment)
        if segment.id in expired | due_ids:
            text = pass_gate(directory, previous, schema, gate, refused, request.progress)
        reference = _new_reference(segment.reference, directory, text)
        rewritten[segment.id] = reference
        previous = _opened(dataset, reference)
    return rewritten


def _new_reference(old: Reference, directory: Location, anomalies: str) -> Reference:
    """Write the anomalies of a rewritten segment; return its reference.

    The new id has the position of the old one.
    """
    position, _, key = old.id.partition("-")
    reference = replace(
        old,
        id=f"{position}-{rewritten_key(key, read_segment(directory))}",
        manifest_sha256=sha256_of(directory / MANIFEST),
        path=directory.name,
        shuffle_key=shuffle_key_of(old),
    )
    return write_anomalies(directory, reference, anomalies)


def deleted_texts(dataset: Dataset, segment: Segment) -> frozenset[str]:
    """Return the values, as texts, for which samples of a segment were deleted.

    Columns of lists are left out: a tombstone does not record the entry that matched.
    """
    texts: set[str] = set()
    for column in sorted(set(segment.tombstones["reason"].to_pylist())):
        for file_index, row_group in row_groups(segment):
            rows = segment.deleted_rows(file_index, row_group)
            values = read_sample_column(segment, file_index, row_group, dataset.job.data, column)
            if not is_list(values.type):
                texts |= id_texts(pc.unique(values.take(pa.array(rows))).to_pylist())
    return frozenset(texts)


def _manifest_of(
    dataset: Dataset,
    renamed: Mapping[str, str | None],
    due: list[Segment],
    references: list[Reference],
    blanked: BlankedVocabularies,
) -> DatasetManifest:
    """Return the root without its indexes, after writing the files that it names."""
    for path, content in blanked.values():
        (dataset.directory / path).write_bytes(content)
    tombstones = _remaining_tombstones(dataset, due, renamed)
    return replace(
        dataset.manifest,
        segments=tuple(references),
        lineage=_updated_lineage(dataset, renamed),
        tombstones_sha256=write_tombstones(dataset.directory, tombstones, dataset.manifest),
    )


def _remaining_tombstones(
    dataset: Dataset, due: list[Segment], renamed: Mapping[str, str | None]
) -> pa.Table:
    """Return the tombstones of segments that were not rewritten, under the new ids."""
    table = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
    due_ids = {s.id for s in due}
    remains = [segment not in due_ids for segment in table["segment"].to_pylist()]
    remaining = table.filter(pa.array(remains, pa.bool_()))
    ids = [renamed.get(segment) or segment for segment in remaining["segment"].to_pylist()]
    return merge_tombstones([remaining.set_column(0, "segment", pa.array(ids, pa.string()))])


def _updated_lineage(dataset: Dataset, renamed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the lineage with the new ids, and with the old ids of all renamed segments."""
    new_ids = {old: new or "" for old, new in renamed.items()}
    lineage = {key: new_ids.get(value, value) for key, value in dataset.manifest.lineage.items()}
    for reference in dataset.manifest.segments:
        if reference.id in new_ids:
            for name in (reference.id, reference.manifest_sha256):
                lineage[f"{ERASED_PREFIX}{name}"] = new_ids[reference.id]
    return {key: value for key, value in lineage.items() if value or key.startswith(ERASED_PREFIX)}


# One segment


def compact_segment(
    dataset: Dataset,
    segment: Segment,
    directory: Location,
    texts: frozenset[str] | None,
    fitted: Mapping[str, str],
    request: CompactionRequest,
) -> bool:
    """Write a segment without its deleted samples.

    `texts` are ids; lines of `rejects/` and `late/` that contain one are removed; None removes all
    lines. `fitted` is path to sha256.

    Returns:
        Whether a sample is left; otherwise nothing is written.
    """
    data = stored_data(dataset.job, segment)
    parts = remaining_parts(segment, data)
    if not parts:
        return False
    features = stored_features(dataset.features, segment)
    layout = choose_segment_layout(parts[0], data, num_parts=len(parts))
    old = segment.manifest
    with segment_directory(directory, in_place=True) as building:
        results = _rewrite_parts(request, building, parts, layout, features, data)
        rejects = _copy_rejects(segment, building, texts)
        _copy_late_events(segment, building, texts)
        finish_segment(
            building,
            results["parts"],
            rejects,
            dict(results["tables"]),
            old.listing,
            (old.job_sha256, old.schema_sha256),
            data,
            features,
            fitted,
            old.num_parts,
        )
    return True


def _rewrite_parts(
    request: CompactionRequest,
    building: Location,
    parts: Sequence[StoredPart],
    layout: SegmentLayout,
    features: FeatureSet,
    data: DataConfig,
) -> Mapping[str, Any]:
    """Write the parts of a segment and number its accesses; return `parts` and `tables`."""
    options = local_options(request.beam_args)
    if options is None:
        run = beam_build().rewrite_parts
        return run(building, parts, layout, features, data.tables, request.beam_args)
    with ThreadPoolExecutor(options.num_workers or num_cores()) as pool:
        written = pool.map(
            lambda p: build_part(building, p.file_index, p, p.data, layout, features), parts
        )
        results = list(sum_statistics(written))
        blocks = training_blocks(result.blocks for result in results)
        numbers = pool.map(
            lambda table: (table, number_table(building, table, blocks)), sorted(data.tables)
        )
        return {"parts": results, "tables": list(numbers)}


def _copy_rejects(
    segment: Segment, building: Location, texts: frozenset[str] | None
) -> RejectCounts:
    paths = sorted(path for path in segment.files if path.startswith("rejects/"))
    tables = (rejects_table(_remaining_lines(segment, path, texts)) for path in paths)
    return merge_counts(write_rejects(building, n, [table]) for n, table in enumerate(tables))


def _remaining_lines(segment: Segment, path: str, texts: frozenset[str] | None) -> list[Reject]:
    """Return the lines of a file of rejects or late events that contain none of the ids."""
    if texts is None:
        return []
    phrases = [text for text in texts if not _WORD.fullmatch(text)]
    rows = rejects_from_table(segment.file(path).read())
    return [row for row in rows if not has_id(f"{row.value}\n{row.reason}", texts, phrases)]


_WORD = re.compile(r"[\w.@+-]+(?:(?<=\d):\d[\w.]*)*")
"""A number, date, time or word of a line, at the ends of which an id begins and ends."""


def has_id(line: str, ids: frozenset[str], phrases: Sequence[str]) -> bool:
    """Return whether a line contains an id as a whole; `phrases` are those that are not one word.

    Example:
        >>> lines = "{'user': 7, 'x': 1}", '{"user":7.0}', "got 7.", "17,0.75,2026-07-07 10:07"
        >>> [has_id(line, frozenset({"7"}), []) for line in lines]
        [True, True, True, False]
    """
    for match in _WORD.finditer(line):
        word = match[0].rstrip(".")
        if word in ids or (word.endswith(".0") and word[:-2] in ids):
            return True
    return any(re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", line) for phrase in phrases)


def _copy_late_events(segment: Segment, building: Location, texts: frozenset[str] | None) -> None:
    if EVENTS in segment.files:
        with (building / EVENTS).new_file() as partial:
            pq.write_table(segment.file(EVENTS).read(), partial)
    for path in segment.files:
        number = path.removeprefix("late/").removesuffix(".parquet")
        if path.startswith("late/") and path == part_path(int(number), "late"):
            write_late(building, int(number), _remaining_lines(segment, path, texts))


def copy_segment(
    segment: Segment, directory: Location, fitted: Mapping[str, str], *, with_rejects: bool
) -> None:
    """Copy the files of a segment, with or without its rejects and late events."""
    entries = {
        path: entry
        for path, entry in segment.files.items()
        if with_rejects or not path.startswith(REJECT_PREFIXES)
    }
    # A new file first: links are as old as their files, and `vacuum` goes by age.
    files_sha256 = write_files(directory / FILES, entries.values())
    for path in (BLOCKS, *entries):
        (directory / path).copy_from(segment.directory / path)
    changed: dict[str, Any] = {} if with_rejects else {"num_rejects": 0}
    manifest = replace(
        segment.manifest,
        **changed,
        directories=directories_of(entries.values()),
        files_sha256=files_sha256,
        fitted=dict(fitted),
    )
    write_manifest(directory, manifest)


def stored_data(job: Job, segment: Segment) -> DataConfig:
    """Return a data section under which the stored columns are the input.

    It has no transforms and vocabularies: their results are stored columns. Columns that were
    declared after the segment was built are left out.
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
    """Return the declared columns that a segment stores."""
    columns = segment.manifest.columns
    return FeatureSet(tuple(f for f in features.features if f.name in columns))


@dataclass(frozen=True)
class StoredPart:
    """The remaining samples of one part of a segment, as a reiterable.

    `data` is from `stored_data`.
    """

    segment: Segment
    file_index: int
    data: DataConfig

    def __iter__(self) -> Iterator[Tuples]:
        """Yield the remaining samples of each row group that has some."""
        for file_index, row_group in row_groups(self.segment):
            if file_index == self.file_index:
                rows = self._remaining_rows(row_group)
                if len(rows):
                    yield drop_unused_tuples(self._tuples(row_group).take(rows))

    def _remaining_rows(self, row_group: int) -> NDArray[np.int64]:
        samples = self.segment.column("num_samples")
        blocks = blocks_of_row_group(self.segment, self.file_index, row_group)
        count = int(samples[blocks].sum())
        deleted = self.segment.deleted_rows(self.file_index, row_group)
        return np.setdiff1d(np.arange(count), deleted)

    def _tuples(self, row_group: int) -> Tuples:
        segment, blocks = (
            self.segment,
            blocks_of_row_group(self.segment, self.file_index, row_group),
        )
        samples = segment.file(part_path(self.file_index, "samples")).read_row_group(row_group)
        references: dict[str, NDArray[np.int64]] = {}
        uniques: dict[str, pa.Table] = {}
        hidden = [BLOCK]
        for group, members in self.data.groups.items():
            table = read_group(segment.file, group, self.file_index, row_group).select(members)
            rows = tuples_of_samples(segment, group, blocks, samples)
            codes, uniques[group] = distinct_rows(table)
            references[group] = codes[rows]
            hidden.append(inverse_column(group))
        origin = np.arange(samples.num_rows) + (row_group << 32)  # keeps the stored order
        own = samples.drop_columns(hidden).append_column(ORIGIN, pa.array(origin))
        index = np.zeros(samples.num_rows, np.int64)
        return Tuples(own.append_column(LIST_INDEX, pa.array(index)), references, uniques)


def remaining_parts(segment: Segment, data: DataConfig) -> list[StoredPart]:
    """Return the parts of a segment with at least one remaining sample, in order."""
    numbers = sorted(set(segment.column("file").tolist()))
    parts = [StoredPart(segment, number, data) for number in numbers]
    return [part for part in parts if any(True for _ in part)]


# Vocabularies


BlankedVocabularies = Mapping[str, tuple[str, bytes]]
"""Path of a replaced file of a vocabulary to the path and the content of the new one."""


def with_blanked_files(fitted: Mapping[str, str], blanked: BlankedVocabularies) -> dict[str, str]:
    """Return the files, path to sha256, that a segment's new manifest names."""
    files = dict(fitted)
    for old_path, (path, content) in blanked.items():
        if files.pop(old_path, None) is not None:
            files[path] = sha256(content).hexdigest()
    return dict(sorted(files.items()))


def blank_vocabularies(dataset: Dataset) -> BlankedVocabularies:
    """Return vocabularies without the values that only deleted samples have."""
    blanked: dict[str, tuple[str, bytes]] = {}
    fitted = {p: h for s in dataset.segments for p, h in s.manifest.fitted.items()}
    for name, config in dataset.job.data.vocabularies.items():
        versions = load_vocabulary_versions(dataset.directory, fitted, name)
        values = _values_of_deleted_samples(dataset, config.columns) if versions else None
        if values is None or not len(values):
            continue
        old_paths = sorted(p for p in fitted if p.startswith(f"{VOCABULARIES}/{name}/"))
        for number, (path, table) in enumerate(zip(old_paths, versions, strict=True)):
            value_set = values.cast(table["value"].type)
            mask = pc.is_in(one_chunk(table["value"]), value_set=value_set, skip_nulls=True)
            if not pc.any(mask).as_py():
                continue
            content = encode_table(_blank_entries(table, mask))
            target = free_path(dataset.directory, version_path(name, number, content))
            blanked[path] = target, content
    return blanked


def _blank_entries(table: pa.Table, mask: pa.Array) -> pa.Table:
    """Set the values of some entries to null and their counts to 0; row numbers do not change."""
    null, zero = pa.scalar(None, table["value"].type), pa.scalar(0, pa.int64())
    columns = {name: table[name] for name in table.column_names}
    columns["value"] = pc.if_else(mask, null, table["value"])
    columns["count"] = pc.if_else(mask, zero, table["count"])
    return pa.table(columns, schema=table.schema)


def _values_of_deleted_samples(dataset: Dataset, columns: tuple[str, ...]) -> pa.Array | None:
    """Return the values of some columns that deleted samples have, and no other sample."""
    parts = [
        (segment, file_index, row_group, column)
        for column in columns
        for segment in dataset.segments
        if column in segment.manifest.columns
        for file_index, row_group in row_groups(segment)
    ]
    deleted = [
        pc.unique(_values(dataset, *part, is_deleted=True))
        for part in parts
        if len(part[0].deleted_rows(part[1], part[2]))
    ]
    if not any(map(len, deleted)):
        return None
    remaining = pc.unique(pa.chunked_array(deleted))
    for part in parts:
        if len(remaining):
            others = _values(dataset, *part, is_deleted=False)
            shared = others.filter(pc.is_in(others, value_set=remaining))
            remaining = remaining.filter(pc.invert(pc.is_in(remaining, value_set=shared)))
    return remaining


def _values(
    dataset: Dataset,
    segment: Segment,
    file_index: int,
    row_group: int,
    column: str,
    *,
    is_deleted: bool,
) -> pa.Array:
    """Return the values of the deleted samples of a row group, or of the others."""
    values = read_sample_column(segment, file_index, row_group, dataset.job.data, column)
    selected = np.full(len(values), not is_deleted)
    selected[segment.deleted_rows(file_index, row_group)] = is_deleted
    return _flatten(values.filter(pa.array(selected)))


def _flatten(values: pa.Array) -> pa.Array:
    """Return values, or the entries of lists, as int64 or string without nulls."""
    flat = values.flatten() if is_list(values.type) else values
    kind = pa.int64() if pa.types.is_integer(flat.type) else pa.string()
    return flat.drop_null().cast(kind)
