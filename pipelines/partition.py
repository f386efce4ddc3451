"""Partitions of session keys, and times in microseconds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrays import comparable, hash_keys


def hash_session_keys(keys: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Return the hash that partitions session keys; it never changes between releases."""
    return hash_keys(comparable(keys))


def part_of_key(hashes: NDArray[np.uint64], num_parts: int) -> NDArray[np.int64]:
    """Return the partition of each hash: equal ranges of the upper 32 bits, ascending."""
    return ((hashes >> np.uint64(32)) * np.uint64(num_parts) >> np.uint64(32)).astype(np.int64)


def microseconds(moment: datetime | timedelta) -> int:
    """Return microseconds, since 1970 (UTC) for a moment."""
    if isinstance(moment, datetime):
        moment = moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return moment // timedelta(microseconds=1)
