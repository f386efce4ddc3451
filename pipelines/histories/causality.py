"""No sample sees an event of its own time or later: what follows from the manifests of segments.

Within a segment, the counts of samples are of exact times. A sample sees all events of the segments
before its own, so these must all be available before the first sample of the segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from presage.schemas.dataset.manifest import SegmentManifest
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location

Named = tuple[str, SegmentManifest]
"""Id and manifest of a segment."""


def find_leaks(segments: Sequence[Named]) -> Iterator[str]:
    """Yield a line for each segment, in dataset order, with a sample that sees too much."""
    newest: dict[str, tuple[int, str]] = {}
    for segment, manifest in segments:
        for name, counts in manifest.histories.items():
            if name in newest and counts.first_sample <= newest[name][0]:
                last, earlier = newest[name]
                yield (
                    f"history {name!r}: segment {segment} has a sample at "
                    f"{_text(counts.first_sample)}, but segment {earlier} before it has an event "
                    f"that is available at {_text(last)}"
                )
            if counts.num_events:
                newest[name] = max(newest.get(name, (counts.last, segment)), (counts.last, segment))


def find_stale(segments: Sequence[Named]) -> Iterator[tuple[str, str]]:
    """Yield (id, line) of each segment with pending events of another version of the one before.

    Pending events are those that the segment before has for later ones: a segment has them once.
    """
    pending: dict[str, str | None] = {}
    for segment, manifest in segments:
        for name, counts in manifest.histories.items():
            if counts.taken_sha256 != pending.get(name):
                yield (
                    segment,
                    f"history {name!r}: segment {segment} has the pending events of another "
                    "version of the segment before it; build it again",
                )
            pending[name] = counts.pending_sha256


def check_causal(
    others: Sequence[Named], num_before: int, manifest: SegmentManifest, job: Path | Location
) -> None:
    """Raise SchemaError if a new segment would see too much, or would be seen too early.

    Later segments that have pending events of another version stay as they are; `verify` names
    them.

    Args:
        others: segments of the dataset.
        num_before: of these, those that come before the new one.
        manifest: of the new one.
        job: path of the job file.
    """
    new = "that is built"
    segments = [*others[:num_before], (new, manifest), *others[num_before:]]
    stale = (line for segment, line in find_stale(segments) if segment == new)
    for line in (*find_leaks(segments), *stale):
        raise SchemaError(
            f"{line}; build segments of whole days with --day, each after the one before",
            file=str(job),
        )


def _text(moment: int) -> str:
    return str(pa.scalar(moment, pa.timestamp("us")).as_py())
