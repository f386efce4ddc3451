"""Entries of vocabularies that only forgotten samples had: their rows stay, their values go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.parts.expand import row_groups
from pipelines.parts.sessions import sample_column
from schemas.columns import is_list, one_chunk
from schemas.dataset import Dataset, Segment
from schemas.learned import load_versions
from schemas.manifest import replace_bytes
from schemas.vocabulary import VOCABULARIES, encode_table, version_path


@dataclass(frozen=True, slots=True)
class NewVersions:
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


def without_forgotten(dataset: Dataset) -> NewVersions:
    """Return the versions of vocabularies with an entry that no sample left has."""
    paths: dict[str, str] = {}
    files: dict[str, bytes] = {}
    hashes: dict[str, str] = {}
    learned = {p: h for s in dataset.segments for p, h in s.manifest.learned.items()}
    for name, config in dataset.job.data.vocabularies.items():
        versions = load_versions(dataset.directory, learned, name)
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
    return NewVersions(paths, files, hashes)


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
        values = sample_column(segment, *place, dataset.job.data, column)
        yield values, segment.forgotten_rows(*place)


def _flat(values: pa.Array) -> pa.Array:
    """Return values, of lists their entries, as int64 or string; nulls left out."""
    flat = values.flatten() if is_list(values.type) else values
    kind = pa.int64() if pa.types.is_integer(flat.type) else pa.string()
    return flat.drop_null().cast(kind)


def place_versions(dataset: Path, versions: NewVersions) -> None:
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
