"""Rewrite segments without deleted samples: `pipelines erase --rewrite`.

The new segments and their index parts are written into directories of their own. Then the root is
committed, if it has not changed since, and everything that was replaced is removed. If the process
dies before the commit, the dataset is unchanged; if it dies after it, the next run removes the old
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.histories.stored_events import num_events_of
from presage.pipelines.quality.gate import parse_schema, pass_gate
from presage.pipelines.table.blank_vocabularies import (
    BlankedVocabularies,
    blank_vocabularies,
    with_blanked_files,
)
from presage.pipelines.table.commit import (
    anomalies_text_of,
    discard,
    discarded_on_error,
    write_anomalies,
)
from presage.pipelines.table.compact_segment import compact_segment, copy_segment, remaining_lines
from presage.pipelines.table.delete import (
    REJECT_PREFIXES,
    check_erasable,
    expired_segments,
    id_column,
    id_type,
    read_ids,
    write_tombstones,
)
from presage.pipelines.table.indexes import PartBuilder
from presage.pipelines.table.root import commit_manifest, until_committed, write_copies
from presage.pipelines.table.segment import rewritten_key
from presage.pipelines.table.vacuum import check_unused, remove_replaced
from presage.schemas.arrays import is_list
from presage.schemas.dataset.files import sha256_of
from presage.schemas.dataset.manifest import (
    ERASED_PREFIX,
    DatasetManifest,
    Reference,
    Root,
    read_root,
    read_segment,
    shuffle_key_of,
)
from presage.schemas.dataset.opened import (
    OpenDataset,
    Segment,
    open_dataset,
    open_root,
    read_version,
)
from presage.schemas.dataset.samples import read_sample_column, row_groups
from presage.schemas.dataset.tombstones import merge_tombstones, read_tombstones
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST, SCHEMA, SEGMENTS
from presage.schemas.storage.location import Location


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


def due_segments(dataset: OpenDataset, request: CompactionRequest) -> list[Segment]:
    """Return the segments with an old enough tombstone, or with one of the ids in their rejects."""
    if request.older_than is None:
        return []
    limit = pa.scalar((request.at - request.older_than).replace(tzinfo=None), pa.timestamp("us"))
    texts = _requested_texts(dataset, request)

    def is_due(segment: Segment) -> bool:
        times = segment.tombstones["erased_at"]
        is_old = bool(pc.any(pc.less_equal(times, limit)).as_py())
        in_texts = _has_text_in_rejects(segment, texts)
        return is_old or in_texts or any(num_events_of(segment, texts).values())

    return [segment for segment in dataset.segments if is_due(segment)]


def _requested_texts(dataset: OpenDataset, request: CompactionRequest) -> frozenset[str]:
    if request.ids is None:
        return frozenset()
    column = id_column(dataset, request.column)
    check_erasable(dataset, column)
    return id_texts(read_ids(request.ids, column, id_type(dataset, column)).to_pylist())


def id_texts(values: Sequence[Any]) -> frozenset[str]:
    """Return ids as texts to search for."""
    return frozenset(str(value) for value in values if value is not None and str(value))


def _has_text_in_rejects(segment: Segment, texts: frozenset[str]) -> bool:
    """Return whether the rejects or late events of a segment contain one of some texts."""
    paths = [path for path in segment.files if path.startswith(REJECT_PREFIXES)] if texts else []
    return any(len(remaining_lines(segment, p, texts)) < segment.file(p).num_rows for p in paths)


def _rewrite(
    root: Root,
    dataset: OpenDataset,
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
        indexes = builder.updated_indexes(dataset, dataset.job, segments)
        check_unused(request.dataset)  # a run may have started in the meantime
        committed = commit_manifest(request.dataset, root, replace(manifest, indexes=indexes))
    if committed is None:
        for old in renamed:
            discard(request.dataset, directories[old])
        return None
    return renamed


def _new_directory(request: CompactionRequest, segment_id: str) -> Location:
    return request.dataset / SEGMENTS / f"erase-{request.attempt}-{segment_id}"


def _opened(dataset: OpenDataset, reference: Reference) -> Segment:
    directory = dataset.directory / SEGMENTS / reference.directory
    return Segment(directory, reference, read_segment(directory, reference))


def _write_segments(
    dataset: OpenDataset,
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
            options = fitted, request.beam_args
            if not compact_segment(dataset, segment, directory, texts, deleted, *options):
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


def deleted_texts(dataset: OpenDataset, segment: Segment) -> frozenset[str]:
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
    dataset: OpenDataset,
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
    dataset: OpenDataset, due: list[Segment], renamed: Mapping[str, str | None]
) -> pa.Table:
    """Return the tombstones of segments that were not rewritten, under the new ids."""
    table = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
    due_ids = {s.id for s in due}
    remains = [segment not in due_ids for segment in table["segment"].to_pylist()]
    remaining = table.filter(pa.array(remains, pa.bool_()))
    ids = [renamed.get(segment) or segment for segment in remaining["segment"].to_pylist()]
    return merge_tombstones([remaining.set_column(0, "segment", pa.array(ids, pa.string()))])


def _updated_lineage(dataset: OpenDataset, renamed: Mapping[str, str | None]) -> dict[str, str]:
    """Return the lineage with the new ids, and with the old ids of all renamed segments."""
    new_ids = {old: new or "" for old, new in renamed.items()}
    lineage = {key: new_ids.get(value, value) for key, value in dataset.manifest.lineage.items()}
    for reference in dataset.manifest.segments:
        if reference.id in new_ids:
            for name in (reference.id, reference.manifest_sha256):
                lineage[f"{ERASED_PREFIX}{name}"] = new_ids[reference.id]
    return {key: value for key, value in lineage.items() if value or key.startswith(ERASED_PREFIX)}


# Vocabularies
