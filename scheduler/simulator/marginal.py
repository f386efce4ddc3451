"""A policy of marginal gains, as Optimus.

Each job first gets one replica and one store. Then, as long as something fits, one
replica or one store goes to the job whose remaining time falls most for the dominant
share that this takes. The remaining time is what Optimus's own model predicts; here it
is told how much is left, which Optimus extrapolates from losses.

Source: Peng, Bao, Chen, Wu and Guo, "Optimus" (2018), the sections on performance modelling
and on resource allocation; ten minutes between allocations, stragglers are replaced, running
out of memory is not spoken of.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from scheduler.cells import Window
from scheduler.model import Floats
from scheduler.simulator.knowledge import MIN_CELLS, Knowledge, sizes_of
from scheduler.simulator.static import admit
from scheduler.simulator.views import Capacity, Handling, JobView, Sizes, Snapshot

CHANGE_SEC, RECOVERY_SEC = 30.0, 60.0
"""Pauses of a change by way of a checkpoint, and of a restart."""


def fit_optimus(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds of a step by Optimus's model: a / w + b + c w / p + d w + e p."""
    replicas, stores = sizes_of(allowed)
    if len(window) < MIN_CELLS:
        return np.full(len(replicas), np.nan)
    columns, seconds = window.columns(), window.medians()
    known = _terms(columns[:, 3], columns[:, 4])
    scale = np.abs(known).max(axis=0)
    found = nnls(known / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return np.maximum(_terms(replicas.astype(float), stores.astype(float)) @ found, 1e-9)


def _terms(workers: Floats, servers: Floats) -> Floats:
    return np.stack(
        [1.0 / workers, np.ones_like(workers), workers / servers, workers, servers], axis=1
    )


class MarginalPolicy:
    """The largest marginal gain first."""

    name = "marginal"
    handling = Handling(CHANGE_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=True)
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
