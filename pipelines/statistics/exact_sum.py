"""Sums without rounding, so that no order and no cut of the rows changes a bit of a statistic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FLOAT_BITS = 53
"""Integers up to 2**53 are exact in float64."""
_CHUNK = 1 << 16
"""Values that are squared at a time: they stay in the processor's cache."""
_LAYERS = 6
"""Layers of bits that are taken off before the slow way: 6 * 35 bits hold most columns whole."""


def exact_sum(values: NDArray[np.generic]) -> Fraction:
    """Return the sum of finite numbers without rounding.

    Example:
        >>> exact_sum(np.array([1e100, 1.0, -1e100]))
        Fraction(1, 1)
        >>> exact_sum(np.array([2**63 - 1, 2**63 - 1])) == 2**64 - 2
        True
    """
    if not len(values):
        return Fraction(0)
    if values.dtype.kind != "f":
        return Fraction(_integer_sum(values))
    return _float_sum(values.astype(np.float64))


def exact_sum_of_squares(values: NDArray[np.generic]) -> Fraction:
    """Return the sum of squares.

    Squares of float32 and of integers below 2**31 are exact; those of larger
    numbers are rounded to float64, one by one.

    Example:
        >>> exact_sum_of_squares(np.array([3, -4]))
        Fraction(25, 1)
    """
    chunks = (values[i : i + _CHUNK] for i in range(0, len(values), _CHUNK))
    return sum(map(_sum_of_squares, chunks), Fraction(0))


def _sum_of_squares(values: NDArray[np.generic]) -> Fraction:
    if values.dtype.kind == "f":
        return exact_sum(_squares(values.astype(np.float64)))
    largest = _largest(values)
    if largest < 1 << 31:
        wide = values.astype(np.int64)
        if largest**2 * len(wide) < 1 << 63:
            return Fraction(int(np.dot(wide, wide)))
        return exact_sum(wide * wide)
    is_small = np.abs(values.astype(np.float64)) < 2.0**31
    large = _squares(values[~is_small].astype(np.float64))
    return exact_sum_of_squares(values[is_small]) + exact_sum(large)


def _squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # above 1e154 a square is as large as numbers are
        return np.minimum(values * values, np.finfo(np.float64).max)


def _largest(values: NDArray[np.generic]) -> int:
    return max(int(values.max()), -int(values.min()))


def _integer_sum(values: NDArray[np.generic]) -> int:
    if _largest(values) * len(values) < 1 << 63:
        return int(values.sum(dtype=np.int64))
    wide: NDArray[Any] = values if values.dtype == np.uint64 else values.astype(np.int64)
    low, high = wide & wide.dtype.type(0xFFFFFFFF), wide >> wide.dtype.type(32)
    return (int(high.sum()) << 32) + int(low.sum())


def _float_sum(rest: NDArray[np.float64]) -> Fraction:
    """Take layer after layer of upper bits off all values; the sum of a layer is exact.

    A layer holds multiples of one power of two, so small that even all of them
    together stay below 2**53 times it.
    """
    bits = _FLOAT_BITS - len(rest).bit_length()
    total = Fraction(0)
    for _ in range(_LAYERS):
        largest = float(np.abs(rest).max())
        if not largest:
            return total
        exponent = int(np.frexp(largest)[1]) - bits
        if not -1000 < exponent < 900:  # the unit itself would leave the range of float64
            break
        unit = 2.0**exponent
        whole = np.trunc(rest / unit)
        total += int(whole.sum()) * Fraction(2) ** exponent
        rest = rest - whole * unit
    return total + _sum_by_exponent(rest)


def _sum_by_exponent(values: NDArray[np.float64]) -> Fraction:
    """Take numbers apart into 53-bit integers and exponents, and add the halves by exponent.

    Exact below 2**26 values a call.
    """
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64)
    base = int(exponent.min())
    total = Fraction(0)
    for part, shift in ((whole & 0x7FFFFFF, 0), (whole >> 27, 27)):
        sums = np.bincount(exponent - base, weights=part.astype(np.float64))
        for index in np.flatnonzero(sums).tolist():
            power = index + base - 53 + shift
            total += int(sums[index]) * (Fraction(2) ** power)
    return total
