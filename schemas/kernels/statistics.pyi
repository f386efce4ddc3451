"""The functions of `statistics.cpp`.

Values are integers of any width; where it says so, float32 or float64, too.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def totals(values: NDArray[Any]) -> tuple[int, float, float, bytes, bytes]:
    """Describe numbers.

    Args:
        values: at least one, may be finite floats.

    Returns:
        The number of zeros, minimum, maximum; and without rounding the sum in units of 2**-1074 and
        the sum of squares in units
        of 2**-2148, both as little-endian signed integers.
    """

def count_buckets(values: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """Return the counts of values, which may be floats, by the upper `bits` of their float64."""

def frequent_values(
    values: NDArray[np.integer], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the most frequent values, at most `limit`, and their counts.

    Of equally frequent values, the smaller ones come first. If more than `limit` are distinct,
    those that are less than 1 / (4 * limit) of all are left out.
    """

def smallest_hashes(values: NDArray[np.integer], limit: int) -> NDArray[np.uint64]:
    """Return the `limit` smallest distinct hashes of values, ascending."""
