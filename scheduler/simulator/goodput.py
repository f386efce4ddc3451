"""A policy of goodputs, as Pollux.

Each job's speedup is its goodput over that of one replica; the cluster makes the power
mean of all speedups large, with the exponent -1, which weighs slow jobs most. A job gets
at most twice the replicas that it ever had, until more was measured. The global batch is
fixed here, as it is in our jobs, so the statistical efficiency is 1 and goodput is
throughput. A store goes with each replica: together they have the links of an all-reduce.

Source: Qiao and others, "Pollux" (2021), the sections on the system throughput and on the
scheduler; its genetic search is replaced by the greedy choice, which is optimal for
speedups with diminishing returns; a restart takes 30 s, and a job whose sizes change is
discounted by it.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from scheduler.cells import Window
from scheduler.model import Floats
from scheduler.simulator.knowledge import Knowledge, sizes_of
from scheduler.simulator.static import admit, give_back
from scheduler.simulator.views import Handling, JobView, Sizes, Snapshot

CHANGE_SEC, RECOVERY_SEC = 30.0, 60.0
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
        terms = _terms(workers, gamma) / seconds[:, None] ** gamma
        found = nnls(terms, np.ones(len(seconds)))[0]
        again = np.maximum(_terms(workers, gamma) @ found, 1e-12) ** (1.0 / gamma)
        error = float(np.abs(np.log(again / seconds)).sum())
        if error < best[0]:
            whole = np.maximum(_terms(replicas, gamma) @ found, 1e-12)
            best = error, whole ** (1.0 / gamma)
    return best[1]


def _terms(workers: Floats, gamma: float) -> Floats:
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
    handling = Handling(CHANGE_SEC, RECOVERY_SEC, keeps_steps=False, replaces_slow=False)
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
