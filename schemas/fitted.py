"""Values that transforms fitted on the training range, as stored with the dataset.

A segment's manifest lists the files with their hashes in `learned`: the versions of each
vocabulary, and a JSON file with the statistics of `normalize` and `bucketize`. Files are never
changed; later segments add files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.config.job import DataConfig
from schemas.files import read_verified
from schemas.manifest import canonical_json, from_json
from schemas.vocabulary import VOCABULARIES, Vocabulary, merge_versions

FITTED_DIRECTORY = "learned"


@dataclass(frozen=True, slots=True)
class FittedStats:
    """Statistics of one `normalize` (center, scale) or `bucketize` (boundaries).

    Attributes:
        center: subtracted: mean or minimum.
        scale: divisor: standard deviation or range, or 1 if that is 0.
        boundaries: ascending.
    """

    center: float = 0.0
    scale: float = 1.0
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedValues:
    """Fitted values of all transforms of a job.

    Attributes:
        vocabularies: by name.
        stats: by `stats_key` of the transform.
    """

    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict[str, Vocabulary])
    stats: Mapping[str, FittedStats] = field(default_factory=dict[str, FittedStats])


def stats_key(group: str, column: str) -> str:
    """Return the key of a transform's statistics.

    Example:
        >>> stats_key("user", "age_bucket")
        'user.age_bucket'
    """
    return f"{group}.{column}"


def encode_stats(stats: Mapping[str, FittedStats]) -> bytes:
    """Encode statistics as canonical JSON; floats are preserved exactly."""
    body = {key: asdict(fitted) for key, fitted in stats.items()}
    return f"{canonical_json(body)}\n".encode()


def stats_path(data: bytes) -> str:
    """Return the path of a statistics file, relative to the dataset."""
    return str(PurePosixPath(FITTED_DIRECTORY, f"{hashlib.sha256(data).hexdigest()[:12]}.json"))


def load_fitted(root: Path, files: Mapping[str, str], data: DataConfig) -> FittedValues:
    """Read and verify fitted values.

    Args:
        root: directory that the paths are relative to: the dataset, or a segment being built.
        files: path to sha256, as in a segment's manifest.
        data: the job's data section.

    Raises:
        SchemaError: a file is missing or has changed.
    """
    vocabularies: dict[str, Vocabulary] = {}
    for name, config in data.vocabularies.items():
        versions = load_vocabulary_versions(root, files, name)
        kind = versions[0].schema.field("value").type if versions else pa.int64()
        vocabularies[name] = merge_versions(versions, config.oov_rows, kind)
    stats: dict[str, FittedStats] = {}
    for path in sorted(p for p in files if p.startswith(f"{FITTED_DIRECTORY}/")):
        body = json.loads(read_verified(root / path, files[path]))
        stats |= from_json(dict[str, FittedStats], body)
    return FittedValues(vocabularies, stats)


def load_vocabulary_versions(root: Path, files: Mapping[str, str], name: str) -> list[pa.Table]:
    """Read the versions of one vocabulary, in order; see `load_fitted`."""
    paths = sorted(p for p in files if p.startswith(f"{VOCABULARIES}/{name}/"))
    buffers = [pa.py_buffer(read_verified(root / p, files[p])) for p in paths]
    return [cast(pa.Table, pq.read_table(pa.BufferReader(b))) for b in buffers]
