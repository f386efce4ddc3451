"""The segments of a dataset written again without what was forgotten, in one replacement.

Everything is made beside the dataset first: segments, then a staged dataset of
links in which all indexes are built. Under the dataset's lock, if its root is
still the one that was seen, all gets its name and the root is replaced; then
the old files go. Whatever dies before leaves the dataset as it was, and what
dies after is cleared by the next rewriting.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.forget.at_once import remove_tombstones, write_tombstones
from pipelines.forget.clearing import clear, refuse_held
from pipelines.forget.ids import column_of, id_type, read_ids
from pipelines.forget.retention import drop_rejects, expired_segments
from pipelines.forget.segment import (
    Rewriting,
    link_segment,
    named_anew,
    rewrite_segment,
    texts_of,
)
from pipelines.forget.vocabularies import NewVersions, place_versions, without_forgotten
from pipelines.gate.pass_gate import pass_gate, schema_of
from pipelines.oracle.index import build_index
from pipelines.parts.expand import row_groups
from pipelines.parts.sessions import sample_column
from pipelines.segments.commit import commit_root, relabel
from pipelines.segments.lock import locked, workplace
from pipelines.segments.publish import default_order, link, other_orders
from pipelines.segments.view import write_view
from schemas.columns import is_list
from schemas.dataset import Dataset, Segment, open_dataset, verified_version
from schemas.errors import SchemaError
from schemas.forgotten import FORGOTTEN
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import Reference, read_dataset, write_manifest
from schemas.tombstones import joined_tombstones, read_tombstones

WORKPLACES = ".forget.*"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRequest:
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
        say: told what is going on, one line at a time.
    """

    dataset: Path
    older_than: timedelta | None
    ids: Path | None
    column: str | None
    rejects_older_than: timedelta | None = None
    at: datetime
    beam_args: list[str]
    attempt: str
    say: Callable[[str], None] = lambda _: None


def rewrite(request: RewriteRequest) -> dict[str, Any]:
    """Write the touched segments of a dataset again and remove every old file.

    Returns:
        `segments`: old id to new one, null for one of which nothing is left; `num_samples` that are
        gone; `removed`: how many files and directories that no manifest names.

    Raises:
        SchemaError: somebody trains on the dataset, or no sample would be left.
    """
    while True:
        dataset = open_dataset(request.dataset)
        refuse_held(dataset)
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
        return {"segments": renamed, "num_samples": gone, "removed": clear(request.dataset)}


def due_segments(dataset: Dataset, request: RewriteRequest) -> list[Segment]:
    """Return the segments with a tombstone that is old enough, or with an id in their rejects."""
    if request.older_than is None:
        return []
    limit = pa.scalar((request.at - request.older_than).replace(tzinfo=None), pa.timestamp("us"))
    texts = _given_texts(dataset, request)

    def is_due(segment: Segment) -> bool:
        times = segment.tombstones["forgotten_at"]
        return bool(pc.any(pc.less_equal(times, limit)).as_py()) or _says(segment, texts)

    return [segment for segment in dataset.segments if is_due(segment)]


def _expired(dataset: Dataset, request: RewriteRequest) -> frozenset[str]:
    """Return the ids of the segments whose rejects and late events go."""
    if request.rejects_older_than is None:
        return frozenset()
    return expired_segments(dataset, request.at - request.rejects_older_than)


def _given_texts(dataset: Dataset, request: RewriteRequest) -> frozenset[str]:
    if request.ids is None:
        return frozenset()
    column = column_of(dataset, request.column)
    return texts_of(read_ids(request.ids, column, id_type(dataset, column)).to_pylist())


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


def forgotten_texts(dataset: Dataset, segment: Segment) -> frozenset[str]:
    """Return the values, as texts, by which the samples of a segment were forgotten.

    Of a list nobody knows any more which entry it was: there the ids must be given.
    """
    found: set[str] = set()
    for column in sorted(set(segment.tombstones["reason"].to_pylist())):
        for place in row_groups(segment):
            rows = segment.forgotten_rows(*place)
            values = sample_column(segment, *place, dataset.job.data, column)
            if not is_list(values.type):
                found |= texts_of(pc.unique(values.take(pa.array(rows))).to_pylist())
    return frozenset(found)


def _rewritten(
    dataset: Dataset, due: list[Segment], expired: frozenset[str], request: RewriteRequest
) -> dict[str, str | None] | None:
    """Write segments again and replace the root; None when that has changed meanwhile."""
    place = request.dataset / SEGMENTS / f".forget.{request.attempt}"
    with workplace(place, WORKPLACES):
        versions = without_forgotten(dataset) if due else NewVersions({}, {}, {})
        made = _segments(dataset, due, expired, versions, place, request)
        references = [r for r in made.values() if r is not None]
        if not references:
            raise SchemaError(
                "dataset must keep a sample, got none that is not forgotten; remove the dataset",
                file=str(request.dataset),
            )
        place_versions(request.dataset, versions)
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
    versions: NewVersions,
    place: Path,
    request: RewriteRequest,
) -> dict[str, Reference | None]:
    """Write what is due, in order; return old id to the segment in its place."""
    names = {s.manifest.id for s in due}
    given = _given_texts(dataset, request)
    gate = dataset.job.data.gate and replace(dataset.job.data.gate, action="warn")
    schema = schema_of(_schema_bytes(dataset))
    found: dict[str, Reference | None] = {}
    earlier: Path | None = None
    for segment, reference in zip(dataset.segments, dataset.manifest.segments, strict=True):
        before, building = segment.manifest, place / segment.manifest.id
        learned = versions.renamed(before.learned)
        if before.id in names:
            request.say(f"segment {before.id}: writing it again")
            said = given | forgotten_texts(dataset, segment)
            texts = None if before.id in expired else said
            rewriting = Rewriting(segment, building, texts, learned, request.beam_args)
            if not rewrite_segment(dataset, rewriting):
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
            text = pass_gate(building, earlier, schema, gate, aside, request.say)
            relabel(building, before.id, text)
        made = named_anew(before, building, learned)
        building.rename(place / made.id)
        found[before.id], earlier = made, place / made.id
    return found


def _schema_bytes(dataset: Dataset) -> bytes:
    root = dataset.directory
    return verified_version(root / SCHEMA, dataset.manifest.schema_sha256).read_bytes()


def _job_bytes(dataset: Dataset) -> bytes:
    root = dataset.directory
    return verified_version(root / JOB, dataset.manifest.job_sha256).read_bytes()


def _indexes(
    dataset: Dataset, references: list[Reference], place: Path, request: RewriteRequest
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
    orders = dict.fromkeys([default_order(staged), *other_orders(staged, dataset)])
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
        refuse_held(dataset)  # a run may have begun meanwhile
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
    return joined_tombstones([left.set_column(0, "segment", pa.array(now, pa.string()))])


def _lineage(dataset: Dataset, renamed: Mapping[str, str | None]) -> dict[str, str]:
    """Return where the dataset came from, with the segments' names as they are now.

    What they were called before stays (`schemas/forgotten.py`): who knows them by it finds them.
    """
    now = {old: new or "" for old, new in renamed.items()}
    found = {key: now.get(value, value) for key, value in dataset.manifest.lineage.items()}
    for reference in dataset.manifest.segments:
        if reference.id in now:
            for name in (reference.id, reference.manifest_sha256):
                found[f"{FORGOTTEN}{name}"] = now[reference.id]
    return {key: value for key, value in found.items() if value or key.startswith(FORGOTTEN)}
