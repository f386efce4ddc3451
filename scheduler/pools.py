"""The cores of a job's processes, from what was measured of it at each of its sizes.

The rule is `scheduler.cores`, for a replica and for a store. A step is as slow as the pool
that has the least of what it needs, so both grow together, and what processes say of the
others of their kind is the headroom of the pool that has the smaller one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.cores import APART, MORE, Headroom, Reading, fit_cores, relative

Place = tuple[int, int]
"""Replicas and stores."""
Both = tuple[Reading, ...]
"""Of one replica and, where there are stores, of one of them, at once."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What was measured of one job.

    Attributes:
        at: its sizes when it was measured last.
        readings: at all of its sizes, the latest one last.
    """

    at: Place = (0, 0)
    readings: Mapping[Place, tuple[Both, ...]] = field(
        default_factory=dict[Place, tuple[Both, ...]]
    )

    def here(self) -> tuple[Both, ...]:
        """Return the readings at its latest sizes."""
        return self.readings.get(self.at, ())


@dataclass(frozen=True, slots=True)
class Given:
    """What a job is to get at the sizes where it was measured.

    Attributes:
        cpus: cores of one replica and, where there are stores, of one of them.
        trying: whether these are more than it had, to see whether that helps.
        slower: whether it is slowed down by what it has.
        limited: whether fewer cores than some that it had were seen to slow it down.
    """

    cpus: tuple[float, ...]
    trying: bool
    slower: bool
    limited: bool


def heard(known: Cores, at: Place, both: Both) -> Cores:
    """Return what was measured of a job, with one measurement more.

    Args:
        known: before it.
        at: the sizes at which it was measured.
        both: of its pools.
    """
    here = (*known.readings.get(at, ()), both)
    return Cores(at, {**known.readings, at: here})


def fitted(known: Cores, headroom: Headroom) -> Given | None:
    """Return what a job is to get where it was measured last; None before any measurement."""
    here = known.here()
    if not here:
        return None
    pools = [fit_cores([both[pool] for both in here], headroom) for pool in range(len(here[-1]))]
    trying = [pool.why == "more may help" for pool in pools]
    cpus = tuple(
        pool.cpus * (MORE if any(trying) and not mine else 1.0)
        for pool, mine in zip(pools, trying, strict=True)
    )
    needs = [pool.need for pool in pools]
    slower = [
        need.slower and APART * both.cpus < need.cpus
        for need, both in zip(needs, here[-1], strict=True)
    ]
    limited = any(need.slower for need in needs)
    return Given(cpus, any(trying), any(slower), limited)


def bursts(here: Sequence[Both]) -> list[Reading]:
    """Return readings of one job for others of its kind; none where its cores hardly differed.

    Of each the pool with less headroom counts, as the step is that one's.
    """
    count = len(here[-1]) if here else 0
    pools = [relative([both[pool] for both in here]) for pool in range(count)]
    found = [min(both, key=lambda reading: reading.cpus) for both in zip(*pools, strict=True)]
    cpus = [reading.cpus for reading in found]
    return found if max(cpus) > APART * APART * min(cpus) else []
