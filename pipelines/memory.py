"""Keep freed memory in the process.

By default glibc maps arrays above 128 KiB and unmaps them when they are freed, and the kernel
clears every page again. A build creates millions of short-lived arrays: a fifth of its time.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt`, from malloc.h."""
_MAX_HEAP_BLOCK_BYTES = 32 << 20
"""Largest block that is kept after it is freed; the maximum that glibc accepts."""
_MAX_FREE_BYTES = 256 << 20
"""Free memory that stays at the end of the heap."""


@cache
def keep_freed_memory() -> bool:
    """Configure the C library to keep freed blocks; return whether it supports this (glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_MMAP_THRESHOLD, _MAX_HEAP_BLOCK_BYTES),
        (_TRIM_THRESHOLD, _MAX_FREE_BYTES),
        (_ARENA_MAX, 1),  # heaps of additional threads hold no block above 64 MiB
    )
    return all(mallopt(name, value) for name, value in settings)
