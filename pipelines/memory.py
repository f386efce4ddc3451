"""Keep freed memory in the process."""

from __future__ import annotations

import ctypes
from functools import cache

# Keeps freed memory in the process.
#
# Numpy asks the C library for each array; by default glibc takes arrays above 128 KiB from the
# kernel and gives them back at once, and the kernel clears every page again. A build that makes
# millions of short-lived arrays spends a fifth of its time there.

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's parameters, from malloc.h."""
_LARGEST_KEPT = 32 << 20
"""Bytes of the largest block that is kept; glibc refuses more."""
_KEPT_AT_TOP = 256 << 20
"""Bytes that a process keeps free at the end of its heap."""


@cache
def keep_freed_memory() -> bool:
    """Tell the C library to keep freed blocks for the next array.

    Returns:
        Whether it took the settings; other C libraries than glibc have none.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_KEPT),
        (_TRIM_THRESHOLD, _KEPT_AT_TOP),
        (_ARENA_MAX, 1),  # the heaps of further threads hold no block above 64 MiB
    )
    return all(mallopt(name, value) for name, value in settings)
