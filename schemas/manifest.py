"""Manifests: small JSON files that name everything below them by hash.

The root manifest names segments and indexes by the hash of their manifests, these name
`files.parquet` and `blocks.parquet`, and those name every file. Each manifest has a checksum of
itself. Manifests hold no clock, host or absolute path, so that equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.layout import FORMAT_VERSION, MANIFEST
from schemas.paths import NAME, is_below

T = TypeVar("T")
_OMITTED_IF_NONE = ("day", "num_source_rows", "tombstones_sha256")
"""Keys added later: manifests without them keep their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of a source listing."""

    source: str
    """Name of the source in the job."""
    path: str
    """Relative to the input directory."""
    num_bytes: int
    """Size."""
    sha256: str
    """Content, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Deduplication of one group in a segment."""

    num_unique: int
    """Unique tuples, summed over blocks."""
    dedup_factor: float
    """num_samples / num_unique."""
    num_values: int
    """List values of the group without deduplication."""
    num_values_dedup: int
    """Stored list values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCounts:
    """Lookups of one embedding table in the training range of a segment."""

    num_lookups: int
    """Lookups without deduplication."""
    num_lookups_dedup: int
    """Lookups with deduplicated features once per unique tuple of a block."""
    num_unique_rows: int
    """Distinct rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentManifest:
    """Manifest of a segment; its file is written last."""

    id: str
    """Position in the dataset and hash of job, schema and listing."""
    num_samples: int
    """Samples, evaluation included."""
    num_sessions: int
    """Sessions."""
    num_rejects: int
    """Rejected rows."""
    input_bytes: int
    """Bytes of the listed input files."""
    dataset_bytes: int
    """Bytes of samples and groups."""
    oracle_bytes: int
    """Bytes of access lists and edges."""
    splits: Mapping[str, tuple[int, int]]
    """Split to (first position, number of blocks) in `blocks.parquet`."""
    groups: Mapping[str, GroupCounts]
    """Dedup factors."""
    tables: Mapping[str, TableCounts]
    """Lookups."""
    listing: tuple[InputFile, ...]
    """Input files, sorted by source and path."""
    job_sha256: str
    """Hash of the job's data section."""
    schema_sha256: str
    """Hash of the declared columns, as parsed."""
    blocks_sha256: str
    """Hash of `blocks.parquet`."""
    files_sha256: str
    """Hash of `files.parquet`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of samples, groups and transforms to the name of its Arrow type."""
    learned: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files of fitted values that its transforms used: path below the dataset to sha256."""
    num_source_rows: int | None = None
    """Rows of the log that gave samples; None if each sample has its own row."""
    day: str | None = None
    """Day of its logs, such as 2026-04-09, or None."""
    format: int = FORMAT_VERSION
    """Format version."""

    @property
    def position(self) -> int:
        """Position in the dataset: segments are ordered by it, with gaps allowed."""
        return position_of(self.id)

    @property
    def num_rows(self) -> int:
        """Rows of the log that gave samples."""
        return self.num_samples if self.num_source_rows is None else self.num_source_rows

    @property
    def num_blocks(self) -> int:
        """Blocks of all splits."""
        return sum(count for _, count in self.splits.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A part of the dataset, named by the hash of its manifest."""

    id: str
    """Directory name."""
    manifest_sha256: str
    """Hash of its MANIFEST.json."""


def position_of(segment_id: str) -> int:
    """Return the position that a segment's id starts with.

    Example:
        >>> position_of("00012-0123456789ab")
        12
    """
    return int(segment_id.partition("-")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """The root: ordered segments and the indexes over them."""

    name: str
    """Name of the job."""
    job_sha256: str
    """Hash of `job.yaml`."""
    schema_sha256: str
    """Hash of `schema.pbtxt`."""
    segments: tuple[Reference, ...]
    """Segments in order."""
    indexes: tuple[Reference, ...] = ()
    """Indexes; the first is the default."""
    lineage: Mapping[str, str] = field(default_factory=dict)
    """Origin of the dataset: names and hashes, free form."""
    finished: bool = False
    """Whether the dataset is sealed: no segment follows, and `train --follow` ends."""
    tombstones_sha256: str | None = None
    """Hash of the file of deleted samples, or None."""
    format: int = FORMAT_VERSION
    """Format version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """The oracle's upper layer for one order, batch size and number of epochs."""

    id: str
    """Directory name: `index-` and a hash of everything it was derived from."""
    segments: tuple[str, ...]
    """Segments that it covers, in order."""
    batch_samples: int
    """Samples of a full batch."""
    epochs: int
    """Passes over the training range."""
    shuffle: str
    """Order of blocks."""
    seed: int
    """Seed of the order."""
    num_steps: int
    """Steps."""
    num_rows: Mapping[str, int]
    """Table to distinct rows over all segments: the size of its numbering."""
    num_accesses: Mapping[str, int]
    """Table to entries, summed over steps."""
    oracle_bytes: int
    """Bytes of the index."""
    files_sha256: str
    """Hash of `files.parquet`."""
    format: int = FORMAT_VERSION
    """Format version."""


def canonical_json(value: object) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces, times as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)


def hash_of(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_manifest(
    directory: Path, manifest: SegmentManifest | IndexManifest | DatasetManifest
) -> str:
    """Write a manifest atomically, with a checksum of itself.

    Returns:
        The sha256 of the written file, hex.
    """
    body = asdict(manifest)
    for name in _OMITTED_IF_NONE:
        if body.get(name, "") is None:
            del body[name]
    data = _encode(body, hash_of(body))
    replace_bytes(directory / MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def _encode(body: Mapping[str, Any], checksum: object) -> bytes:
    text = json.dumps({**body, "checksum": checksum}, indent=1, sort_keys=True)
    return f"{text}\n".encode()


def _read(directory: Path, reference: Reference | None) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SchemaError(
            "manifest is missing; the build did not finish, or this is not a dataset",
            file=str(path),
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    if reference is not None and digest != reference.manifest_sha256:
        raise SchemaError(
            f"manifest must have sha256 {reference.manifest_sha256[:12]}, "
            f"got {digest[:12]}; restore it or rebuild the dataset",
            file=str(path),
        )
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        # Compare the bytes, too: changed white space is a changed file.
        intact = hash_of(body) == checksum and _encode(body, checksum) == data
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SchemaError(
            "manifest must be JSON with a checksum; restore it", file=str(path)
        ) from error
    if not intact:
        raise SchemaError(
            "manifest does not match its checksum; restore it or rebuild the dataset",
            file=str(path),
        )
    if body.get("format") != FORMAT_VERSION:
        raise SchemaError(
            f"format must be {FORMAT_VERSION}, got {body.get('format')!r}; rebuild the dataset "
            "or use the release that wrote it",
            file=str(path),
        )
    return body


def _check_keys(kind: type, body: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    """Raise SchemaError for unknown or missing keys."""
    names = {f.name for f in fields(kind)}
    for key in sorted(names ^ (set(body) | names & set(_OMITTED_IF_NONE))):
        problem = "missing" if key in names else "unknown"
        raise SchemaError(
            f"{problem} manifest key: {prefix}{key}; use the release that wrote the dataset",
            file=str(path),
        )


def _check_ids(ids: Iterable[str], path: Path) -> None:
    """Raise SchemaError if an id is not a plain folder name."""
    for name in ids:
        if not NAME.fullmatch(name):
            raise SchemaError(
                f"id must consist of letters, digits, '_' and '-', got {name!r}; "
                "restore the manifest",
                file=str(path),
            )


def _check_paths(paths: Iterable[str], path: Path) -> None:
    """Raise SchemaError if a path leads out of the dataset."""
    for name in paths:
        if not is_below(name):
            raise SchemaError(
                f"path leads out of the dataset: {name!r}; restore the manifest", file=str(path)
            )


def _build(kind: type[T], body: Mapping[str, Any], path: Path, prefix: str) -> T:
    _check_keys(kind, body, path, prefix)
    return kind(**body)


def read_segment(directory: Path, reference: Reference | None = None) -> SegmentManifest:
    """Read a segment's manifest.

    Args:
        directory: the segment.
        reference: entry of the root manifest, or None to verify only its own checksum.

    Raises:
        SchemaError: it is missing or changed, or has another format.
    """
    body, path = _read(directory, reference), directory / MANIFEST
    _check_keys(SegmentManifest, body, path)
    groups, tables = body["groups"].items(), body["tables"].items()
    body["listing"] = tuple(_build(InputFile, f, path, "listing.") for f in body["listing"])
    body["groups"] = {k: _build(GroupCounts, v, path, f"groups.{k}.") for k, v in groups}
    body["tables"] = {k: _build(TableCounts, v, path, f"tables.{k}.") for k, v in tables}
    body["splits"] = {k: (v[0], v[1]) for k, v in body["splits"].items()}
    _check_ids([body["id"]], path)
    _check_paths(body["learned"], path)
    return SegmentManifest(**body)


def read_dataset(directory: Path) -> DatasetManifest:
    """Read the root manifest.

    Raises:
        SchemaError: it is missing or changed, or has another format.
    """
    body, path = _read(directory, None), directory / MANIFEST
    _check_keys(DatasetManifest, body, path)
    for part in ("segments", "indexes"):
        body[part] = tuple(_build(Reference, r, path, f"{part}.") for r in body[part])
        _check_ids((reference.id for reference in body[part]), path)
    return DatasetManifest(**body)


def read_index(directory: Path, reference: Reference | None = None) -> IndexManifest:
    """Read an index's manifest.

    Raises:
        SchemaError: it is missing or changed, or has another format.
    """
    body = _read(directory, reference)
    _check_keys(IndexManifest, body, directory / MANIFEST)
    body["segments"] = tuple(body["segments"])
    _check_ids([body["id"], *body["segments"]], directory / MANIFEST)
    return IndexManifest(**body)


# A segment that is rewritten without erased ids gets another id and hash. The lineage of the root
# manifest maps the old ones to the new id, for runs that trained the old segment and for rebuilds.

FORGOTTEN_PREFIX = "forgotten:"
"""Prefix of these keys in the lineage, before a segment id or the sha256 of a manifest."""


def previous_names(lineage: Mapping[str, str], segment_id: str) -> frozenset[str]:
    """Return the previous ids and manifest hashes of a segment.

    Example:
        >>> sorted(previous_names({"forgotten:00000-a": "00000-b", "day:x": "00000-b"}, "00000-b"))
        ['00000-a']
    """
    return frozenset(
        name.removeprefix(FORGOTTEN_PREFIX)
        for name, now in lineage.items()
        if name.startswith(FORGOTTEN_PREFIX) and now == segment_id
    )
