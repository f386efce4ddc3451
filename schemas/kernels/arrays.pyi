"""The functions of `arrays.cpp`.

Arrays are contiguous; a wrong type is a TypeError, a wrong length a ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Number = TypeVar("_Number", bound=np.generic)

def unique_tuples(
    columns: Sequence[tuple[NDArray[Any], NDArray[np.int64] | None]], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
    """Return `presage.schemas.arrays.unique_tuples`, or None if hashes collide under this seed.

    Args:
        columns: fewer than 2**31 values of 1, 2, 4 or 8 bytes; and for lists of such values, their
            offsets.
        seed: of the hash function.
    """

def hash_keys(
    columns: Sequence[tuple[NDArray[Any], NDArray[np.int64] | None]],
) -> NDArray[np.uint64]:
    """Return `presage.schemas.arrays.hash_keys`."""

def unique_in_ranges(
    ranges: NDArray[np.int64], references: NDArray[np.int64], num_references: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `pipelines.samples.tuples.unique_in_ranges`; references are in [0, num_references)."""

def take(values: NDArray[_Number], rows: NDArray[np.int64]) -> NDArray[_Number]:
    """Return `values[rows]`."""

def take_lists(
    values: NDArray[_Number], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[_Number], NDArray[np.int64]]:
    """Return the values and offsets of some lists."""

def take_ranges(
    values: NDArray[_Number], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[_Number]:
    """Return the values of some ranges, concatenated."""

def distinct_rows(
    columns: Sequence[tuple[NDArray[np.integer], NDArray[np.int64]]],
    salt: int | None,
    num_rows: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the ascending distinct rows of the ids of each block, and their offsets.

    Args:
        columns: ids, and the offsets of each block's; at least one, all of as many blocks.
        salt: of the table, whose rows are hashes of ids; None if an id is its row.
        num_rows: of the table.

    Returns:
        None if an id is not a row of the table.
    """

def overlaps(
    values: NDArray[np.uint64],
    offsets: NDArray[np.int64],
    rows: NDArray[np.int64],
    max_candidates: int,
) -> NDArray[np.int64]:
    """Return, for each of some non-empty lists, how much of its start ends the one before it.

    The overlap is at least half of the shorter one. It may start wherever a list has the first
    value of the next one; the
    earliest `max_candidates` of these are compared entry by entry.
    """

def splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `presage.schemas.hashing.splitmix64` of a flat array."""

def hash_rows(ids: NDArray[np.uint64], salt: int, num_rows: int) -> NDArray[np.int64]:
    """Return `presage.schemas.hashing.hash_rows` of flat ids."""

def insert_rows(buckets: NDArray[np.uint32], rows: NDArray[np.int64], start: int, end: int) -> None:
    """Insert the rows at some positions into the hash map of `trainer.stores.local.RowMap`."""
