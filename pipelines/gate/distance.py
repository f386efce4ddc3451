"""How far two distributions are apart, as TFDV measures it."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import TypeVar

Key = TypeVar("Key")


def shares(counts: Mapping[Key, float]) -> dict[Key, float]:
    """Return counts as shares of their sum; nothing when they are all zero."""
    total = sum(counts.values())
    return {k: c / total for k, c in counts.items()} if total else {}


def infinity_norm(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the largest difference of the shares of one value.

    Args:
        left: value to share.
        right: value to share; a value that lacks has none.

    Example:
        >>> infinity_norm({"a": 0.75, "b": 0.25}, {"a": 0.25, "c": 0.75})
        0.75
    """
    return max((abs(left.get(k, 0) - right.get(k, 0)) for k in {*left, *right}), default=0.0)


def jensen_shannon(left: Mapping[Key, float], right: Mapping[Key, float]) -> float:
    """Return the Jensen-Shannon divergence with logarithms of base 2, in [0, 1].

    Args:
        left: value, or bucket, to share.
        right: the same of the other side.

    Example:
        >>> jensen_shannon({1: 1.0}, {2: 1.0}), jensen_shannon({1: 1.0}, {1: 1.0})
        (1.0, 0.0)
    """
    total = 0.0
    for key in sorted({*left, *right}, key=str):
        p, q = left.get(key, 0.0), right.get(key, 0.0)
        middle = (p + q) / 2
        total += sum(x * log2(x / middle) for x in (p, q) if x > 0) / 2
    return min(1.0, max(0.0, total))
