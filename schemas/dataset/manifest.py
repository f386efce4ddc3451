"""Manifests: small JSON files that name everything below them by hash.

The root manifest names segments and the parts of indexes by the hash of their manifests, these name
`files.parquet` and `blocks.parquet`, and those name every file. Each manifest has a checksum of
itself. Manifests hold no clock, host or absolute path; those of segments and indexes depend on
their content alone. The root is numbered, and committed by `presage.schemas.storage.versions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from presage.schemas.errors import SchemaError, shown
from presage.schemas.layout import FORMAT_VERSION, MANIFEST
from presage.schemas.paths import NAME, is_below
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import Version, Versions, writer_id
from presage.schemas.typed_values import from_json

T = TypeVar("T")
_CHECKSUM = "checksum"
MAX_ID = 200
"""Longest id of a segment or index, in characters."""


# The JSON of dataclasses.


def canonical_json(value: object) -> str:
    """Return the canonical JSON of a value: sorted keys, no spaces, times as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)


def hash_of(value: object) -> str:
    """Return the sha256 of a value's canonical JSON, hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def encode_manifest(manifest: Any, indent: int | None = None) -> bytes:
    """Return the JSON of a dataclass, with a checksum of itself.

    Keys that are None by default are left out while they are None.
    """
    body = _body_of(manifest)
    return _encode(body, hash_of(body), indent)


def _body_of(value: Any) -> Any:
    """Return the JSON value of dataclasses, without keys that are None by default."""
    if is_dataclass(value):
        items = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: _body_of(v) for f, v in items if v is not None or f.default is not None}
    if isinstance(value, Mapping):
        return {name: _body_of(v) for name, v in value.items()}
    return [_body_of(v) for v in value] if isinstance(value, list | tuple) else value


def _encode(body: Mapping[str, Any], checksum: object, indent: int | None) -> bytes:
    body = {**body, _CHECKSUM: checksum}
    if indent is None:
        return canonical_json(body).encode()
    return f"{json.dumps(body, indent=indent, sort_keys=True)}\n".encode()


def decode_manifest(kind: type[T], data: bytes, path: Location | Path, remedy: str) -> T:
    """Return the dataclass that `encode_manifest` encoded.

    Its field `format`, if any, has the supported version as default. Errors end with the remedy.

    Raises:
        SchemaError: a byte has changed, or the format is another one.
    """
    try:
        body = json.loads(data)
        checksum = body.pop(_CHECKSUM)
        # Compare the bytes, too: changed white space is a changed file.
        indent = 1 if data.startswith(b"{\n") else None
        is_intact = hash_of(body) == checksum and _encode(body, checksum, indent) == data
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SchemaError(
            f"manifest must be JSON with a checksum; restore it or {remedy}", file=str(path)
        ) from error
    if not is_intact:
        raise SchemaError(
            f"manifest does not match its checksum; restore it or {remedy}", file=str(path)
        )
    try:
        _check_format(kind, body)
        manifest = from_json(kind, body)
        _check_numbers(manifest)
        return manifest
    except (ValueError, TypeError) as error:
        raise SchemaError(
            f"{error}; use the release that wrote the file or {remedy}",
            file=str(path),
        ) from error


_LIMITS = {
    "batch_samples": (1, 1 << 40),
    "epochs": (1, 1 << 31),
    "shuffle_key": (0, (1 << 64) - 1),
    "num_rows": (0, 1 << 63),
    "status": (-64, 255),  # of a process, negative if a signal ended it
}
"""Lowest and highest value of numbers by their field; others are in [0, 2**63)."""


def _check_numbers(value: Any, key: str = "") -> None:
    """Raise ValueError if a whole number of a manifest is out of range; names its key."""
    if isinstance(value, int):
        low, high = _LIMITS.get(key.rpartition(".")[2], (0, (1 << 63) - 1))
        if not low <= value <= high:
            raise ValueError(f"{key} must be in [{low}, {high}], got {value}")
    elif is_dataclass(value):
        for each in (f for f in fields(value) if f.name != "fingerprint"):  # of any content
            _check_numbers(getattr(value, each.name), f"{key}.{each.name}" if key else each.name)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _check_numbers(each, f"{key}.{name}")
    elif isinstance(value, tuple):
        for each in value:
            _check_numbers(each, key)


def _check_format(kind: type, body: Mapping[str, Any]) -> None:
    for f in fields(kind):
        if f.name == "format" and body.get("format") != f.default:
            raise ValueError(f"format must be {f.default}, got {shown(body.get('format'))}")


# The manifests of a dataset.


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of a source listing."""

    source: str
    path: str
    """Relative to the input directory."""
    num_bytes: int
    sha256: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryCounts:
    """Events of one history in a segment."""

    num_events: int
    num_keys: int
    """Distinct keys of the events."""
    first: int
    """When the first event is available, microseconds since 1970; 0 without events."""
    last: int
    """The same of the last event."""
    num_bytes: int
    """Bytes of the files of these events."""
    first_sample: int
    """Time of the segment's first sample, microseconds since 1970."""
    num_pending: int = 0
    """Events that are available after the segment's day, for later segments."""
    pending_sha256: str | None = None
    """Hash of their files before any was erased; None without any."""
    taken_sha256: str | None = None
    """`pending_sha256` of the segment before, when this one was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentManifest:
    """Manifest of a segment; its file is written last.

    Where the segment lies and which day it holds is in the root's `Reference`.
    """

    num_samples: int
    """Samples, evaluation included."""
    num_sessions: int
    num_rejects: int
    input_bytes: int
    """Bytes of the listed input files."""
    dataset_bytes: int
    """Bytes of samples and groups."""
    oracle_bytes: int
    """Bytes of access lists and edges."""
    splits: Mapping[str, tuple[int, int]]
    """Split to (first position, number of blocks) in `blocks.parquet`."""
    groups: Mapping[str, GroupCounts]
    tables: Mapping[str, TableCounts]
    listing: tuple[InputFile, ...]
    """Input files, sorted by source and path."""
    job_sha256: str
    """Hash of the job's data section."""
    schema_sha256: str
    """Hash of the declared columns, as parsed."""
    blocks_sha256: str
    files_sha256: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column of samples, groups and transforms to the name of its Arrow type."""
    split_times: tuple[str, ...] | None = None
    """Times that are stored as seconds and microseconds; None without any."""
    fitted: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files of fitted values that its transforms used: path below the dataset to sha256."""
    directories: tuple[str, ...]
    """Directories of its data files, such as `samples` and `tuples/user`."""
    partition_key: str
    """Column whose hash assigns a sample to a part."""
    num_parts: int
    """Parts that the hash was divided into, empty ones included."""
    histories: Mapping[str, HistoryCounts] = field(default_factory=dict[str, HistoryCounts])
    num_source_rows: int | None = None
    """Rows of the log that gave samples; None if each sample has its own row."""
    format: int = FORMAT_VERSION

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
    """A segment or a part of an index, named by the hash of its manifest."""

    id: str
    """Of a segment: its position in the dataset, `-`, and a hash of job, schema and listing."""
    manifest_sha256: str
    """Hash of its MANIFEST.json."""
    path: str | None = None
    """Directory, relative to that of all segments; None if it is the id."""
    day: str | None = None
    """Day of its logs, such as 2026-04-09."""
    anomalies_sha256: str | None = None
    """Of a segment, the hash of its anomalies, which depend on the segment before it, too."""
    built_at: str | None = None
    """When its rejects were written, ISO 8601 in UTC: they may be removed by age."""

    shuffle_key: int | None = None
    """Of a segment, the key of the order of its blocks, unless it is that of its hash."""

    @property
    def directory(self) -> str:
        """Name of its directory."""
        return self.path or self.id

    @property
    def position(self) -> int:
        """Position in the dataset: segments are ordered by it, with gaps allowed."""
        return position_of(self.id)


def shuffle_key_of(segment: Reference) -> int:
    """Return the shuffle key of a segment: its own, or the first 8 bytes of its manifest's hash.

    Example:
        >>> shuffle_key_of(Reference(id="00000-a", manifest_sha256="01" + "00" * 31))
        1
    """
    if segment.shuffle_key is not None:
        return segment.shuffle_key
    return int.from_bytes(bytes.fromhex(segment.manifest_sha256[:16]), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """The oracle's upper layer for one order, batch size and number of epochs.

    Each segment has a part of its own; any selection of segments that have parts is indexed.
    """

    id: str
    """Directory name: `index-` and a hash of the settings below."""
    batch_samples: int
    """Samples of a full batch."""
    epochs: int
    shuffle: str
    seed: int
    histories: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """History to length and step of the windows whose rows are accesses, too."""
    parts: Mapping[str, Reference] = field(default_factory=dict[str, Reference])
    """Id of a segment to its part, whose `id` is a directory below that of the index."""

    @property
    def settings(self) -> IndexSettings:
        """What identifies the index."""
        windows = tuple(sorted(self.histories.items()))
        return self.batch_samples, self.epochs, self.shuffle, self.seed, windows


IndexSettings = tuple[int, int, str, int, tuple[tuple[str, tuple[int, ...]], ...]]
"""Samples of a batch, epochs, shuffle, seed, and the windows of histories."""


def new_index(
    batch_samples: int,
    epochs: int,
    shuffle: str,
    seed: int,
    histories: Mapping[str, tuple[int, ...]] | None = None,
) -> IndexEntry:
    """Return an index without parts."""
    windows = dict(sorted((histories or {}).items()))
    settings = [batch_samples, epochs, shuffle, seed, *([windows] if windows else ())]
    return IndexEntry(
        id=f"index-{hash_of(settings)[:16]}",
        batch_samples=batch_samples,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
        histories=windows,
    )


def position_of(segment_id: str) -> int:
    """Return the position that a segment's id starts with; raise SchemaError if it has none.

    Example:
        >>> position_of("00012-0123456789ab")
        12
    """
    position = segment_id.partition("-")[0]
    if not position.isdecimal():
        raise SchemaError(
            f"segment id must start with a position, got {shown(segment_id)}; restore the manifest"
        )
    return int(position)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    """The root: ordered segments and the indexes over them."""

    writer: str
    """Id of the process that wrote this version."""
    parent_sha256: str | None = None
    """Hash of the version before it."""
    name: str
    job_sha256: str
    schema_sha256: str
    segments: tuple[Reference, ...]
    indexes: tuple[IndexEntry, ...] = ()
    """Indexes; the first is the default."""
    lineage: Mapping[str, str] = field(default_factory=dict)
    """Origin of the dataset: names and hashes, free form."""
    sealed: bool = False
    """Whether the dataset is sealed: no segment follows, and `train --follow` ends."""
    tombstones_sha256: str | None = None
    """Hash of the file of deleted samples, or None."""
    format: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """The part of an index for one segment.

    It depends on nothing but segment and settings, with histories also on earlier segments.
    """

    segment_sha256: str
    """Hash of the segment's manifest."""
    shuffle_key: int | None = None
    """Shuffle key of the segment; None if blocks are not shuffled."""
    batch_samples: int
    epochs: int
    shuffle: str
    seed: int
    histories: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """As in `IndexEntry`."""
    earlier_sha256: str | None = None
    """Hash of the manifests of all earlier segments; None without histories."""
    tables: Mapping[str, TableCounts] = field(default_factory=dict[str, TableCounts])
    """Counts of the tables that histories look up, with those of samples."""
    num_steps: int
    """Steps of the segment in an epoch."""
    num_accesses: Mapping[str, tuple[int, ...]]
    """Table to entries of each stored epoch, summed over steps."""
    oracle_bytes: int
    files_sha256: str
    format: int = FORMAT_VERSION


def write_manifest(directory: Location | Path, manifest: SegmentManifest | IndexManifest) -> str:
    """Write the manifest of a complete directory.

    Returns:
        The sha256 of the written file, hex.
    """
    data = encode_manifest(manifest, indent=1)
    (Location.parse(directory) / MANIFEST).write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def read_segment(directory: Location | Path, reference: Reference | None = None) -> SegmentManifest:
    """Read a segment's manifest; without a reference only its own checksum is verified.

    Raises:
        SchemaError: it is missing or changed, or has another format.
    """
    directory = Location.parse(directory)
    manifest = _read(SegmentManifest, directory, reference)
    for name in manifest.fitted:
        if not is_below(name):
            raise SchemaError(
                f"path leads out of the dataset: {name!r}; restore the manifest",
                file=str(directory / MANIFEST),
            )
    return manifest


@dataclass(frozen=True, slots=True)
class Root:
    """The newest version of a dataset's root manifest."""

    version: Version
    manifest: DatasetManifest


def find_root(directory: Location | Path | str) -> Root | None:
    """Read the newest root manifest; None if there is no dataset.

    Raises:
        SchemaError: it is changed, or has another format.
    """
    directory = Location.parse(directory)
    if directory.local is not None and directory.local.is_file():
        raise SchemaError(
            "dataset must be a directory, got a file; choose another", file=str(directory)
        )
    versions = Versions(directory)
    version = versions.newest()
    return version and Root(version, parse_root(version, versions.path(version.number)))


def parse_root(version: Version, path: Location) -> DatasetManifest:
    """Return the manifest of a version; raise SchemaError if it has changed, or another format."""
    manifest = decode_manifest(DatasetManifest, version.data, path, "rebuild the dataset")
    parts = (part for index in manifest.indexes for part in index.parts.values())
    references = [name for r in (*manifest.segments, *parts) for name in (r.id, r.directory)]
    _check_ids([*references, *(index.id for index in manifest.indexes)], path)
    _check_segments(manifest.segments, path)
    return manifest


def read_root(directory: Location | Path | str) -> Root:
    """Read the newest root manifest.

    Raises:
        SchemaError: there is no dataset, or its root is changed or has another format.
    """
    root = find_root(directory)
    if root is None:
        raise SchemaError(
            "there is no dataset: no build was committed; build it, or correct the path",
            file=str(directory),
        )
    return root


def read_dataset(directory: Location | Path | str) -> DatasetManifest:
    """Return the manifest of `read_root`."""
    return read_root(directory).manifest


def commit_root(
    directory: Location | Path, previous: Root | None, manifest: DatasetManifest
) -> Root | None:
    """Commit the root manifest that follows `previous`.

    Returns:
        The new root; None if another process was faster.
    """
    parent = None if previous is None else previous.version.sha256
    manifest = replace(manifest, writer=writer_id(), parent_sha256=parent)
    data = encode_manifest(manifest, indent=1)
    version = Versions(Location.parse(directory)).commit(previous and previous.version, data)
    return None if version is None else Root(version, manifest)


def read_index(directory: Location | Path, reference: Reference | None = None) -> IndexManifest:
    """Read an index's manifest.

    Raises:
        SchemaError: it is missing or changed, or has another format.
    """
    directory = Location.parse(directory)
    return _read(IndexManifest, directory, reference)


def _read(kind: type[T], directory: Location, reference: Reference | None = None) -> T:
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
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
    return decode_manifest(kind, data, path, "rebuild the dataset")


def _check_ids(ids: Iterable[str], path: Location) -> None:
    for name in ids:
        if len(name) > MAX_ID or not NAME.fullmatch(name):
            raise SchemaError(
                f"id must consist of at most {MAX_ID} letters, digits, '_' and '-', got "
                f"{name[:MAX_ID]!r}; restore the manifest",
                file=str(path),
            )


def _check_segments(segments: Sequence[Reference], path: Location) -> None:
    """Raise SchemaError if a root names a segment twice, or segments out of order."""
    for one, other in pairwise(segments):
        if not one.position < other.position:
            raise SchemaError(
                f"segments must be in the order of their positions, each with its own, got "
                f"{one.id} before {other.id}; restore the manifest",
                file=str(path),
            )
    names: dict[str, str] = {}
    for segment in segments:
        try:
            date.fromisoformat(segment.day or "2000-01-01")
        except ValueError as error:
            raise SchemaError(
                f"day must be a date such as 2026-04-09, got {shown(segment.day)}; restore it",
                file=str(path),
            ) from error
        unique = [segment.directory, segment.manifest_sha256]
        for name in unique if segment.day is None else [*unique, segment.day]:
            if name in names:
                raise SchemaError(
                    f"segments must differ in directory, manifest and day, got {name} of "
                    f"{names[name]} and {segment.id}; restore the manifest",
                    file=str(path),
                )
            names[name] = segment.id


# A segment that is rewritten without erased ids gets another id and hash. The lineage of the root
# manifest maps the old ones to the new id, for runs that trained the old segment and for rebuilds.

ERASED_PREFIX = "erased:"
"""Prefix of these keys in the lineage, before a segment id or the sha256 of a manifest."""


def previous_names(lineage: Mapping[str, str], segment_id: str) -> frozenset[str]:
    """Return the previous ids and manifest hashes of a segment.

    Example:
        >>> sorted(previous_names({"erased:00000-a": "00000-b", "day:x": "00000-b"}, "00000-b"))
        ['00000-a']
    """
    return frozenset(
        name.removeprefix(ERASED_PREFIX)
        for name, now in lineage.items()
        if name.startswith(ERASED_PREFIX) and now == segment_id
    )
