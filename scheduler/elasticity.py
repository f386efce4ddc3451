"""How many cores a process needs, from how fewer of them slow its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

# How many cores a process needs: told by what fewer of them do to its steps.
#
# A process works in bursts. With g cores of the n that its bursts need it takes
#
#     T(g) = T max(1, n / g)
#
# seconds for a step, and keeps w / T(g) cores busy in the mean, w core seconds being the work of
# a step. So with fewer than n the share of its cores that is busy is w / (T n), whatever g is:
# cores that are fitted to those busy shrink without end where n is more than the headroom over w
# / T, and nothing in that share tells. What tells is the step: it gets longer.

HEADROOM = 1.3
"""Cores that are given over the mean of those kept busy, while no more is known of bursts."""
NEED_MARGIN = 1.08
"""Cores that are given over those below which steps were seen to get longer."""
DOUBT_MARGIN = 1.05
"""Headroom of a kind over cores for each busy one, above which there may be too few."""
GROWTH = 1.2
"""Cores over the most that were tried, to see whether steps get shorter."""
MIN_RATIO = 1.05
"""Cores, or steps, that are told apart; less is noise, and changes nothing."""
KEEP_RATIO = 1.15
"""Cores over those wanted that are left to a process which was slower with fewer."""
GROWTH_HELPED = 0.87
"""Need over the most cores that were tried, above which even more may help."""
SPIN_SHARE = 0.9
"""Share of its cores that a process keeps busy which waits with them, where more of them changed
nothing."""
LOW_QUANTILE = 0.1
"""Share of the readings of many processes that may lie below what is called fewest."""
NUM_NEEDS = 65
"""Needs that are compared, evenly in their logarithm."""
MIN_GROUPS = 4
"""Processes that were seen with more and with fewer cores, before they tell of others."""

FitReason = Literal["kept", "few are busy", "fewer were slower", "more may help"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process did for a while at one size of its pools.

    Attributes:
        cpus: cores that it had.
        busy: cores that it kept busy in the mean.
        step_sec: seconds of a step.

    Raises:
        ValueError: one is not positive: an idle process says nothing of its need.
    """

    cpus: float
    busy: float
    step_sec: float

    def __post_init__(self) -> None:
        """Refuse what no training process does."""
        if not all(0.0 < value < float("inf") for value in (self.cpus, self.busy, self.step_sec)):
            raise ValueError(f"reading must be positive, got {self}; leave it out")


@dataclass(frozen=True, slots=True)
class CoreNeed:
    """What readings say that a process needs.

    Attributes:
        cpus: below these steps got longer; the fewest that were tried where none did.
        slower: whether steps got longer.
    """

    cpus: float
    slower: bool


@dataclass(frozen=True, slots=True)
class Headroom:
    """What is known of the bursts of processes of one kind.

    Attributes:
        give: cores to give over the mean of those busy.
        doubted: cores over those busy, below which a process may lack some; of an unknown kind all
            that would not be taken away, so that no process keeps too few untried.
    """

    give: float = HEADROOM
    suspect_below: float = HEADROOM * MIN_RATIO
    known: bool = False


@dataclass(frozen=True, slots=True)
class CoreFit:
    """What a process is to get.

    Attributes:
        cpus: cores.
        why: in a word or four.
        need: what its readings say.
    """

    cpus: float
    why: FitReason
    need: CoreNeed


def estimate_need(readings: Sequence[Reading], lowest: float = 0.0) -> CoreNeed:
    """Return the cores below which steps got longer: those that explain the readings best.

    Absolute errors of logarithms, so that a straggler among many readings counts for little.

    Args:
        readings: at least one, of processes whose steps can be compared.
        lowest: share of them that may lie below the fewest cores that are thought of.
    """
    if len(readings) == 1:
        return CoreNeed(readings[0].cpus, slower=False)
    cpus = np.log([reading.cpus for reading in readings])
    steps = np.log([reading.step_sec for reading in readings])
    fewest = float(np.quantile(cpus, lowest, method="lower"))
    needs = np.linspace(fewest, cpus.max(), NUM_NEEDS)
    # errors: (needs, readings)
    errors = steps - np.maximum(0.0, needs[:, None] - cpus)
    errors -= np.median(errors, axis=1, keepdims=True)
    best = float(needs[np.abs(errors).sum(axis=1).argmin()])
    return CoreNeed(float(np.exp(best)), bool(best > fewest + np.log(MIN_RATIO)))


def fit_cores(readings: Sequence[Reading], headroom: Headroom | None = None) -> CoreFit:
    """Return the cores that a process is to get.

    Cores that are not busy are taken away once; what then made steps longer is given back,
    and remembered as long as the readings are. Where most cores are busy, or all that were
    given so far helped, it gets more, to see; one that spins, and keeps all of them busy
    though more changed nothing, gets no more than those that were enough.

    Args:
        readings: at one size of the pools, the latest one last, at least one.
        headroom: of its kind, if that is known.

    Example:
        >>> fit_cores([Reading(4.0, 1.0, 0.5)])
        Fitted(cpus=1.3, why='few are busy', need=Need(cpus=4.0, slower=False))
        >>> fit_cores([Reading(4.0, 1.0, 0.5), Reading(1.3, 0.8, 0.6)]).why
        'fewer were slower'
    """
    known, need, had = headroom or Headroom(), estimate_need(readings), readings[-1].cpus
    most = max(reading.cpus for reading in readings)
    top = [reading for reading in readings if MIN_RATIO * reading.cpus > most]
    share = median(reading.busy / reading.cpus for reading in top)
    tried = most * MIN_RATIO > min(reading.cpus for reading in readings) * GROWTH
    spins = tried and not need.slower and share > SPIN_SHARE
    lacks = not spins and share * known.suspect_below > 1.0
    if lacks or (need.slower and need.cpus > GROWTH_HELPED * most):
        return CoreFit(GROWTH * most, "more may help", need)
    ample = [reading.busy for reading in readings if MIN_RATIO * reading.cpus > need.cpus]
    usual, floor = known.give * median(ample), NEED_MARGIN * need.cpus * need.slower
    wanted = NEED_MARGIN * need.cpus if spins else max(usual, floor)
    if had / (KEEP_RATIO if need.slower else MIN_RATIO) < wanted < had * MIN_RATIO:
        return CoreFit(had, "kept", need)
    return CoreFit(wanted, "fewer were slower" if floor > usual else "few are busy", need)


def estimate_headroom(groups: Sequence[Sequence[Reading]]) -> Headroom:
    """Return what processes of one kind say of the bursts of the others.

    Args:
        groups: readings of each process, `relative` to its own with most cores.
    """
    if len(groups) < MIN_GROUPS:
        return Headroom()
    need = estimate_need([reading for group in groups for reading in group], LOW_QUANTILE)
    if not need.slower:
        return Headroom(suspect_below=min(need.cpus, HEADROOM / DOUBT_MARGIN), known=True)
    return Headroom(
        max(HEADROOM, NEED_MARGIN * need.cpus), NEED_MARGIN / DOUBT_MARGIN * need.cpus, known=True
    )


def relative_to_largest(readings: Sequence[Reading]) -> list[Reading]:
    """Return readings over the busy cores, and the step, of those with most cores.

    Example:
        >>> relative([Reading(4.0, 2.0, 0.5), Reading(3.0, 1.0, 1.0)])[1]
        Reading(cpus=1.5, busy=0.5, step_sec=2.0)
    """
    most = max(reading.cpus for reading in readings)
    top = [reading for reading in readings if MIN_RATIO * reading.cpus > most]
    busy = median(reading.busy for reading in top)
    step_sec = median(reading.step_sec for reading in top)
    return [Reading(r.cpus / busy, r.busy / busy, r.step_sec / step_sec) for r in readings]


# The cores of a job's processes, from what was measured of it at each of its sizes.
#
# The rule is `scheduler.elasticity`, for a replica and for a store. A step is as slow as the pool
# that has the least of what it needs, so both grow together, and what processes say of the others
# of their kind is the headroom of the pool that has the smaller one.

PoolSizes = tuple[int, int]
"""Replicas and stores."""
PoolReadings = tuple[Reading, ...]
"""Of one replica and, where there are stores, of one of them, at once."""


@dataclass(frozen=True, slots=True)
class CoreReadings:
    """What was measured of one job.

    Attributes:
        at: its sizes when it was measured last.
        readings: at all of its sizes, the latest one last.
    """

    at: PoolSizes = (0, 0)
    readings: Mapping[PoolSizes, tuple[PoolReadings, ...]] = field(
        default_factory=dict[PoolSizes, tuple[PoolReadings, ...]]
    )

    def here(self) -> tuple[PoolReadings, ...]:
        """Return the readings at its latest sizes."""
        return self.readings.get(self.at, ())


@dataclass(frozen=True, slots=True)
class CoreGrant:
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


def add_readings(known: CoreReadings, at: PoolSizes, both: PoolReadings) -> CoreReadings:
    """Return what was measured of a job, with one measurement more.

    Args:
        known: before it.
        at: the sizes at which it was measured.
        both: of its pools.
    """
    here = (*known.readings.get(at, ()), both)
    return CoreReadings(at, {**known.readings, at: here})


def fit_pool_cores(known: CoreReadings, headroom: Headroom) -> CoreGrant | None:
    """Return what a job is to get where it was measured last; None before any measurement."""
    here = known.here()
    if not here:
        return None
    pools = [fit_cores([both[pool] for both in here], headroom) for pool in range(len(here[-1]))]
    trying = [pool.why == "more may help" for pool in pools]
    cpus = tuple(
        pool.cpus * (GROWTH if any(trying) and not mine else 1.0)
        for pool, mine in zip(pools, trying, strict=True)
    )
    needs = [pool.need for pool in pools]
    slower = [
        need.slower and MIN_RATIO * both.cpus < need.cpus
        for need, both in zip(needs, here[-1], strict=True)
    ]
    limited = any(need.slower for need in needs)
    return CoreGrant(cpus, any(trying), any(slower), limited)


def burst_readings(here: Sequence[PoolReadings]) -> list[Reading]:
    """Return readings of one job for others of its kind; none where its cores hardly differed.

    Of each the pool with less headroom counts, as the step is that one's.
    """
    count = len(here[-1]) if here else 0
    pools = [relative_to_largest([both[pool] for both in here]) for pool in range(count)]
    found = [min(both, key=lambda reading: reading.cpus) for both in zip(*pools, strict=True)]
    cpus = [reading.cpus for reading in found]
    return found if max(cpus) > MIN_RATIO * MIN_RATIO * min(cpus) else []
