"""Segments that are built at once and enter the dataset one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pipelines.segments.publish import root_of
from schemas.manifest import DatasetManifest, position_of

WAIT_SEC = 0.2
"""Time between two looks."""


def wait_for_turn(dataset: Path, position: int, say: Callable[[str], None]) -> float:
    """Wait until every position before this one has a segment.

    Args:
        dataset: directory of the dataset.
        position: of the segment that is to enter it.
        say: told once what is waited for.

    Returns:
        Seconds that it took.
    """
    began = time.perf_counter()
    missing = first_missing(root_of(dataset), position)
    if missing is None:
        return 0.0
    say(f"built, waiting for the segment at position {missing}")
    while first_missing(root_of(dataset), position) is not None:
        time.sleep(WAIT_SEC)
    return time.perf_counter() - began


def first_missing(root: DatasetManifest | None, position: int) -> int | None:
    """Return the first position before another that has no segment, None when all have one."""
    taken = {position_of(s.id) for s in (root.segments if root else ())}
    return next((p for p in range(position) if p not in taken), None)
