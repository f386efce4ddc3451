"""Estimated cost of storing features per sample, or once per distinct tuple of a block.

Bytes are zstd bytes of narrow codes, differences of numbers, texts, and buffers of lists stored as
windows: close to the writer's trials and a thousand times cheaper. Each value that a reader decodes
and looks up adds a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.clustering.storage_layout import WINDOWS_RATIO
from presage.schemas.arrays import (
    Array,
    Jagged,
    comparable,
    flat_list,
    is_list,
    is_text,
    numpy_of,
    one_chunk,
    unique_tuples,
)
from presage.schemas.dataset.group_files import to_windows
from presage.schemas.errors import SchemaError
from presage.schemas.features import Role
from presage.schemas.hashing import splitmix64

BYTES_PER_VALUE: Mapping[Role, float] = {"sparse": 0.05, "dense": 0.01}
"""Cost of decoding and looking up one value, in stored bytes; `kept` features are not read. It
breaks near-ties: with ten times as much, the demo took 2.4 % more bytes than with the groups that
its job names (benchmarks/groups.md)."""
LEAST_DEDUP_FACTOR = 1.05
"""Least dedup factor of a group that saves anything: `groups: auto` chooses none below, and builds
and previews warn of one that the job names."""
BYTES_PER_INVERSE = 0.01
"""Cost of following one inverse index, in stored bytes."""
BYTES_PER_GROUP = 1_600
"""Fixed cost per row group: column chunks of `block`, `unique_index` and inverse, and a footer."""
_CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True, slots=True)
class FeatureCosts:
    """One column of clustered samples.

    Attributes:
        name: of the column.
        role: in the schema.
        codes: (num_samples,) int64, equal where values are equal bit by bit.
        values: one value or a list per sample; numbers as narrow codes.
        num_made: number of columns that transforms make of it, which are stored with it; a column
            of n inputs counts 1 / n for each.
    """

    name: str
    role: Role
    codes: NDArray[np.int64]
    values: Array | Jagged | Texts
    num_made: float = 0.0

    def num_values(self, rows: NDArray[np.int64]) -> int:
        """Return the number of values of some rows."""
        if isinstance(self.values, Jagged):
            return int(self.values.lengths[rows].sum())
        return len(rows)

    def num_bytes(self, rows: NDArray[np.int64]) -> int:
        """Return the estimated stored bytes of some rows."""
        if isinstance(self.values, Texts):
            return self.values.num_bytes(rows)
        if isinstance(self.values, Jagged):
            lists = self.values.take(rows)
            return packed_bytes(lists.values) + packed_bytes(lists.lengths)
        return packed_bytes(self.values[rows])

    def num_window_bytes(self, rows: NDArray[np.int64]) -> int | None:
        """Return the estimated bytes of the lists of some rows, stored as windows over buffers.

        None if the feature has no lists, or if they have too little in common.
        """
        if not isinstance(self.values, Jagged):
            return None
        lists = self.values.take(rows)
        windows = to_windows(Jagged(lists.values.astype(np.uint64), lists.offsets))
        if len(windows.source) > WINDOWS_RATIO * len(lists.values):
            return None
        fields = (windows.buffer, windows.start, windows.length, np.diff(windows.offsets))
        return packed_bytes(lists.values[windows.source]) + sum(packed_bytes(p) for p in fields)


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of texts.

    `codes` are (num_samples,), the index of each sample's value in `distinct`, in no order.
    """

    distinct: pa.Array
    codes: Array

    def num_bytes(self, rows: NDArray[np.int64]) -> int:
        """Return the estimated bytes of some rows that contain every distinct value."""
        codes = self.codes[rows]
        with_dictionary = _compressed(codes) + text_bytes(self.distinct)
        return min(with_dictionary, text_bytes(self.distinct.take(pa.array(codes))))


def text_bytes(texts: pa.Array) -> int:
    """Return the zstd bytes of concatenated texts and of their lengths.

    `texts` have no offset into their buffer, as `take` returns them.
    """
    lengths = pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64()).to_numpy()
    content = texts.buffers()[2] or pa.py_buffer(b"")
    content = content.slice(0, int(lengths.sum()))
    return len(_CODEC.compress(content, asbytes=True)) + packed_bytes(_narrow(lengths))


def feature_of(
    name: str, role: Role, column: pa.ChunkedArray, num_made: float = 0.0
) -> FeatureCosts | None:
    """Return a column as a `FeatureCosts`, or None if its type cannot be compared."""
    array = one_chunk(column)
    try:
        first, inverse = unique_tuples(comparable(array))
        values = _values_of(array, inverse, first)
    except SchemaError:
        return None
    return FeatureCosts(name, role, inverse.astype(np.int64), values, num_made)


def _values_of(
    array: pa.Array, inverse: NDArray[np.int32], first: NDArray[np.int64]
) -> Array | Jagged | Texts:
    num_unique = len(first)
    if is_text(array.type):
        return Texts(array.take(pa.array(first)), inverse.astype(_width(num_unique)))
    if not is_list(array.type):
        kind = array.type
        if pa.types.is_integer(kind) or pa.types.is_temporal(kind):
            values = array.cast(pa.int64(), safe=False) if kind.bit_width == 64 else array
            if not values.null_count and not pa.types.is_temporal(values.type):
                return _narrow(values.to_numpy())
        return inverse.astype(_width(num_unique))
    values, offsets = flat_list(array)
    if is_text(values.type):
        codes = numpy_of(values.dictionary_encode().indices)
    else:
        _, codes = np.unique(numpy_of(values), return_inverse=True)
    return Jagged(codes.astype(_width(int(codes.max(initial=0)) + 1)), offsets)


def _narrow(values: NDArray[np.int64]) -> Array:
    """Return integers minus their minimum, in the narrowest type."""
    if not len(values):
        return values
    low = int(values.min())
    span = int(values.max()) - low
    return (values.astype(np.uint64) - np.uint64(low & (2**64 - 1))).astype(_width(span + 1))


def _width(size: int) -> type[np.unsignedinteger]:
    for kind, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32)):
        if size <= 1 << bits:
            return kind
    return np.uint64


def packed_bytes(values: Array) -> int:
    """Return the zstd bytes of numbers or of their differences, whichever is less."""
    if values.itemsize == 1 or not len(values):
        return _compressed(values)
    return min(_compressed(values), _compressed(np.diff(values, prepend=values[:1])))


def _compressed(values: Array) -> int:
    """Return the zstd bytes of numbers, shuffled by byte position."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize).T
    return len(_CODEC.compress(np.ascontiguousarray(planes), asbytes=True))


@dataclass(slots=True)
class Costs:
    """Costs of any set of features; numbers are memoized.

    `block` is (num_samples,), ascending; `bytes_per_group` is the fixed cost of a group.
    """

    block: NDArray[np.int64]
    features: Sequence[FeatureCosts]
    bytes_per_group: float = BYTES_PER_GROUP
    _hashes: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    _costs: dict[frozenset[int], float] = field(default_factory=dict)
    _alone: dict[int, float] = field(default_factory=dict)
    _plain: dict[tuple[int, int], float] = field(default_factory=dict)
    _windows: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.block)

    def inverse(self, members: frozenset[int]) -> NDArray[np.int64]:
        """Return (num_samples,) index of each sample's (block, tuple), by first appearance."""
        keys = self._hash_of_block()
        for member in members:
            keys = keys + self._hash_of(member)
        return numbered(keys)

    def _hash_of_block(self) -> NDArray[np.uint64]:
        return self._hashes.setdefault(-1, splitmix64(self.block))

    def _hash_of(self, member: int) -> NDArray[np.uint64]:
        if member not in self._hashes:
            salt = splitmix64(np.array([member + 1]))
            self._hashes[member] = splitmix64(self.features[member].codes ^ salt.view(np.int64))
        return self._hashes[member]

    def num_unique(self, members: frozenset[int]) -> int:
        """Return the number of tuples that are stored."""
        return int(self.inverse(members).max(initial=-1)) + 1

    def in_samples(self, member: int) -> float:
        """Return the cost of one feature stored per sample."""
        if member not in self._alone:
            self._alone[member] = self._stored(member, np.arange(self.num_samples), -1)
        return self._alone[member]

    def as_group(self, members: frozenset[int]) -> float:
        """Return the cost of some features stored once per distinct tuple of a block.

        Infinite for a group that a build would warn about.
        """
        if members not in self._costs:
            inverse = self.inverse(members)
            rows = first_rows(inverse)
            starts = np.flatnonzero(np.diff(self.block, prepend=-1))
            local = inverse - np.repeat(inverse[starts], np.diff(starts, append=len(inverse)))
            rows_key = hash(rows.tobytes())  # most merges keep the rows of one side
            plain = [self._stored(m, rows, rows_key) for m in members]
            stored = [
                min(cost, self._as_windows(m, rows, rows_key))
                for m, cost in zip(members, plain, strict=True)
            ]
            saves = stored < plain or len(inverse) >= LEAST_DEDUP_FACTOR * len(rows)
            self._costs[members] = (
                sum(stored)
                + packed_bytes(_narrow(local))
                + BYTES_PER_INVERSE * self.num_samples
                + self.bytes_per_group
                if saves
                else inf
            )
        return self._costs[members]

    def best(self, members: frozenset[int]) -> float:
        """Return the lower cost: as one group, or stored per sample."""
        return min(self.as_group(members), sum(self.in_samples(m) for m in members))

    def _stored(self, member: int, rows: NDArray[np.int64], rows_key: int) -> float:
        key = member, rows_key
        if key not in self._plain:
            feature = self.features[member]
            # A column made of a scalar is about as large; one made of a list may be its length.
            copies = 1 if isinstance(feature.values, Jagged) else 1 + feature.num_made
            self._plain[key] = copies * feature.num_bytes(rows) + _read_cost(feature, rows)
        return self._plain[key]

    def _as_windows(self, member: int, rows: NDArray[np.int64], rows_key: int) -> float:
        key = member, rows_key
        if key not in self._windows:
            feature = self.features[member]
            size = feature.num_window_bytes(rows)
            self._windows[key] = inf if size is None else size + _read_cost(feature, rows)
        return self._windows[key]


def _read_cost(feature: FeatureCosts, rows: NDArray[np.int64]) -> float:
    return BYTES_PER_VALUE.get(feature.role, 0.0) * feature.num_values(rows)


def numbered(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the index of each sample's key, by first appearance.

    Example:
        >>> numbered(np.array([5, 7, 4, 5], np.uint64)).tolist()
        [0, 1, 2, 0]
    """
    return pa.array(keys).dictionary_encode().indices.to_numpy().astype(np.int64)


def first_rows(inverse: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first sample of each index of `numbered`, ascending.

    Example:
        >>> first_rows(np.array([0, 1, 0, 2])).tolist()
        [0, 1, 3]
    """
    highest = np.maximum.accumulate(inverse)
    return np.flatnonzero(np.diff(highest, prepend=-1))
