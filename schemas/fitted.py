"""Values that transforms fitted on the training range, as stored with the dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.config.job import DataConfig
from schemas.files import read_verified
from schemas.manifest import canonical_json
from schemas.vocabulary import VOCABULARIES, Vocabulary, merge_versions

# What transforms learned from the training range, as it lies with the dataset.
#
# A segment's manifest names each file by its hash in `learned`: the versions of each vocabulary,
# and one JSON file with the numbers of `normalize` and `bucketize`. Files are never changed; a
# later segment names more of them.

FITTED_DIRECTORY = "learned"


@dataclass(frozen=True, slots=True)
class FittedStats:
    """What one `normalize` or `bucketize` learned; only what it needs is set.

    Attributes:
        center: what is taken off: mean or minimum.
        scale: what is divided by: standard deviation or range, 1 where that is 0.
        boundaries: ascending.
    """

    center: float = 0.0
    scale: float = 1.0
    boundaries: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class FittedValues:
    """Everything that the transforms of a job need beside their inputs.

    Attributes:
        vocabularies: by name.
        numbers: by `stats_key` of the transform.
    """

    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict[str, Vocabulary])
    numbers: Mapping[str, FittedStats] = field(default_factory=dict[str, FittedStats])


def stats_key(group: str, column: str) -> str:
    """Return the name of a transform's numbers.

    Example:
        >>> stats_key("user", "age_bucket")
        'user.age_bucket'
    """
    return f"{group}.{column}"


def encode_stats(numbers: Mapping[str, FittedStats]) -> bytes:
    """Return numbers as canonical JSON; floats come back bit by bit."""
    body = {
        k: {"center": n.center, "scale": n.scale, "boundaries": list(n.boundaries)}
        for k, n in numbers.items()
    }
    return f"{canonical_json(body)}\n".encode()


def stats_path(data: bytes) -> str:
    """Return the path of a file of numbers, relative to the dataset."""
    return str(PurePosixPath(FITTED_DIRECTORY, f"{hashlib.sha256(data).hexdigest()[:12]}.json"))


def load_fitted(root: Path, files: Mapping[str, str], data: DataConfig) -> FittedValues:
    """Read what was learned, every byte verified.

    Args:
        root: the directory that the paths are relative to: the dataset, or a segment being built.
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
    numbers: dict[str, FittedStats] = {}
    for path in sorted(p for p in files if p.startswith(f"{FITTED_DIRECTORY}/")):
        for key, body in json.loads(read_verified(root / path, files[path])).items():
            numbers[key] = FittedStats(body["center"], body["scale"], tuple(body["boundaries"]))
    return FittedValues(vocabularies, numbers)


def load_vocabulary_versions(root: Path, files: Mapping[str, str], name: str) -> list[pa.Table]:
    """Read the versions of one vocabulary, in order; see `load_fitted`."""
    paths = sorted(p for p in files if p.startswith(f"{VOCABULARIES}/{name}/"))
    buffers = [pa.py_buffer(read_verified(root / p, files[p])) for p in paths]
    return [cast(pa.Table, pq.read_table(pa.BufferReader(b))) for b in buffers]
