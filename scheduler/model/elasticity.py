"""How many cores a process needs, from measurements with more and with fewer cores.

A process computes in bursts. With g cores, of the n that its bursts can use, a step takes

    T(g) = T max(1, n / g)

seconds and keeps w / T(g) cores busy on average, where w is the work of a step in core seconds.
So with fewer than n cores the busy share of its cores is w / (T n), whatever g is. Busy cores alone
therefore do not show n, and cores that are fitted to them would shrink without end. The step time
shows it: it grows as soon as g < n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

HEADROOM = 1.3
"""Cores over the mean of the busy ones, while nothing more is known of the bursts."""
NEED_MARGIN = 1.08
"""Cores over those below which steps were measured to get longer."""
GROWTH = 1.2
"""Cores over the most that were tried, to measure whether steps get shorter."""
MIN_RATIO = 1.05
"""Ratio of cores or of step times that counts as a difference; less is noise."""
KEEP_RATIO = 1.15
"""Ratio of current to fitted cores up to which a process that was slower with fewer keeps its
own."""
GROWTH_HELPED = 0.87
"""Need over the most cores that were tried, above which even more may help."""
SPIN_SHARE = 0.9
"""Busy share of the cores of a process that busy-waits, if more cores changed nothing."""
NUM_NEEDS = 65
"""Needs that are compared, spaced evenly in their logarithm."""

FitReason = Literal["kept", "idle", "needed", "trial"]
"""`kept`: the current cores fit; `idle`: few of them are busy; `needed`: steps were longer with
fewer; `trial`: more may shorten steps."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process did for a while at one size of its pools.

    Attributes:
        busy: the mean of its busy cores.

    Raises:
        ValueError: a value is not positive; an idle process does not show its need.
    """

    cpus: float
    busy: float
    step_sec: float

    def __post_init__(self) -> None:
        if not all(0.0 < value < float("inf") for value in (self.cpus, self.busy, self.step_sec)):
            raise ValueError(f"reading must be positive, got {self}; leave it out")


@dataclass(frozen=True, slots=True)
class CoreNeed:
    """The cores that a process needs by its readings.

    Attributes:
        cpus: cores below which steps got longer; the fewest that were tried if none did.
    """

    cpus: float
    slower: bool


@dataclass(frozen=True, slots=True)
class CoreFit:
    """The cores that a process is to get."""

    cpus: float
    why: FitReason
    need: CoreNeed


def fit_cores(readings: Sequence[Reading]) -> CoreFit:
    """Return the cores that a process is to get.

    Cores that are not busy are taken away once; if steps got longer, cores are given back, and that
    is remembered as long as the readings are. If most cores are busy, or all growth so far helped,
    it gets more, as a trial. A process that busy-waits keeps all cores busy though more changed
    nothing; it gets what was enough.

    Args:
        readings: at one size of the pools, at least one, the latest one last.

    Example:
        >>> fit_cores([Reading(4.0, 1.0, 0.5)])
        CoreFit(cpus=1.3, why='idle', need=CoreNeed(cpus=4.0, slower=False))
        >>> fit_cores([Reading(4.0, 1.0, 0.5), Reading(1.3, 0.8, 0.6)]).why
        'needed'
    """
    need, current = estimate_need(readings), readings[-1].cpus
    most = max(reading.cpus for reading in readings)
    largest = [reading for reading in readings if MIN_RATIO * reading.cpus > most]
    busy_share = median(reading.busy / reading.cpus for reading in largest)
    tried = most * MIN_RATIO > min(reading.cpus for reading in readings) * GROWTH
    spins = tried and not need.slower and busy_share > SPIN_SHARE
    # Whatever would not be reduced may lack cores, so that too few are always noticed.
    may_lack = not spins and busy_share * HEADROOM * MIN_RATIO > 1.0
    if may_lack or (need.slower and need.cpus > GROWTH_HELPED * most):
        return CoreFit(GROWTH * most, "trial", need)
    ample = [reading.busy for reading in readings if MIN_RATIO * reading.cpus > need.cpus]
    usual, floor = HEADROOM * median(ample), NEED_MARGIN * need.cpus * need.slower
    wanted = NEED_MARGIN * need.cpus if spins else max(usual, floor)
    if current / (KEEP_RATIO if need.slower else MIN_RATIO) < wanted < current * MIN_RATIO:
        return CoreFit(current, "kept", need)
    return CoreFit(wanted, "needed" if floor > usual else "idle", need)


def estimate_need(readings: Sequence[Reading]) -> CoreNeed:
    """Return the cores below which steps get longer: those that explain the readings best.

    The error is the sum of absolute log errors, so that stragglers count for little.

    Args:
        readings: at least one, of processes whose steps can be compared.
    """
    if len(readings) == 1:
        return CoreNeed(readings[0].cpus, slower=False)
    cpus = np.log([reading.cpus for reading in readings])
    steps = np.log([reading.step_sec for reading in readings])
    fewest = float(cpus.min())
    needs = np.linspace(fewest, cpus.max(), NUM_NEEDS)
    # errors: (needs, readings)
    errors = steps - np.maximum(0.0, needs[:, None] - cpus)
    errors -= np.median(errors, axis=1, keepdims=True)
    best = float(needs[np.abs(errors).sum(axis=1).argmin()])
    return CoreNeed(float(np.exp(best)), bool(best > fewest + np.log(MIN_RATIO)))


# The pools of a job. A step is as slow as the pool that lacks most, so replicas and stores grow
# together.

TrainingSizes = tuple[int, int]
"""Replicas and stores."""
PoolReadings = tuple[Reading, ...]
"""Simultaneous readings of one replica and, if there are stores, of one store."""


@dataclass(frozen=True, slots=True)
class CoreReadings:
    """Readings of one job.

    Attributes:
        readings: by sizes, the latest one last.
    """

    sizes: TrainingSizes = (0, 0)
    readings: Mapping[TrainingSizes, tuple[PoolReadings, ...]] = field(
        default_factory=dict[TrainingSizes, tuple[PoolReadings, ...]]
    )

    def latest(self) -> tuple[PoolReadings, ...]:
        """Return the readings at its latest sizes."""
        return self.readings.get(self.sizes, ())


@dataclass(frozen=True, slots=True)
class CoreGrant:
    """The cores that the processes of a job are to get at its latest sizes.

    Attributes:
        cpus: cores of one replica and, if there are stores, of one store.
        trying: whether these are a trial of more cores.
        slower: whether its current cores make it slower.
        limited: whether some cores that it had before made it slower.
    """

    cpus: tuple[float, ...]
    trying: bool
    slower: bool
    limited: bool


def add_readings(readings: CoreReadings, sizes: TrainingSizes, pools: PoolReadings) -> CoreReadings:
    """Return the readings of a job with one more, measured at these sizes."""
    at_sizes = (*readings.readings.get(sizes, ()), pools)
    return CoreReadings(sizes, {**readings.readings, sizes: at_sizes})


def fit_pool_cores(readings: CoreReadings) -> CoreGrant | None:
    """Return the cores that a job is to get at its latest sizes; None before any reading."""
    latest = readings.latest()
    if not latest:
        return None
    fits = [fit_cores([pools[i] for pools in latest]) for i in range(len(latest[-1]))]
    trying = [fit.why == "trial" for fit in fits]
    cpus = tuple(
        fit.cpus * (GROWTH if any(trying) and not own else 1.0)
        for fit, own in zip(fits, trying, strict=True)
    )
    needs = [fit.need for fit in fits]
    slower = [
        need.slower and MIN_RATIO * reading.cpus < need.cpus
        for need, reading in zip(needs, latest[-1], strict=True)
    ]
    return CoreGrant(cpus, any(trying), any(slower), any(need.slower for need in needs))
