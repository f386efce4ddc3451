"""What the join of two streams leaves: events that do not count, and how many of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.sources.rejects import Reject, as_table, sorted_rejects
from schemas.dataset import Segment
from schemas.layout import EVENTS, REJECTS_SCHEMA, late_path


def write_late(root: Path, part: int, late: Sequence[Reject]) -> None:
    """Write the events of one part of the shards that do not count; a retry writes the same.

    Args:
        root: directory of the segment being built.
        part: number of the part.
        late: the events; nothing is written when there are none.
    """
    if not late:
        return
    path = root / late_path(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(
        sorted_rejects([as_table(late)]).select(REJECTS_SCHEMA.names),
        partial,
        compression="zstd",
        write_page_checksum=True,
    )
    partial.replace(path)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by name; none for a job without events."""
    total: dict[str, int] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def write_counts(root: Path, found: Iterable[Mapping[str, int]]) -> None:
    """Write `events.parquet` of a segment that is being built; nothing for a job without events."""
    for counts in found:
        if counts:
            pq.write_table(pa.Table.from_pylist([dict(counts)]), root / EVENTS)


def read_counts(segment: Segment) -> dict[str, int]:
    """Return what became of the events of a segment; empty for a job without events."""
    if EVENTS not in segment.files:
        return {}
    return dict(segment.file(EVENTS).read().to_pylist()[0])
