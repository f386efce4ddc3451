"""What it costs to store features per sample, or once per distinct tuple of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.clustering.dedup import SKIP_RATIO
from schemas.arrays import (
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
from schemas.errors import SchemaError
from schemas.features import Role
from schemas.group_files import to_windows
from schemas.hashing import splitmix64

# What it costs to keep features per sample, or once per distinct tuple of a block.
#
# Bytes are those of zstd over narrow codes, over differences of numbers, over texts, and over the
# buffers of lists that are windows: close to what the writer's trials find, and a thousand times
# cheaper. To them come the values that a reader decodes and looks up, each worth a little.

BYTES_PER_VALUE: Mapping[Role, float] = {"sparse": 0.05, "dense": 0.01}
"""What decoding and looking up one value less is worth, in stored bytes; `kept` ones are not read.
They break near-ties: with ten times as much, the demo took 2.4 % more bytes than with the groups
that its job names (benchmarks/groups.md)."""
LEAST_DEDUP_FACTOR = 1.05
"""Samples per stored tuple of a group that saves anything; `groups: auto` chooses none below, and
builds and previews warn of one that the job names."""
BYTES_PER_INVERSE = 0.01
"""What following one inverse index less is worth."""
BYTES_PER_GROUP = 1_600
"""Column chunks of `block`, `unique_index` and the inverse, and one more footer, per row group."""

_CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True, slots=True)
class Feature:
    """One column of clustered samples.

    Attributes:
        name: of the column.
        role: what the trainer does with it.
        codes: (num_samples,) int64, equal where values are equal bit by bit.
        values: its values, one or any number a sample; numbers as narrow codes.
        num_made: columns that transforms make of it, which lie where it does; one of several inputs
            counts in part.
    """

    name: str
    role: Role
    codes: NDArray[np.int64]
    values: Array | Jagged | Texts
    num_made: float = 0.0

    def num_values(self, rows: NDArray[np.int64]) -> int:
        """Return how many values some rows have."""
        if isinstance(self.values, Jagged):
            return int(self.values.lengths[rows].sum())
        return len(rows)

    def num_bytes(self, rows: NDArray[np.int64]) -> int:
        """Return about how many bytes some rows take on disk."""
        if isinstance(self.values, Texts):
            return self.values.num_bytes(rows)
        if isinstance(self.values, Jagged):
            taken = self.values.take(rows)
            return packed_bytes(taken.values) + packed_bytes(taken.lengths)
        return packed_bytes(self.values[rows])

    def num_window_bytes(self, rows: NDArray[np.int64]) -> int | None:
        """Return about how many bytes its lists of some rows take as windows over buffers.

        None where it has no lists, or where they have too little in common.
        """
        if not isinstance(self.values, Jagged):
            return None
        taken = self.values.take(rows)
        found = to_windows(Jagged(taken.values.astype(np.uint64), taken.offsets))
        if len(found.source) > SKIP_RATIO * len(taken.values):
            return None
        places = (found.buffer, found.start, found.length, np.diff(found.offsets))
        return packed_bytes(taken.values[found.source]) + sum(packed_bytes(p) for p in places)


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of texts.

    Attributes:
        distinct: its values, each once.
        codes: (num_samples,) which of them each sample has; they are no order, so that their
            differences mean nothing.
    """

    distinct: pa.Array
    codes: Array

    def num_bytes(self, rows: NDArray[np.int64]) -> int:
        """Return about how many bytes some rows take, which hold every distinct value."""
        codes = self.codes[rows]
        with_dictionary = _compressed(codes) + text_bytes(self.distinct)
        return min(with_dictionary, text_bytes(self.distinct.take(pa.array(codes))))


def text_bytes(texts: pa.Array) -> int:
    """Return the zstd bytes of texts, one after the other, and of their lengths.

    Args:
        texts: as `take` returns them, which begin where their buffer does.
    """
    lengths = pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64()).to_numpy()
    content = texts.buffers()[2] or pa.py_buffer(b"")
    content = content.slice(0, int(lengths.sum()))
    return len(_CODEC.compress(content, asbytes=True)) + packed_bytes(_narrow(lengths))


def feature_of(
    name: str, role: Role, column: pa.ChunkedArray, num_made: float = 0.0
) -> Feature | None:
    """Return a column as codes, or None when its type cannot be compared."""
    array = one_chunk(column)
    try:
        first, inverse = unique_tuples(comparable(array))
        values = _values_of(array, inverse, first)
    except SchemaError:
        return None
    return Feature(name, role, inverse.astype(np.int64), values, num_made)


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
    """Return whole numbers from 0 in as few bytes as hold them: differences stay differences."""
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
    """Return the zstd bytes of numbers, or of their differences if these are fewer."""
    if values.itemsize == 1 or not len(values):
        return _compressed(values)
    return min(_compressed(values), _compressed(np.diff(values, prepend=values[:1])))


def _compressed(values: Array) -> int:
    """Return the zstd bytes of numbers, all low bytes first, then all next ones."""
    planes = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.itemsize).T
    return len(_CODEC.compress(np.ascontiguousarray(planes), asbytes=True))


@dataclass(slots=True)
class Costs:
    """Costs of any set of features, each found once.

    Attributes:
        block: (num_samples,) the block of each sample, ascending.
        features: all that may be grouped.
        bytes_per_group: fixed cost of a group.
    """

    block: NDArray[np.int64]
    features: Sequence[Feature]
    bytes_per_group: float = BYTES_PER_GROUP
    _hashes: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    _inverses: dict[frozenset[int], NDArray[np.int64]] = field(default_factory=dict)
    _costs: dict[frozenset[int], float] = field(default_factory=dict)
    _alone: dict[int, float] = field(default_factory=dict)
    _kept: dict[tuple[int, int], float] = field(default_factory=dict)
    _windows: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.block)

    def inverse(self, members: frozenset[int]) -> NDArray[np.int64]:
        """Return (num_samples,) the number of each sample's (block, tuple), by first appearance."""
        if members not in self._inverses:
            keys = self._hash_of_block()
            for member in members:
                keys = keys + self._hash_of(member)
            self._inverses[members] = numbered(keys)
        return self._inverses[members]

    def _hash_of_block(self) -> NDArray[np.uint64]:
        return self._hashes.setdefault(-1, splitmix64(self.block))

    def _hash_of(self, member: int) -> NDArray[np.uint64]:
        if member not in self._hashes:
            salt = splitmix64(np.array([member + 1]))
            self._hashes[member] = splitmix64(self.features[member].codes ^ salt.view(np.int64))
        return self._hashes[member]

    def num_unique(self, members: frozenset[int]) -> int:
        """Return how many tuples are stored."""
        return int(self.inverse(members).max(initial=-1)) + 1

    def in_samples(self, member: int) -> float:
        """Return the cost of one feature kept per sample."""
        if member not in self._alone:
            self._alone[member] = self._stored(member, np.arange(self.num_samples), -1)
        return self._alone[member]

    def as_group(self, members: frozenset[int]) -> float:
        """Return the cost of some features kept once per distinct tuple of a block.

        It is infinite for a group that a build would warn of.
        """
        if members not in self._costs:
            inverse = self.inverse(members)
            rows = first_rows(inverse)
            starts = np.flatnonzero(np.diff(self.block, prepend=-1))
            local = inverse - np.repeat(inverse[starts], np.diff(starts, append=len(inverse)))
            same_rows = hash(rows.tobytes())  # most merges keep the rows of one side
            plain = [self._stored(m, rows, same_rows) for m in members]
            stored = [
                min(cost, self._as_windows(m, rows, same_rows))
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
        """Return the lower cost of one group and of all of its features kept per sample."""
        return min(self.as_group(members), sum(self.in_samples(m) for m in members))

    def _stored(self, member: int, rows: NDArray[np.int64], name: int) -> float:
        if (member, name) not in self._kept:
            feature = self.features[member]
            # What is made of one value is about as large; what is made of a list may be its length.
            copies = 1 if isinstance(feature.values, Jagged) else 1 + feature.num_made
            self._kept[member, name] = copies * feature.num_bytes(rows) + _worth(feature, rows)
        return self._kept[member, name]

    def _as_windows(self, member: int, rows: NDArray[np.int64], name: int) -> float:
        if (member, name) not in self._windows:
            feature = self.features[member]
            size = feature.num_window_bytes(rows)
            self._windows[member, name] = inf if size is None else size + _worth(feature, rows)
        return self._windows[member, name]


def _worth(feature: Feature, rows: NDArray[np.int64]) -> float:
    """Return what reading some rows of a feature is worth, in stored bytes."""
    return BYTES_PER_VALUE.get(feature.role, 0.0) * feature.num_values(rows)


def numbered(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each sample the number of its key, numbered by first appearance.

    Example:
        >>> numbered(np.array([5, 7, 4, 5], np.uint64)).tolist()
        [0, 1, 2, 0]
    """
    return pa.array(keys).dictionary_encode().indices.to_numpy().astype(np.int64)


def first_rows(inverse: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first sample of each number of `numbered`, ascending.

    Example:
        >>> first_rows(np.array([0, 1, 0, 2])).tolist()
        [0, 1, 3]
    """
    highest = np.maximum.accumulate(inverse)
    return np.flatnonzero(np.diff(highest, prepend=-1))
