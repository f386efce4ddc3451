"""Whether a job lacks cores: told by giving it more once, and seeing whether its steps get faster.

The share of its cores that a process keeps busy does not tell: one that has exactly what
it needs keeps as many of them busy as one that has too few. So where that share is high
the job gets MORE at the same sizes, and its next step says what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.simulator.views import Measured, Sizes

CPU_HEADROOM = 1.3
"""Cores that are given over the mean of those kept busy: half of a step's work comes in bursts."""
SHORT = 0.81
"""Share of its cores that a process keeps busy, above which it may want more than it has."""
MORE = 1.2
"""Cores that it then gets, over those that it has."""
GIVEN = 1.1
"""Cores over those before, from which two steps are compared."""
FASTER = 1.05
"""Step before more cores over that with them, above which they were lacking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What is known of the cores of one job."""

    busy: tuple[float, float] | None = None
    """Cores that one replica and one store keep busy, or would; None before any measurement."""
    at: tuple[int, int] = (0, 0)
    """Replicas and stores of that measurement."""
    tried: tuple[float, float, float] | None = None
    """Seconds of a step, and cores of one replica and of one store, when it was in doubt; None when
    it is not."""
    enough: bool = False
    """Whether more cores were seen to change nothing: it is never in doubt again."""
    lacked: bool = False
    """Whether more cores were seen to help, so that its user asked for too few."""

    @property
    def trusts_request(self) -> bool:
        """Return whether it gets no more cores than its user asked for."""
        return self.tried is None and not self.lacked


def judge(known: Cores, measured: Measured, given: Sizes) -> Cores:
    """Return what is known of a job's cores after one more measurement.

    Args:
        known: before it.
        measured: the measurement.
        given: what the job had.
    """
    at, busy = (measured.num_replicas, measured.num_stores), _busy(measured)
    enough, lacked = known.enough, known.lacked
    cpus = given.replica_cpus, given.store_cpus
    if known.tried is not None and at == known.at:
        before = known.tried[1:]
        if max(had / less for had, less in zip(cpus, before, strict=True)) > GIVEN:
            helped = known.tried[0] > FASTER * measured.step_sec
            enough, lacked = not helped, lacked or helped
    doubts = [part > SHORT * had for part, had in zip(busy, cpus, strict=True)]
    if enough or not any(doubts):
        return Cores(busy=busy, at=at, enough=enough, lacked=lacked)
    # All that it has grows alike: where one pool was short, the other one worked less for it.
    replica, store = (
        MORE * (had / CPU_HEADROOM if doubt else part)
        for part, had, doubt in zip(busy, cpus, doubts, strict=True)
    )
    tried = measured.step_sec, *cpus
    return Cores(busy=(replica, store), at=at, tried=tried, lacked=lacked)


def _busy(measured: Measured) -> tuple[float, float]:
    return measured.replica_busy, measured.store_busy
