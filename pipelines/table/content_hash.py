"""The content hash of a table, which is equal for equal rows in any order.

Each row has a 64-bit hash of its values. The hashes are added, so neither order, files nor batches
matter, but repeated rows count. Widths of integers and kinds of strings and lists are not
distinguished: compare schemas for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.arrays import Jagged, comparable, hash_keys, is_list, offsets_of, one_chunk
from schemas.errors import SchemaError
from schemas.hashing import splitmix64

_NULL = np.uint64(0x6E756C6C)
_SECOND = np.uint64(0x9FB21C651E98DF25)


@dataclass(frozen=True, slots=True)
class ContentHash:
    """The hash of a multiset of rows; `a + b` is the hash of the union.

    Attributes:
        num_rows: rows.
        first: sum of the rows' hashes, modulo 2**64.
        second: sum of second hashes of these, modulo 2**64.
    """

    num_rows: int = 0
    first: int = 0
    second: int = 0

    def __add__(self, other: ContentHash) -> ContentHash:
        """Return the hash of the union."""
        mask = (1 << 64) - 1
        return ContentHash(
            self.num_rows + other.num_rows,
            (self.first + other.first) & mask,
            (self.second + other.second) & mask,
        )

    def __str__(self) -> str:
        """Return the hash as text: 32 hex digits and the number of rows."""
        return f"{self.first:016x}{self.second:016x}-{self.num_rows}"


def content_hash(batches: Iterable[pa.Table | pa.RecordBatch]) -> ContentHash:
    """Return the hash of all rows of batches with the same column names.

    Raises:
        SchemaError: the type of a column cannot be hashed.
    """
    total = ContentHash()
    for batch in batches:
        if batch.num_rows:
            total += _of_rows(row_hashes(batch))
    return total


def _of_rows(hashes: NDArray[np.uint64]) -> ContentHash:
    others = splitmix64(hashes ^ _SECOND)
    return ContentHash(len(hashes), int(hashes.sum()), int(others.sum()))


def row_hashes(batch: pa.Table | pa.RecordBatch) -> NDArray[np.uint64]:
    """Return a hash of each row, independent of the order of its columns."""
    return _row_hashes({name: value_hashes(batch[name]) for name in batch.schema.names})


def hash_of_values(hashes: Mapping[str, NDArray[np.uint64]]) -> ContentHash:
    """Return the hash of rows from the `value_hashes` of each column, (num_rows,)."""
    return _of_rows(_row_hashes(hashes))


def _row_hashes(hashes: Mapping[str, NDArray[np.uint64]]) -> NDArray[np.uint64]:
    names = sorted(hashes)
    salts = [hash_keys(comparable(pa.array([name])))[0] for name in names]
    return hash_keys([splitmix64(hashes[n] ^ s) for n, s in zip(names, salts, strict=True)])


def value_hashes(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return a hash of each value, (num_rows,) uint64, independent of the batch.

    Raises:
        SchemaError: the type cannot be hashed.
    """
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = one_chunk(array.dictionary_decode())
    if array.null_count == 0:
        return _present(array)
    hashes = np.full(len(array), _NULL)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    hashes[valid] = _present(pc.drop_null(array))
    return hashes


def _present(array: pa.Array) -> NDArray[np.uint64]:
    kind = array.type
    if len(array) == 0 or pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if pa.types.is_struct(kind):
        fields = [value_hashes(array.field(i)) for i in range(kind.num_fields)]
        return hash_keys(fields) if fields else np.full(len(array), _NULL)
    if pa.types.is_map(kind) or is_list(kind):
        return hash_keys([_list_of_hashes(array)])
    if pa.types.is_decimal(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        array = array.cast(pa.string() if pa.types.is_decimal(kind) else pa.int64())
    elif pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        array = array.cast(pa.int64())
    try:
        return hash_keys(comparable(array))
    except SchemaError as error:
        raise SchemaError(
            f"values cannot be compared: type {kind}; cast the column before"
        ) from error


def _list_of_hashes(array: pa.Array) -> Jagged:
    if is_list(array.type):
        lengths = pc.list_value_length(array).to_numpy().astype(np.int64)
        return Jagged(value_hashes(pc.list_flatten(array)), offsets_of(lengths))
    offsets = array.offsets.to_numpy().astype(np.int64)  # a map
    entries = [a.slice(offsets[0], offsets[-1] - offsets[0]) for a in (array.keys, array.items)]
    hashes = hash_keys([value_hashes(e) for e in entries])
    return Jagged(hashes, offsets - offsets[0])
