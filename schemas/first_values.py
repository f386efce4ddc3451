"""First values of embedding rows: a pure function, so that an unseen row costs nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from schemas.hashing import as_bits, salt_of, splitmix64
from schemas.jagged import Array

_BITS = 24
"""Random bits per value: a float32 holds them exactly, so both precisions start equal."""


def initial_bound(dim: int) -> float:
    """Return the bound b of the uniform distribution U(-b, b) that rows start from.

    0.5 / sqrt(dim), whatever the number of rows: TorchRec's sqrt(1 / num_rows)
    would start a hashed table of 2**63 rows at zero.
    """
    return 0.5 / dim**0.5


def initial_rows(
    rows: NDArray[np.int64], *, table: str, seed: int, dim: int, dtype: DTypeLike
) -> Array:
    """Return the values that rows have before they are first trained.

    Args:
        rows: (n,) row ids.
        table: table name; its salt keeps tables independent.
        seed: of the run.
        dim: width of a row.
        dtype: float32 or float64; the values are the same in both.

    Returns:
        (n, dim) values in [-b, b), b = `initial_bound(dim)`.
    """
    base = splitmix64(as_bits(rows) ^ splitmix64(np.array([seed])) ^ salt_of(table))
    # halves: (n, ceil(dim / 2), 2) 32-bit numbers, two from each 64-bit hash
    columns = np.arange((dim + 1) // 2, dtype=np.uint64) << np.uint64(1) | np.uint64(1)
    hashes = splitmix64(base[:, None] + columns * np.uint64(0x9E3779B97F4A7C15))
    halves = hashes.view(np.uint32).reshape(len(rows), 2 * len(columns))[:, :dim]
    uniform = (halves >> np.uint32(32 - _BITS)).astype(np.float32)
    uniform *= np.float32(2.0 ** (1 - _BITS))
    uniform -= np.float32(1)
    uniform *= np.float32(initial_bound(dim))
    return uniform.astype(dtype, copy=False)
