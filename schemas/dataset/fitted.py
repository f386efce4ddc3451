"""Values that transforms fitted on the training range, as stored with the dataset.

A segment's manifest lists the files with their hashes in `fitted`: the versions of each
vocabulary, and a JSON file with the statistics of `normalize` and `bucketize`. Files are never
changed; later segments add files. The name of a file has a part of its hash, so that it identifies
the content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.arrays import hash_values, is_list, one_chunk
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.files import decode_parquet, encode_parquet, read_verified
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import as_bits, hash_rows
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import from_json

# Append-only vocabularies: a permanent row for each value. Rows below `oov_rows` are for values
# without an entry, by hash; entries follow in the order in which they were appended. Each version
# is one Parquet file.

VOCABULARIES = "vocabularies"


def vocabulary_schema(value: pa.DataType) -> pa.Schema:
    """Return the columns of a version; `value` is int64 or string."""
    return pa.schema(
        [
            pa.field("row", pa.int64()),
            pa.field("value", value),
            pa.field(
                "count", pa.int64()
            ),  # in the training samples of the segment that added the entry
            pa.field("version", pa.int32()),
        ]
    )


def value_type(column: pa.DataType) -> pa.DataType:
    """Return int64 or string, the type of a vocabulary over a column.

    Raises:
        SchemaError: the column holds neither integers nor texts.
    """
    kind = column.value_type if is_list(column) else column
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.string()
    raise SchemaError(f"vocabulary must read integers or texts, got {column}; cast it in SQL")


@dataclass(frozen=True)
class Vocabulary:
    """Values in the order of their rows; lookups need 12 bytes per entry besides the values.

    Attributes:
        values: (num_entries,) int64 or string, distinct; entry i has row `oov_rows + i`. A null is
            an entry whose value was erased: no value has its row.
        oov_rows: rows shared by all other values, at least 1.
    """

    values: pa.Array
    oov_rows: int

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64] | NDArray[np.uint64], NDArray[np.int32]]:
        entries = np.flatnonzero(self.values.is_valid().to_numpy(zero_copy_only=False))
        keys = _keys(self.values.drop_null())
        order = np.argsort(keys, kind="stable")
        return keys[order], entries[order].astype(np.int32)

    def rows_of(self, values: pa.Array) -> pa.Array:
        """Return the row of each value, null for a null.

        Args:
            values: of the vocabulary's type.

        Returns:
            int64, in [0, oov_rows + num_entries).

        Example:
            >>> vocabulary = Vocabulary(pa.array([30, 10]), oov_rows=1)
            >>> vocabulary.rows_of(pa.array([10, 30, 7, None])).to_pylist()
            [2, 1, 0, None]
        """
        present = values.drop_null().cast(self.values.type)
        rows = hash_rows(hash_values(present).view(np.int64), "out of vocabulary", self.oov_rows)
        keys, order = self._sorted
        if len(keys):
            present_keys = _keys(present)
            index = np.minimum(np.searchsorted(keys, present_keys), len(keys) - 1)
            has_entry = keys[index] == present_keys
            if pa.types.is_string(present.type):  # two texts may share a hash
                entries = self.values.take(pa.array(order[index]))
                has_entry &= pc.call_function("equal", [entries, present]).to_numpy(
                    zero_copy_only=False
                )
            rows[has_entry] = order[index[has_entry]].astype(np.int64) + self.oov_rows
        if not values.null_count:
            return pa.array(rows)
        all_rows = np.zeros(len(values), np.int64)
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        all_rows[valid] = rows
        return pa.array(all_rows, mask=~valid)


def _keys(values: pa.Array) -> NDArray[np.int64] | NDArray[np.uint64]:
    if pa.types.is_string(values.type):
        return hash_values(values)
    return cast("NDArray[np.int64]", values.to_numpy(zero_copy_only=False))


def new_entries(
    vocabulary: Vocabulary, counts: pa.Table, min_count: int, num_rows: int
) -> pa.Table:
    """Return the new entries of counted values, by descending count, then value.

    `counts` has distinct values and int64 counts in any order; `num_rows` includes the rows of
    values without an entry.

    Returns:
        Columns of `vocabulary_schema` but `version`.
    """
    frequent = counts.filter(pa.array(counts["count"].to_numpy() >= min_count))
    values = one_chunk(frequent["value"].cast(vocabulary.values.type))
    has_entry = vocabulary.rows_of(values).to_numpy(zero_copy_only=False) >= vocabulary.oov_rows
    new = pa.table({"value": values, "count": frequent["count"]}).filter(pa.array(~has_entry))
    new = new.sort_by([("count", "descending"), ("value", "ascending")])
    if pa.types.is_string(vocabulary.values.type):
        new = _without_collisions(vocabulary, new)
    start = vocabulary.oov_rows + len(vocabulary.values)
    new = new.slice(0, max(0, num_rows - start))
    return new.add_column(0, "row", pa.array(np.arange(start, start + new.num_rows)))


def _without_collisions(vocabulary: Vocabulary, new: pa.Table) -> pa.Table:
    """Drop texts whose 64-bit hash equals that of an earlier entry: one pair in 10**19."""
    existing = hash_values(vocabulary.values)
    hashes = hash_values(one_chunk(new["value"]))
    _, first = np.unique(hashes, return_index=True)
    keep = np.zeros(len(hashes), bool)
    keep[first] = True
    return new.filter(pa.array(keep & ~np.isin(hashes, existing)))


def encode_version(entries: pa.Table, version: int) -> bytes:
    """Encode a version as the bytes of its file."""
    column = pa.array(np.full(entries.num_rows, version, np.int32))
    return encode_table(entries.append_column("version", column))


def encode_table(table: pa.Table) -> bytes:
    """Encode the columns of `vocabulary_schema` as the bytes of a file."""
    return encode_parquet(table.cast(vocabulary_schema(table.schema.field("value").type)))


def version_path(name: str, version: int, data: bytes) -> str:
    """Return the path of a version, relative to the dataset."""
    digest = hashlib.sha256(data).hexdigest()[:12]
    return str(PurePosixPath(VOCABULARIES, name, f"{version:05d}-{digest}.parquet"))


def merge_versions(versions: Sequence[pa.Table], oov_rows: int, kind: pa.DataType) -> Vocabulary:
    """Merge the versions of a vocabulary, tables of `vocabulary_schema` in order, maybe none.

    Raises:
        SchemaError: rows are not consecutive, or a value has two rows.
    """
    schema = vocabulary_schema(kind)
    table = pa.concat_tables([schema.empty_table(), *(v.cast(schema) for v in versions)])
    rows = table["row"].to_numpy()
    if not np.array_equal(rows, np.arange(oov_rows, oov_rows + len(rows))):
        raise SchemaError(
            f"rows of a vocabulary are not consecutive from {oov_rows}; "
            "restore its files or rebuild the dataset"
        )
    values = one_chunk(table["value"].combine_chunks())
    present = values.drop_null()
    if len(present.unique()) != len(present):
        raise SchemaError(
            "value of a vocabulary has two rows; restore its files or rebuild the dataset"
        )
    return Vocabulary(values, oov_rows)


def shards_of(values: pa.Array, num_shards: int) -> NDArray[np.int64]:
    """Return the shard that counts each value, in [0, num_shards)."""
    return (as_bits(hash_values(values)) % np.uint64(num_shards)).astype(np.int64)


# Statistics, and the fitted values of a whole job.

FITTED_DIRECTORY = "fitted"


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


def load_fitted(root: Path | Location, files: Mapping[str, str], data: DataConfig) -> FittedValues:
    """Read and verify fitted values of a dataset, or of a segment being built.

    `files` maps paths to sha256, as in a segment's manifest.

    Raises:
        SchemaError: a file is missing, has changed, or has another format.
    """
    vocabularies: dict[str, Vocabulary] = {}
    for name, config in data.vocabularies.items():
        versions = load_vocabulary_versions(root, files, name)
        kind = versions[0].schema.field("value").type if versions else pa.int64()
        vocabularies[name] = merge_versions(versions, config.oov_rows, kind)
    stats: dict[str, FittedStats] = {}
    for path in sorted(p for p in files if p.startswith(f"{FITTED_DIRECTORY}/")):
        body = json.loads(read_verified(root / path, files[path]))
        try:
            stats |= from_json(dict[str, FittedStats], body)
        except ValueError as error:
            raise SchemaError(
                f"{error}; use the release that wrote the file or rebuild the dataset",
                file=str(root / path),
            ) from error
    return FittedValues(vocabularies, stats)


def load_vocabulary_versions(
    root: Path | Location, files: Mapping[str, str], name: str
) -> list[pa.Table]:
    """Read the versions of one vocabulary, in order; see `load_fitted`."""
    paths = sorted(p for p in files if p.startswith(f"{VOCABULARIES}/{name}/"))
    return [decode_parquet(read_verified(root / path, files[path])) for path in paths]
