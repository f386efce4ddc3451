"""Baseline policies: static sizes, threshold autoscaling, Optimus, Pollux."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from scheduler.model.fit import Window
from scheduler.model.terms import Floats
from scheduler.simulator.knowledge import MIN_CELLS, Knowledge, sizes_of
from scheduler.simulator.views import Capacity, Handling, JobView, Measured, Sizes, Snapshot

RESTART_SEC = 60.0
"""To start all processes of a job again, and to load its checkpoint."""


def admit(
    waiting: Iterable[tuple[JobView, Sizes]], given: Mapping[int, Sizes], capacity: Capacity
) -> dict[int, Sizes]:
    """Return what is given, and sizes of waiting jobs beside it.

    By priority and then by arrival; one that does not fit does not hold back those behind it.
    """
    found = dict(given)
    cpus = capacity.cpus - sum(sizes.cpus for sizes in given.values())
    memory = capacity.memory_bytes - sum(sizes.memory_bytes for sizes in given.values())
    for view, sizes in sorted(waiting, key=lambda pair: (-pair[0].priority, pair[0].job)):
        if sizes.cpus <= cpus + 1e-9 and sizes.memory_bytes <= memory + 1.0:
            found[view.job] = sizes
            cpus, memory = cpus - sizes.cpus, memory - sizes.memory_bytes
    return found


def give_back(
    kept: dict[int, Sizes],
    wanted: Mapping[int, Sizes],
    held: Sequence[tuple[float, int]],
    capacity: Capacity,
) -> None:
    """Give jobs what is wanted for them, not what they hold, until all fit; the largest part first.

    Args:
        kept: sizes of all jobs, changed in place.
        wanted: sizes of all jobs that fit together.
        held: cores beyond what is wanted, and job, of those that keep what they have.
        capacity: of the cluster.
    """
    cpus = sum(sizes.cpus for sizes in kept.values()) - capacity.cpus
    memory = sum(sizes.memory_bytes for sizes in kept.values()) - capacity.memory_bytes
    for _, job in sorted(held, reverse=True):
        if cpus <= 0.0 and memory <= 0.0:
            return
        cpus -= kept[job].cpus - wanted[job].cpus
        memory -= kept[job].memory_bytes - wanted[job].memory_bytes
        kept[job] = wanted[job]


class StaticPolicy:
    """The static user configuration."""

    name = "static"
    handling = Handling(RESTART_SEC, RESTART_SEC, keeps_steps=False, replaces_slow=False)
    interval_sec = float("inf")

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return the request of each job that fits."""
        given = {view.job: view.current for view in snapshot.jobs if view.current is not None}
        waiting = [(view, view.request) for view in snapshot.jobs if view.current is None]
        return admit(waiting, given, snapshot.capacity)


# A threshold autoscaler, as the local optimizer of open DLRover.
#
# A job begins with what its user asked for. While its stores keep fewer cores busy than BUSY of
# what they have, it gets as many more replicas as would bring them there, at most STEP at once; a
# step that did not make it FASTER is taken back and the job left alone. After running out of
# memory it is started again with twice as much.
#
# Source: the open repository of DLRover, whose local optimizer bounds the number of workers by
# what the cores of parameter servers bear; the thresholds here are ours.

BUSY = 0.8
"""Share of a store's cores that may be busy."""
STEP = 4
"""Replicas that are added at once, at most."""
FASTER = 1.05
"""Speed after a step over that before it, at least."""
THRESHOLD_CHANGE_SEC = 15.0
"""Pause of a change, and of a recovery: processes come and go while others train, as ours."""
MORE_MEMORY = 2.0
"""Memory after running out of it, over that before."""


@dataclass(slots=True)
class _Climb:
    """How one job was scaled.

    Attributes:
        best: sizes at the highest speed.
        step_sec: of a step there.
        ended: whether no more is tried.
    """

    best: Sizes | None = None
    step_sec: float = float("inf")
    ended: bool = False


class ThresholdPolicy:
    """Replicas by thresholds on the cores of stores."""

    name = "threshold"
    handling = Handling(
        THRESHOLD_CHANGE_SEC, THRESHOLD_CHANGE_SEC, keeps_steps=True, replaces_slow=True
    )
    interval_sec = 180.0

    def __init__(self) -> None:
        """Begin with no job."""
        self.climbs: dict[int, _Climb] = {}

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return the sizes of running jobs, scaled by what was measured, and requests of others."""
        views = {view.job: view for view in snapshot.jobs}
        self.climbs = {job: self.climbs.get(job, _Climb()) for job in views}
        given = {job: view.current for job, view in views.items() if view.current is not None}
        waiting = [(view, _asked(view)) for view in snapshot.jobs if view.current is None]
        found = admit(waiting, given, snapshot.capacity)
        for measured in snapshot.measured:
            wanted = self._scaled(views[measured.job], measured, snapshot)
            others = {job: sizes for job, sizes in found.items() if job != measured.job}
            found = admit([(views[measured.job], wanted)], others, snapshot.capacity)
            found.setdefault(measured.job, given[measured.job])
        return found

    def _scaled(self, view: JobView, measured: Measured, snapshot: Snapshot) -> Sizes:
        climb, current = self.climbs[view.job], view.current
        assert current is not None, "what is measured runs"
        if climb.ended:
            return current
        if climb.best is not None and climb.step_sec < FASTER * measured.step_sec:
            climb.ended = True
            return replace(current, num_replicas=climb.best.num_replicas)
        climb.best, climb.step_sec = current, measured.step_sec
        bearable = BUSY * current.store_cpus / max(measured.store_busy, 1e-6)
        wanted = int(min(current.num_replicas * bearable, current.num_replicas + STEP))
        allowed = snapshot.allowed[view.kind][current.num_stores]
        while wanted > current.num_replicas and not (wanted < len(allowed) and allowed[wanted]):
            wanted -= 1
        climb.ended = wanted <= current.num_replicas
        return replace(current, num_replicas=max(wanted, current.num_replicas))


def _asked(view: JobView) -> Sizes:
    """Return the request, with more memory for each time that it ran out."""
    more, request = MORE_MEMORY**view.num_oom, view.request
    return replace(
        request,
        replica_memory=more * request.replica_memory,
        tables_memory=more * request.tables_memory,
    )


# A policy of marginal gains, as Optimus.
#
# Each job first gets one replica and one store. Then, as long as something fits, one replica or
# one store goes to the job whose remaining time falls most for the dominant share that this
# takes. The remaining time is what Optimus's own model predicts; here it is told how much is
# left, which Optimus extrapolates from losses.
#
# Source: Peng, Bao, Chen, Wu and Guo, "Optimus" (2018), the sections on performance modelling and
# on resource allocation; ten minutes between allocations, stragglers are replaced, running out of
# memory is not spoken of.

JOB_RESTART_SEC, RECOVERY_SEC = 30.0, 60.0
"""Pauses of a change by way of a checkpoint, and of a restart."""


def fit_optimus(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds of a step by Optimus's model: a / w + b + c w / p + d w + e p."""
    replicas, stores = sizes_of(allowed)
    if len(window) < MIN_CELLS:
        return np.full(len(replicas), np.nan)
    columns, seconds = window.columns(), window.medians()
    known = _optimus_terms(columns[:, 3], columns[:, 4])
    scale = np.abs(known).max(axis=0)
    found = nnls(known / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return np.maximum(_optimus_terms(replicas.astype(float), stores.astype(float)) @ found, 1e-9)


def _optimus_terms(workers: Floats, servers: Floats) -> Floats:
    return np.stack(
        [1.0 / workers, np.ones_like(workers), workers / servers, workers, servers], axis=1
    )


class MarginalPolicy:
    """The largest marginal gain first."""

    name = "marginal"
    handling = Handling(JOB_RESTART_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=True)
    interval_sec = 600.0

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.knowledge = Knowledge(fit_optimus)
        self.next_sec = 0.0

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return all sizes anew each interval; in between only jobs that wait get some."""
        self.knowledge.take_in(snapshot)
        given = {view.job: view.current for view in snapshot.jobs if view.current is not None}
        if snapshot.now_sec >= self.next_sec:
            self.next_sec = snapshot.now_sec + self.interval_sec
            given = {}
        firsts = [
            (view, self._first(view, snapshot.allowed[view.kind]))
            for view in snapshot.jobs
            if view.job not in given
        ]
        found = admit(firsts, given, snapshot.capacity)
        views = [view for view, _ in firsts if view.job in found]
        return self._grown(found, views, snapshot)

    def _first(self, view: JobView, allowed: np.ndarray) -> Sizes:
        """Return the sizes that a job begins from: the least, or such as are to be measured."""
        sampled = self.knowledge.sample(view, allowed)
        if sampled is not None:
            return sampled
        least = allowed.shape[0] > 1 and allowed[1, 1]
        return replace(view.request, num_replicas=1, num_stores=1) if least else view.request

    def _grown(
        self, found: dict[int, Sizes], views: list[JobView], snapshot: Snapshot
    ) -> dict[int, Sizes]:
        """Give what is left, step by step, to these jobs."""
        left = [
            snapshot.capacity.cpus - sum(sizes.cpus for sizes in found.values()),
            snapshot.capacity.memory_bytes - sum(sizes.memory_bytes for sizes in found.values()),
        ]
        times = {view.job: self._times(view, snapshot) for view in views}
        by_job = {view.job: view for view in views}
        heap: list[tuple[float, int, Sizes]] = []

        def offer(job: int) -> None:
            step = _best_step(by_job[job], found[job], times[job], snapshot.capacity, left)
            if step is not None:
                heapq.heappush(heap, (-step[0], job, step[1]))

        for job in by_job:
            offer(job)
        while heap:
            _, job, sizes = heapq.heappop(heap)
            cpus = sizes.cpus - found[job].cpus
            memory = sizes.memory_bytes - found[job].memory_bytes
            if cpus <= left[0] + 1e-9 and memory <= left[1] + 1.0:
                found[job] = sizes
                left[0], left[1] = left[0] - cpus, left[1] - memory
                offer(job)
        return found

    def _times(self, view: JobView, snapshot: Snapshot) -> Floats:
        """Return remaining seconds at each size, (stores + 1, replicas + 1); nan where unknown."""
        allowed = snapshot.allowed[view.kind]
        times = np.full(allowed.shape, np.nan)
        steps = view.left_samples / snapshot.batch_samples[view.kind]
        times[allowed] = steps * self.knowledge.predicted(view.kind, snapshot.allowed)
        return times


def _best_step(
    view: JobView, sizes: Sizes, times: Floats, capacity: Capacity, left: list[float]
) -> tuple[float, Sizes] | None:
    """Return the gain of a replica or a store more for what it takes, and the sizes then."""
    now = times[sizes.num_stores, sizes.num_replicas]
    best: tuple[float, Sizes] | None = None
    for stores, replicas in ((0, 1), (1, 0)):
        at = sizes.num_stores + stores, sizes.num_replicas + replicas
        if at[0] >= times.shape[0] or at[1] >= times.shape[1] or not times[at] < now:
            continue
        larger = replace(sizes, num_stores=at[0], num_replicas=at[1])
        cpus, memory = larger.cpus - sizes.cpus, larger.memory_bytes - sizes.memory_bytes
        if cpus > left[0] + 1e-9 or memory > left[1] + 1.0:
            continue
        dominant = max(cpus / capacity.cpus, memory / capacity.memory_bytes, 1e-12)
        gain = 2.0**view.priority * float(now - times[at]) / dominant
        if best is None or gain > best[0]:
            best = gain, larger
    return best


# A policy of goodputs, as Pollux.
#
# Each job's speedup is its goodput over that of one replica; the cluster makes the power mean of
# all speedups large, with the exponent -1, which weighs slow jobs most. A job gets at most twice
# the replicas that it ever had, until more was measured. The global batch is fixed here, as it is
# in our jobs, so the statistical efficiency is 1 and goodput is throughput. A store goes with
# each replica: together they have the links of an all-reduce.
#
# Source: Qiao and others, "Pollux" (2021), the sections on the system throughput and on the
# scheduler; its genetic search is replaced by the greedy choice, which is optimal for speedups
# with diminishing returns; a restart takes 30 s, and a job whose sizes change is discounted by
# it.
"""Pauses of a change by way of a checkpoint, and of a restart."""
EXPLORED = 2
"""Replicas that a job may get, over the most that it had."""
GAMMAS = (1.0, 1.5, 2.0, 4.0, 10.0)
"""How much computation and synchronisation overlap: T^g = T_compute^g + T_sync^g."""
ENOUGH = 1.1
"""Speed after a change over that before it, at least."""


def fit_pollux(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds of a step: T_compute = a + b / r, T_sync = c + d (r - 2) beyond one replica.

    For each overlap g the terms of T^g are fitted on their own scale, and the best is kept.
    """
    replicas = sizes_of(allowed)[0].astype(float)
    columns, seconds = window.columns(), window.medians()
    workers = columns[:, 3]
    # Until more replicas than one number were measured, more are taken to cost nothing.
    perfect = float(np.median(seconds * workers)) / replicas
    best: tuple[float, Floats] = (np.inf, perfect)
    for gamma in GAMMAS if len(np.unique(workers)) > 1 else ():
        terms = _pollux_terms(workers, gamma) / seconds[:, None] ** gamma
        found = nnls(terms, np.ones(len(seconds)))[0]
        again = np.maximum(_pollux_terms(workers, gamma) @ found, 1e-12) ** (1.0 / gamma)
        error = float(np.abs(np.log(again / seconds)).sum())
        if error < best[0]:
            whole = np.maximum(_pollux_terms(replicas, gamma) @ found, 1e-12)
            best = error, whole ** (1.0 / gamma)
    return best[1]


def _pollux_terms(workers: Floats, gamma: float) -> Floats:
    parts = [
        np.ones_like(workers),
        1.0 / workers,
        np.where(workers > 1, 1.0, 0.0),
        np.maximum(workers - 2.0, 0.0),
    ]
    return np.stack([part**gamma for part in parts], axis=1)


class GoodputPolicy:
    """The power mean of speedups."""

    name = "goodput"
    handling = Handling(JOB_RESTART_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=False)
    interval_sec = 60.0

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.knowledge = Knowledge(fit_pollux)

    def decide(self, snapshot: Snapshot) -> dict[int, Sizes]:
        """Return all sizes anew; a job that gains little keeps what it has."""
        self.knowledge.take_in(snapshot)
        firsts = [(view, _of(view, _least(view, snapshot))) for view in snapshot.jobs]
        wanted = admit(firsts, {}, snapshot.capacity)
        speeds = {view.job: self._speeds(view, snapshot) for view in snapshot.jobs}
        self._grow(wanted, speeds, snapshot)
        return self._calm(wanted, speeds, snapshot)

    def _speeds(self, view: JobView, snapshot: Snapshot) -> dict[int, float]:
        """Return the goodput over that of the smallest size, by replicas that may be had."""
        allowed = snapshot.allowed[view.kind]
        seconds = np.full(allowed.shape, np.nan)
        seconds[allowed] = self.knowledge.predicted(view.kind, snapshot.allowed)
        first = _least(view, snapshot)
        most = min(min(allowed.shape) - 1, EXPLORED * view.most_replicas)
        base = seconds[first, first]
        found = {first: 1.0}
        for size in range(first + 1, most + 1):
            if allowed[size, size] and np.isfinite(base):
                found[size] = float(base / seconds[size, size])
        return found

    def _grow(
        self, wanted: dict[int, Sizes], speeds: dict[int, dict[int, float]], snapshot: Snapshot
    ) -> None:
        """Add a replica where -1 / speedup rises most for the dominant share it takes."""
        capacity = snapshot.capacity
        cpus = capacity.cpus - sum(sizes.cpus for sizes in wanted.values())
        memory = capacity.memory_bytes - sum(sizes.memory_bytes for sizes in wanted.values())
        views = {view.job: view for view in snapshot.jobs}
        heap: list[tuple[float, int, int]] = []

        def offer(job: int) -> None:
            now = wanted[job].num_replicas
            larger = [size for size in speeds[job] if size > now]
            if larger and speeds[job][larger[0]] > speeds[job][now]:
                step = _of(views[job], larger[0])
                share = max(
                    (step.cpus - wanted[job].cpus) / capacity.cpus,
                    (step.memory_bytes - wanted[job].memory_bytes) / capacity.memory_bytes,
                )
                gained = 1.0 / speeds[job][now] - 1.0 / speeds[job][larger[0]]
                weight = 2.0 ** views[job].priority
                heapq.heappush(heap, (-weight * gained / max(share, 1e-12), job, larger[0]))

        for job in wanted:
            offer(job)
        while heap:
            _, job, size = heapq.heappop(heap)
            step = _of(views[job], size)
            more = step.cpus - wanted[job].cpus, step.memory_bytes - wanted[job].memory_bytes
            if more[0] <= cpus + 1e-9 and more[1] <= memory + 1.0:
                wanted[job] = step
                cpus, memory = cpus - more[0], memory - more[1]
                offer(job)

    def _calm(
        self, wanted: dict[int, Sizes], speeds: dict[int, dict[int, float]], snapshot: Snapshot
    ) -> dict[int, Sizes]:
        """Leave jobs alone that would gain less than ENOUGH, as far as all fit."""
        kept = dict(wanted)
        held: list[tuple[float, int]] = []
        for view in snapshot.jobs:
            now = view.current
            if now is None or view.job not in wanted:
                continue
            speed = speeds[view.job]
            larger = speed.get(wanted[view.job].num_replicas, 1.0)
            if larger < ENOUGH * speed.get(now.num_replicas, 1.0):
                kept[view.job] = now
                held.append((now.cpus - wanted[view.job].cpus, view.job))
        give_back(kept, wanted, held, snapshot.capacity)
        return kept


def _least(view: JobView, snapshot: Snapshot) -> int:
    """Return the fewest replicas, with as many stores, that can be had."""
    allowed = snapshot.allowed[view.kind]
    return next(size for size in range(1, min(allowed.shape)) if allowed[size, size])


def _of(view: JobView, size: int) -> Sizes:
    return replace(view.request, num_replicas=size, num_stores=size)
