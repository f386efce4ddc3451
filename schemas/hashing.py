"""Stable hashes: the same on every machine and in every release.

The shard and order of samples, embedding rows and slots are all derived from `splitmix64`, so a
change here breaks existing datasets.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

from presage.schemas.kernels import arrays as kernels

NUM_SLOTS = 4096
"""Hash slots of a table's rows; fixed in format 1."""

MAX_ROW = (1 << 63) - 1
"""Largest row: rows fit a signed 64-bit column."""


def splitmix64(x: ArrayLike) -> NDArray[np.uint64]:
    """Mix each 64-bit integer into a pseudorandom one; a bijection.

    Args:
        x: integers of any shape; signed ones by their bits.

    Returns:
        uint64 array of the same shape.

    Example:
        >>> [hex(int(v)) for v in splitmix64(np.array([0, 1]))]
        ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    bits = as_bits(x)
    return kernels.splitmix64(np.ravel(bits)).reshape(bits.shape)


def as_bits(x: ArrayLike) -> NDArray[np.uint64]:
    """Return integers as uint64, signed ones by their two's complement bits."""
    array = np.asarray(x)
    return array if array.dtype == np.uint64 else array.astype(np.int64, copy=False).view(np.uint64)


def salt_of(name: str) -> np.uint64:
    """Return the 64-bit salt of a name.

    Example:
        >>> hex(int(salt_of("items")))
        '0xe492d380854f3c5f'
    """
    return np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def hash_rows(ids: NDArray[np.integer], table: str, num_rows: int) -> NDArray[np.int64]:
    """Map ids to rows of a hashed table.

    Args:
        ids: any shape, any integers.
        table: name of the table; its salt keeps tables independent.
        num_rows: rows of the table, 1 to 2**63.

    Returns:
        int64 rows in [0, num_rows), same shape.
    """
    rows = kernels.hash_rows(np.ravel(as_bits(ids)), int(salt_of(table)), num_rows)
    return rows.reshape(np.shape(ids))


def divide_slots(count: int) -> NDArray[np.int64]:
    """Return (NUM_SLOTS,) the part of each slot where stores share all slots equally, in order.

    Up to 16 parts are cut between ranges of 256 slots, which a scheduler moves as a whole.

    Args:
        count: of the parts.

    Example:
        >>> np.bincount(divide_slots(3)).tolist(), np.bincount(divide_slots(17))[:2].tolist()
        ([1536, 1280, 1280], [241, 241])
    """
    size = 256 if count <= 16 else 1
    return np.arange(NUM_SLOTS) // size * count // (NUM_SLOTS // size)


def slot_of_row(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the hash slot of each row, in [0, NUM_SLOTS)."""
    return (splitmix64(rows) >> np.uint64(52)).astype(np.int64)


def partition_of_key(hashes: NDArray[np.uint64], num_partitions: int) -> NDArray[np.int64]:
    """Return the partition of each hash: equal ranges of the upper 32 bits, ascending."""
    upper = hashes >> np.uint64(32)
    return (upper * np.uint64(num_partitions) >> np.uint64(32)).astype(np.int64)
