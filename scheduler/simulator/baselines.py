"""Baseline policies: static sizes, threshold autoscaling, Optimus, Pollux."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from presage.scheduler.model.throughput import Floats, Window
from presage.scheduler.simulator.kind_models import MIN_CELLS, KindModels, allowed_sizes
from presage.scheduler.simulator.views import (
    Allocation,
    Capacity,
    ClusterView,
    FailurePolicy,
    Measurement,
    SimulatedJob,
)

RESTART_SEC = 60.0
"""Time to restart all processes of a job from its checkpoint."""


def free_resources(given: Mapping[int, Allocation], capacity: Capacity) -> tuple[float, float]:
    """Return the cores and bytes of a cluster that are left beside these sizes."""
    cpus = capacity.cpus - sum(sizes.cpus for sizes in given.values())
    return cpus, capacity.memory_bytes - sum(sizes.memory_bytes for sizes in given.values())


def grow_greedily(
    sizes: dict[int, Allocation],
    jobs: Iterable[int],
    capacity: Capacity,
    next_step: Callable[[int, tuple[float, float]], tuple[float, Allocation] | None],
) -> None:
    """Distribute the free resources to some jobs, the step with the largest gain first.

    Args:
        sizes: of all jobs, changed in place.
        jobs: that may grow.
        capacity: of the cluster.
        next_step: returns the gain and the sizes of a job's next step, given the free resources.
    """
    free = free_resources(sizes, capacity)
    heap: list[tuple[float, int, Allocation]] = []

    def offer(job: int) -> None:
        step = next_step(job, free)
        if step is not None:
            heapq.heappush(heap, (-step[0], job, step[1]))

    for job in jobs:
        offer(job)
    while heap:
        _, job, larger = heapq.heappop(heap)
        cpus = larger.cpus - sizes[job].cpus
        memory = larger.memory_bytes - sizes[job].memory_bytes
        if cpus <= free[0] + 1e-9 and memory <= free[1] + 1.0:
            sizes[job], free = larger, (free[0] - cpus, free[1] - memory)
            offer(job)


def admit(
    waiting: Iterable[tuple[SimulatedJob, Allocation]],
    given: Mapping[int, Allocation],
    capacity: Capacity,
) -> dict[int, Allocation]:
    """Return the given sizes with those of waiting jobs that fit beside them.

    By priority, then arrival; a job that does not fit does not block later ones.
    """
    admitted = dict(given)
    cpus, memory = free_resources(given, capacity)
    for view, sizes in sorted(waiting, key=lambda pair: (-pair[0].priority, pair[0].job)):
        if sizes.cpus <= cpus + 1e-9 and sizes.memory_bytes <= memory + 1.0:
            admitted[view.job] = sizes
            cpus, memory = cpus - sizes.cpus, memory - sizes.memory_bytes
    return admitted


def release_excess(
    kept: dict[int, Allocation],
    wanted: Mapping[int, Allocation],
    held: Sequence[tuple[float, int]],
    capacity: Capacity,
) -> None:
    """Replace kept sizes by wanted ones until all jobs fit, the largest excess first.

    Args:
        kept: sizes of all jobs, changed in place.
        wanted: sizes of all jobs that fit together.
        held: excess cores, and job, of jobs that keep their current sizes.
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
    """Each job has the sizes that its user requested."""

    name = "static"
    failure_policy = FailurePolicy(RESTART_SEC, RESTART_SEC, keeps_steps=False, replaces_slow=False)
    interval_sec = float("inf")

    def decide(self, snapshot: ClusterView) -> dict[int, Allocation]:
        """Return the requests of all jobs that fit."""
        given = {view.job: view.current for view in snapshot.jobs if view.current is not None}
        waiting = [(view, view.request) for view in snapshot.jobs if view.current is None]
        return admit(waiting, given, snapshot.capacity)


BUSY = 0.8
"""Target share of a store's cores that are busy."""
STEP = 4
"""Maximum of replicas that are added at once."""
FASTER = 1.05
"""Minimum speedup of an added step."""
THRESHOLD_CHANGE_SEC = 15.0
"""Pause of a change and of a recovery: as ours, processes join and leave while others train."""
MORE_MEMORY = 2.0
"""Factor of memory after running out of it."""


@dataclass(slots=True)
class _Climb:
    """Scaling state of one job.

    Attributes:
        best: sizes at the highest speed.
        step_sec: seconds per step there.
    """

    best: Allocation | None = None
    step_sec: float = float("inf")
    ended: bool = False


class ThresholdPolicy:
    """A threshold autoscaler, as the local optimizer of open DLRover.

    A job starts with its request. While its stores' busy cores are below the share BUSY, it gets as
    many more replicas as would reach it, at most STEP at once; a step without the speedup FASTER is
    reverted, and scaling ends. After running out of memory it restarts with twice as much.

    Source: the repository of DLRover, whose local optimizer limits workers by the cores of
    parameter servers; the thresholds are ours.
    """

    name = "threshold"
    failure_policy = FailurePolicy(
        THRESHOLD_CHANGE_SEC, THRESHOLD_CHANGE_SEC, keeps_steps=True, replaces_slow=True
    )
    interval_sec = 180.0

    def __init__(self) -> None:
        self.climbs: dict[int, _Climb] = {}

    def decide(self, snapshot: ClusterView) -> dict[int, Allocation]:
        """Return the scaled sizes of running jobs, and the requests of others."""
        views = {view.job: view for view in snapshot.jobs}
        self.climbs = {job: self.climbs.get(job, _Climb()) for job in views}
        given = {job: view.current for job, view in views.items() if view.current is not None}
        waiting = [
            (view, _request_after_oom(view)) for view in snapshot.jobs if view.current is None
        ]
        sizes = admit(waiting, given, snapshot.capacity)
        for measured in snapshot.measured:
            wanted = self._scaled(views[measured.job], measured, snapshot)
            others = {job: own for job, own in sizes.items() if job != measured.job}
            sizes = admit([(views[measured.job], wanted)], others, snapshot.capacity)
            sizes.setdefault(measured.job, given[measured.job])
        return sizes

    def _scaled(
        self, view: SimulatedJob, measured: Measurement, snapshot: ClusterView
    ) -> Allocation:
        climb, current = self.climbs[view.job], view.current
        assert current is not None, "a measured job runs"
        if climb.ended:
            return current
        if climb.best is not None and climb.step_sec < FASTER * measured.step_sec:
            climb.ended = True
            return replace(current, num_replicas=climb.best.num_replicas)
        climb.best, climb.step_sec = current, measured.step_sec
        growth = BUSY * current.store_cpus / max(measured.store_busy, 1e-6)
        wanted = int(min(current.num_replicas * growth, current.num_replicas + STEP))
        allowed = snapshot.allowed[view.kind][current.num_stores]
        while wanted > current.num_replicas and not (wanted < len(allowed) and allowed[wanted]):
            wanted -= 1
        climb.ended = wanted <= current.num_replicas
        return replace(current, num_replicas=max(wanted, current.num_replicas))


def _request_after_oom(view: SimulatedJob) -> Allocation:
    factor, request = MORE_MEMORY**view.num_oom, view.request
    return replace(
        request,
        replica_memory=factor * request.replica_memory,
        tables_memory=factor * request.tables_memory,
    )


JOB_RESTART_SEC, RECOVERY_SEC = 30.0, 60.0
"""Pauses of Optimus and Pollux: of a change through a checkpoint, and of a restart."""


def fit_optimus(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds per step by Optimus's model: a / w + b + c w / p + d w + e p."""
    replicas, stores = allowed_sizes(allowed)
    if len(window) < MIN_CELLS:
        return np.full(len(replicas), np.nan)
    columns, seconds = window.columns(), window.medians()
    terms = _optimus_terms(columns[:, 3], columns[:, 4])
    scale = np.abs(terms).max(axis=0)
    coefficients = nnls(terms / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    all_terms = _optimus_terms(replicas.astype(float), stores.astype(float))
    return np.maximum(all_terms @ coefficients, 1e-9)


def _optimus_terms(workers: Floats, servers: Floats) -> Floats:
    return np.stack(
        [1.0 / workers, np.ones_like(workers), workers / servers, workers, servers], axis=1
    )


class MarginalPolicy:
    """Optimus: the largest marginal gain first.

    Each job first gets one replica and one store. Then, as long as something fits, one replica or
    store goes to the job whose remaining time, as predicted by Optimus's model, falls most for the
    dominant share that it takes. The remaining samples are known here; Optimus extrapolates losses.

    Source: Peng, Bao, Chen, Wu and Guo, "Optimus" (2018), the sections on performance modelling and
    on resource allocation; ten minutes between allocations, stragglers are replaced, out-of-memory
    failures are not treated.
    """

    name = "marginal"
    failure_policy = FailurePolicy(
        JOB_RESTART_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=True
    )
    interval_sec = 600.0

    def __init__(self) -> None:
        self.models = KindModels(fit_optimus)
        self.next_sec = 0.0

    def decide(self, snapshot: ClusterView) -> dict[int, Allocation]:
        """Return new sizes of all jobs each interval; in between, only of waiting jobs."""
        self.models.update(snapshot)
        given = {view.job: view.current for view in snapshot.jobs if view.current is not None}
        if snapshot.now_sec >= self.next_sec:
            self.next_sec = snapshot.now_sec + self.interval_sec
            given = {}
        firsts = [
            (view, self._first(view, snapshot.allowed[view.kind]))
            for view in snapshot.jobs
            if view.job not in given
        ]
        sizes = admit(firsts, given, snapshot.capacity)
        views = [view for view, _ in firsts if view.job in sizes]
        self._grow(sizes, views, snapshot)
        return sizes

    def _first(self, view: SimulatedJob, allowed: np.ndarray) -> Allocation:
        """Return the initial sizes of a job: the smallest, or some to be measured."""
        sampled = self.models.sample(view, allowed)
        if sampled is not None:
            return sampled
        if allowed.shape[0] > 1 and allowed[1, 1]:
            return replace(view.request, num_replicas=1, num_stores=1)
        return view.request

    def _grow(
        self, sizes: dict[int, Allocation], views: list[SimulatedJob], snapshot: ClusterView
    ) -> None:
        times = {view.job: self._times(view, snapshot) for view in views}
        by_job = {view.job: view for view in views}

        def next_step(job: int, free: tuple[float, float]) -> tuple[float, Allocation] | None:
            return _best_step(by_job[job], sizes[job], times[job], snapshot.capacity, free)

        grow_greedily(sizes, by_job, snapshot.capacity, next_step)

    def _times(self, view: SimulatedJob, snapshot: ClusterView) -> Floats:
        """Return the remaining seconds at each size, (stores + 1, replicas + 1); nan if unknown."""
        allowed = snapshot.allowed[view.kind]
        times = np.full(allowed.shape, np.nan)
        steps = view.left_samples / snapshot.batch_samples[view.kind]
        times[allowed] = steps * self.models.predicted(view.kind, snapshot.allowed)
        return times


def _best_step(
    view: SimulatedJob,
    sizes: Allocation,
    times: Floats,
    capacity: Capacity,
    free: tuple[float, float],
) -> tuple[float, Allocation] | None:
    """Return the larger gain per dominant share of one more replica or store, with its sizes."""
    now = times[sizes.num_stores, sizes.num_replicas]
    best: tuple[float, Allocation] | None = None
    for stores, replicas in ((0, 1), (1, 0)):
        at = sizes.num_stores + stores, sizes.num_replicas + replicas
        if at[0] >= times.shape[0] or at[1] >= times.shape[1] or not times[at] < now:
            continue
        larger = replace(sizes, num_stores=at[0], num_replicas=at[1])
        cpus, memory = larger.cpus - sizes.cpus, larger.memory_bytes - sizes.memory_bytes
        if cpus > free[0] + 1e-9 or memory > free[1] + 1.0:
            continue
        dominant = max(cpus / capacity.cpus, memory / capacity.memory_bytes, 1e-12)
        gain = 2.0**view.priority * float(now - times[at]) / dominant
        if best is None or gain > best[0]:
            best = gain, larger
    return best


EXPLORED = 2
"""Factor of replicas that a job may get over its maximum so far."""
GAMMAS = (1.0, 1.5, 2.0, 4.0, 10.0)
"""Overlaps of computation and synchronisation: T^g = T_compute^g + T_sync^g."""
ENOUGH = 1.1
"""Minimum speedup of a change."""


def fit_pollux(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds per step: T_compute = a + b / r, T_sync = c + d (r - 2) beyond one replica.

    The terms of T^g are fitted for each overlap g, and the best fit is kept.
    """
    replicas = allowed_sizes(allowed)[0].astype(float)
    columns, seconds = window.columns(), window.medians()
    workers = columns[:, 3]
    # Perfect scaling is assumed until two numbers of replicas were measured.
    perfect = float(np.median(seconds * workers)) / replicas
    best: tuple[float, Floats] = (np.inf, perfect)
    for gamma in GAMMAS if len(np.unique(workers)) > 1 else ():
        terms = _pollux_terms(workers, gamma) / seconds[:, None] ** gamma
        coefficients = nnls(terms, np.ones(len(seconds)))[0]
        fitted = np.maximum(_pollux_terms(workers, gamma) @ coefficients, 1e-12) ** (1.0 / gamma)
        error = float(np.abs(np.log(fitted / seconds)).sum())
        if error < best[0]:
            powers = np.maximum(_pollux_terms(replicas, gamma) @ coefficients, 1e-12)
            best = error, powers ** (1.0 / gamma)
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
    """Pollux: maximise the power mean of speedups.

    A job's speedup is its goodput over that of one replica; the exponent -1 weights slow jobs most.
    A job gets at most twice the replicas that it had before. The global batch is fixed, as in our
    jobs, so goodput is throughput. Each replica has a store: together they have the links of an
    all-reduce.

    Source: Qiao and others, "Pollux" (2021), the sections on the system throughput and on the
    scheduler. A greedy choice, which is optimal for diminishing returns, replaces its genetic
    search; a restart takes 30 s.
    """

    name = "goodput"
    failure_policy = FailurePolicy(
        JOB_RESTART_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=False
    )
    interval_sec = 60.0

    def __init__(self) -> None:
        self.models = KindModels(fit_pollux)

    def decide(self, snapshot: ClusterView) -> dict[int, Allocation]:
        """Return new sizes of all jobs; a job that gains little keeps its sizes."""
        self.models.update(snapshot)
        firsts = [
            (view, _request_at(view, _smallest_size(view, snapshot))) for view in snapshot.jobs
        ]
        wanted = admit(firsts, {}, snapshot.capacity)
        speeds = {view.job: self._speeds(view, snapshot) for view in snapshot.jobs}
        self._grow(wanted, speeds, snapshot)
        return self._keep_small_changes(wanted, speeds, snapshot)

    def _speeds(self, view: SimulatedJob, snapshot: ClusterView) -> dict[int, float]:
        """Return the speedup over the smallest size, by possible replicas."""
        allowed = snapshot.allowed[view.kind]
        seconds = np.full(allowed.shape, np.nan)
        seconds[allowed] = self.models.predicted(view.kind, snapshot.allowed)
        first = _smallest_size(view, snapshot)
        most = min(min(allowed.shape) - 1, EXPLORED * view.most_replicas)
        base = seconds[first, first]
        speedups = {first: 1.0}
        for size in range(first + 1, most + 1):
            if allowed[size, size] and np.isfinite(base):
                speedups[size] = float(base / seconds[size, size])
        return speedups

    def _grow(
        self,
        wanted: dict[int, Allocation],
        speeds: dict[int, dict[int, float]],
        snapshot: ClusterView,
    ) -> None:
        """Add replicas where -1 / speedup rises most for the dominant share."""
        capacity, views = snapshot.capacity, {view.job: view for view in snapshot.jobs}

        def next_step(job: int, free: tuple[float, float]) -> tuple[float, Allocation] | None:
            now = wanted[job].num_replicas
            larger = next((size for size in speeds[job] if size > now), None)
            if larger is None or not speeds[job][larger] > speeds[job][now]:
                return None
            step = _request_at(views[job], larger)
            share = max(
                (step.cpus - wanted[job].cpus) / capacity.cpus,
                (step.memory_bytes - wanted[job].memory_bytes) / capacity.memory_bytes,
            )
            gained = 1.0 / speeds[job][now] - 1.0 / speeds[job][larger]
            return 2.0 ** views[job].priority * gained / max(share, 1e-12), step

        grow_greedily(wanted, list(wanted), capacity, next_step)

    def _keep_small_changes(
        self,
        wanted: dict[int, Allocation],
        speeds: dict[int, dict[int, float]],
        snapshot: ClusterView,
    ) -> dict[int, Allocation]:
        """Keep the sizes of jobs that would gain less than ENOUGH, as far as all fit."""
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
        release_excess(kept, wanted, held, snapshot.capacity)
        return kept


def _smallest_size(view: SimulatedJob, snapshot: ClusterView) -> int:
    allowed = snapshot.allowed[view.kind]
    return next(size for size in range(1, min(allowed.shape)) if allowed[size, size])


def _request_at(view: SimulatedJob, size: int) -> Allocation:
    return replace(view.request, num_replicas=size, num_stores=size)
