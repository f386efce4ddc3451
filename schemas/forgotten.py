"""What segments were called before ids were forgotten in them, as the root's lineage keeps it.

A segment that is written again has another id and another hash. Who has trained it, or wants to
build it once more, knows it by those from before.
"""

from __future__ import annotations

from collections.abc import Mapping

FORGOTTEN = "forgotten:"
"""What names begin with in a root's lineage; the rest is an id, or the sha256 of a manifest."""


def names_before(lineage: Mapping[str, str], segment_id: str) -> frozenset[str]:
    """Return the ids and the hashes of manifests that a segment had before.

    Example:
        >>> sorted(names_before({"forgotten:00000-a": "00000-b", "day:x": "00000-b"}, "00000-b"))
        ['00000-a']
    """
    return frozenset(
        name.removeprefix(FORGOTTEN)
        for name, now in lineage.items()
        if name.startswith(FORGOTTEN) and now == segment_id
    )
