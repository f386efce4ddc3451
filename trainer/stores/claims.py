"""Which slots a store serves, each since a version of the map of slots to stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import NUM_SLOTS

Ranges = tuple[tuple[int, int], ...]
"""First slot of each range and the one after its last."""
Claim = tuple[int, int, int, int]
"""(first slot, one after the last, version, tag)."""


@dataclass(frozen=True, slots=True)
class Claims:
    """Slots that a store serves.

    Attributes:
        versions: (NUM_SLOTS,) int64, version of the map in which each was taken; -1: not served.
        tags: (NUM_SLOTS,) int64, equal for all that took a slot together: two that took it in one
            version without knowing of each other differ.
    """

    versions: NDArray[np.int64]
    tags: NDArray[np.int64]

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) whether each slot is served."""
        return self.versions >= 0

    def taken(self, slots: NDArray[np.bool_], version: int, tag: int) -> Claims:
        """Return them with slots that are served since a version."""
        return Claims(np.where(slots, version, self.versions), np.where(slots, tag, self.tags))

    def joined(self, other: Claims) -> Claims:
        """Return them with those of other slots."""
        return Claims(
            np.where(other.served, other.versions, self.versions),
            np.where(other.served, other.tags, self.tags),
        )

    def given(self, slots: NDArray[np.bool_]) -> Claims:
        """Return them without slots."""
        return self.taken(slots, -1, 0)

    def to_json(self) -> list[Claim]:
        """Return runs of slots with one version and tag.

        Example:
            >>> no_claims().taken(mask_of([(0, 3), (5, 6)]), 2, 7).to_json()
            [(0, 3, 2, 7), (5, 6, 2, 7)]
        """
        changes = (np.diff(self.versions) != 0) | (np.diff(self.tags) != 0)
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), NUM_SLOTS]
        runs = pairwise(cuts)
        return [
            (first, end, int(self.versions[first]), int(self.tags[first]))
            for first, end in runs
            if self.versions[first] >= 0
        ]


def no_claims() -> Claims:
    """Return the claims of a store that serves nothing."""
    return Claims(np.full(NUM_SLOTS, -1, np.int64), np.zeros(NUM_SLOTS, np.int64))


def claims_from(body: Iterable[Sequence[int]]) -> Claims:
    """Read what `to_json` returned."""
    claims = no_claims()
    for first, end, version, tag in body:
        claims = claims.taken(mask_of([(first, end)]), version, tag)
    return claims


def mask_of(ranges: Iterable[Sequence[int]]) -> NDArray[np.bool_]:
    """Return which of all slots lie in ranges."""
    mask = np.zeros(NUM_SLOTS, bool)
    for first, end in ranges:
        mask[first:end] = True
    return mask


def ranges_of(mask: NDArray[np.bool_]) -> Ranges:
    """Return the ranges of a mask.

    Example:
        >>> ranges_of(mask_of([(7, 9), (0, 4), (3, 5)]))
        ((0, 5), (7, 9))
    """
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def check_ranges(ranges: Iterable[Sequence[int]]) -> None:
    """Refuse slots that there are not.

    Raises:
        ValueError: naming the first wrong range.
    """
    for first, end in ranges:
        if not 0 <= first < end <= NUM_SLOTS:
            raise ValueError(
                f"slots must lie in [0, {NUM_SLOTS}], got {first}:{end}; "
                f"write 0:{NUM_SLOTS} for all"
            )


def text_of(ranges: Iterable[Sequence[int]]) -> str:
    """Return ranges as the command line takes them.

    Example:
        >>> text_of([(0, 5), (7, 9)]), text_of([])
        ('0:5,7:9', 'none')
    """
    return ",".join(f"{first}:{end}" for first, end in ranges) or "none"


def ranges_from(text: str) -> Ranges:
    """Read ranges as the command line takes them.

    Raises:
        ValueError: it is no list of START:END, or slots that there are not.

    Example:
        >>> ranges_from("0:5,7:9"), ranges_from("none")
        (((0, 5), (7, 9)), ())
    """
    if text == "none":
        return ()
    try:
        ranges = tuple((int(a), int(b)) for a, b in (r.split(":") for r in text.split(",")))
    except ValueError:
        raise ValueError(
            f"slots must be START:END, several of them with commas, or none, got {text!r}; "
            f"write 0:{NUM_SLOTS} for all"
        ) from None
    check_ranges(ranges)
    return ranges_of(mask_of(ranges))
