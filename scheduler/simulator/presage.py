"""Our policy in the simulator: the live functions, and features that can be turned off.

For each job, the sizes with trusted predictions are compared by time^k x cost. All jobs share the
cluster (`planner.share`), with a larger gain the sooner a job is done. A running job is changed as
`planner.correction` decides, or because others need its share.

Source: that the jobs with the least remaining work go first is Schrage's (1968) rule for one
processor, and Berg et al. (2020, "heSRPT") for parallel jobs with diminishing returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from presage.scheduler.model.elasticity import (
    CoreGrant,
    CoreReadings,
    PoolReadings,
    Reading,
    add_readings,
    fit_pool_cores,
)
from presage.scheduler.model.pools import GIB
from presage.scheduler.model.throughput import Floats
from presage.scheduler.planner.candidates import (
    TIME_COST_EXPONENT,
    Candidate,
    pareto_front,
    weighted_cost,
)
from presage.scheduler.planner.correction import (
    MEMORY_HEADROOM,
    MIN_GAIN,
    MIN_REMAINING_SEC,
    PAUSE_SEC,
    Correction,
    MemoryWatch,
    SizeComparison,
    decide_correction,
    end_change,
    forecast,
    is_urgent,
    memory_after_oom,
)
from presage.scheduler.planner.share import WAITING, Options, share_budget, urgencies
from presage.scheduler.simulator.baselines import release_excess
from presage.scheduler.simulator.kind_models import KindModel, KindModels, build_kind, fit_presage
from presage.scheduler.simulator.views import (
    Allocation,
    ClusterView,
    FailurePolicy,
    Measurement,
    Readings,
    SimulatedJob,
)
from presage.schemas.config.schedule import BudgetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFeatures:
    """Features of the policy that can be turned off."""

    time_cost_exponent: float = TIME_COST_EXPONENT
    """Exponent k of time."""
    urgent: bool = True
    """Whether jobs with less remaining work go first."""
    fit_cores: bool = True
    """Whether cores are fitted to busy cores; else those of the request."""
    give_back: bool = True
    """Whether unneeded memory is released."""
    grow_after_oom: bool = True
    """Whether a job gets more memory after running out of it."""
    move_stores: bool = True
    """Whether the number of stores of a started job may change."""


ALL = PolicyFeatures()
OFF = PolicyFeatures(
    time_cost_exponent=1.0,
    urgent=False,
    fit_cores=False,
    give_back=False,
    grow_after_oom=False,
    move_stores=False,
)
"""No features: time x cost, by priority, then arrival."""
FORECAST_POINTS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Progress at which memory is forecast, until the next of these points at least."""


@dataclass(slots=True)
class JobEstimate:
    """The estimates of one job.

    Attributes:
        version: number of updates.
        memory: bytes of one replica and of all stores that it should get; None for its request.
        num_forecasts: passed `FORECAST_POINTS`.
        oom: handled out-of-memory failures.
        grant: cores that it should get at its last measured sizes; None before.
    """

    version: int = 0
    cores: CoreReadings = field(default_factory=CoreReadings)
    memory: tuple[float, float] | None = None
    num_forecasts: int = 0
    oom: int = 0
    grant: CoreGrant | None = None


class Estimates:
    """Estimates of all jobs from measurements.

    Speeds are those of all jobs of a kind, cores and memory those of the job itself. Memory is that
    of `forecast`, with the touched rows of all later steps.
    """

    def __init__(self, features: PolicyFeatures) -> None:
        self.features = features
        self.models = KindModels(fit_presage)
        self.kinds: dict[str, KindModel] = {}
        self.jobs: dict[int, JobEstimate] = {}

    def update(self, snapshot: ClusterView) -> None:
        """Update all estimates with the measurements since the last decision."""
        self.jobs = {view.job: self.jobs.get(view.job) or JobEstimate() for view in snapshot.jobs}
        views = {view.job: view for view in snapshot.jobs}
        for measured in snapshot.measured:
            self._add_measurement(measured, views[measured.job])
        suspect = {m.job for m in snapshot.measured if self._is_suspect(m.job)}
        self.models.update(snapshot, suspect)
        for kind, version in self.models.versions.items():
            if kind not in self.kinds or self.kinds[kind].version != version:
                seconds = self.models.seconds[kind]
                self.kinds[kind] = build_kind(version, seconds, snapshot.allowed[kind])
        for view in snapshot.jobs:
            self._update_memory(view, snapshot)

    def _add_measurement(self, measured: Measurement, view: SimulatedJob) -> None:
        estimate = self.jobs[measured.job]
        estimate.version += 1
        at = measured.num_replicas, measured.num_stores
        estimate.cores = add_readings(
            estimate.cores, at, readings_of(measured, view.current or view.request)
        )
        if self.features.fit_cores:
            estimate.grant = fit_pool_cores(estimate.cores)

    def _is_suspect(self, job: int) -> bool:
        grant = self.jobs[job].grant
        return grant is not None and (grant.trying or grant.slower)

    def cores(self, view: SimulatedJob, kind: KindModel) -> tuple[Floats, Floats]:
        """Return the cores of one replica and of one store at each trusted size.

        A size at which the job was not measured gets as many core seconds a step as its latest
        size, or the request, and no process less than requested; nan if neither is trusted.
        """
        request, readings = view.request, self.jobs[view.job].cores
        requested = request.replica_cpus, request.store_cpus
        own = self.jobs[view.job].grant
        sizes, cpus = (request.num_replicas, request.num_stores), requested
        if own is not None:
            sizes, latest = readings.sizes, readings.latest()[-1]
            cpus = max(own.cpus[0], latest[0].cpus), max(own.cpus[1], latest[1].cpus)
        reference = kind.index_of(*sizes)
        if reference is None:
            return np.full(len(kind.replicas), np.nan), np.full(len(kind.stores), np.nan)
        steps = kind.seconds[reference] / kind.seconds
        replica = np.maximum(requested[0], cpus[0] * sizes[0] / kind.replicas * steps)
        store = np.maximum(requested[1], cpus[1] * sizes[1] / kind.stores * steps)
        for sizes in readings.readings if own is not None else ():
            at = kind.index_of(*sizes)
            grant = fit_pool_cores(replace(readings, sizes=sizes))
            if at is not None and grant is not None:
                # A trial of more cores is no need (`PresagePolicy._try_cores`).
                latest = readings.readings[sizes][-1]
                given = [reading.cpus for reading in latest] if grant.trying else grant.cpus
                replica[at], store[at] = given
        return replica, store

    def memory(self, view: SimulatedJob) -> tuple[float, float]:
        """Return the bytes of one replica, and of all stores together."""
        estimate, request = self.jobs[view.job].memory, view.request
        return (request.replica_memory, request.tables_memory) if estimate is None else estimate

    def _update_memory(self, view: SimulatedJob, snapshot: ClusterView) -> None:
        """Forecast the memory of a job at the next of `FORECAST_POINTS`, or after a failure."""
        estimate = self.jobs[view.job]
        killed = view.num_oom > estimate.oom
        if not killed and (view.current is None or estimate.num_forecasts == len(FORECAST_POINTS)):
            return
        passed = sum(view.progress >= point for point in FORECAST_POINTS)
        if not killed and passed <= estimate.num_forecasts:
            return
        estimate.num_forecasts, estimate.oom = max(passed, estimate.num_forecasts), view.num_oom
        given = self.memory(view)
        readings = snapshot.readings(view.job)
        wanted = _forecast_bytes(readings, given[0], passed, give_back=self.features.give_back)
        if killed and self.features.grow_after_oom:
            wanted = max(wanted or 0.0, memory_after_oom(given[0], 0.0, np.inf))
        if wanted is not None:
            estimate.memory = wanted, wanted * readings.tables_share
            estimate.version += 1

    def request_sizes(self, view: SimulatedJob) -> Allocation:
        """Return the current sizes, or the request, with the estimated memory."""
        memory = self.memory(view)
        sizes = view.current or view.request
        return replace(sizes, replica_memory=memory[0], tables_memory=memory[1])


def readings_of(measured: Measurement, given: Allocation) -> PoolReadings:
    """Return the readings of a job's pools."""
    return (
        Reading(given.replica_cpus, measured.replica_busy, measured.step_sec),
        Reading(given.store_cpus, measured.store_busy, measured.step_sec),
    )


def _forecast_bytes(
    readings: Readings, given: float, passed: int, *, give_back: bool
) -> float | None:
    """Return the bytes that a replica should get, None for no change."""
    prediction = forecast(
        readings.steps, readings.replica_bytes, end_step=1000, limit_bytes=int(given),
        load=readings.load,
    )  # fmt: skip
    if not prediction.confident:
        return None
    wanted = MEMORY_HEADROOM * prediction.needed_bytes
    if give_back and wanted < (1.0 - MIN_GAIN) * given:
        return wanted
    later = [int(1000 * point) for point in FORECAST_POINTS[passed:]] or [1000]
    watch = MemoryWatch(
        pool="training",
        forecast=prediction,
        replaced_step=later[0],
        limit_bytes=int(given),
        room_bytes=int(given),
    )
    return wanted if is_urgent(watch) and wanted > given else None


INTERVAL_SEC, CONFIRM_SEC = 300.0, 60.0
"""Time between two decisions on running jobs, and while the gain of a change is confirmed."""
MIN_SHRINK_SEC = 100 * PAUSE_SEC
"""Remaining time below which a job keeps cores and memory that it may not need, unless others
lack them."""
MIN_SPEED_STEP = 0.05
"""Minimum relative difference of speed between two plans of a job."""
PRICES = BudgetConfig()

Key = tuple[int, int, int, bool]
"""Versions of the estimates of a kind and of a job, its fixed number of stores, 0 for any, and
whether it ends too soon to be changed."""


@dataclass(frozen=True, slots=True)
class Plans:
    """Alternative sizes of one job.

    Attributes:
        key: versions from which they were computed.
        sizes: one per plan, cheapest first.
        seconds: (n,) seconds per step; nan if unknown.
        options: cost and gain of each plan.
    """

    key: Key
    sizes: tuple[Allocation, ...]
    seconds: Floats
    options: Options


class PresagePolicy:
    """The policy of the scheduler: shared plans, corrections, fitted cores and memory."""

    failure_policy = FailurePolicy(PAUSE_SEC, PAUSE_SEC, keeps_steps=True, replaces_slow=True)
    interval_sec = INTERVAL_SEC

    def __init__(self, features: PolicyFeatures = ALL, name: str = "presage") -> None:
        self.features, self.name = features, name
        self.estimates = Estimates(features)
        self.plans: dict[int, Plans] = {}
        self.stores: dict[int, int] = {}
        self.corrections: dict[int, Correction] = {}
        self.shared: tuple[tuple[tuple[int, Key], ...], tuple[int, ...]] = ((), ())

    def decide(self, snapshot: ClusterView) -> Mapping[int, Allocation]:
        """Return all sizes: newly shared, but running jobs that gain little keep theirs."""
        self.estimates.update(snapshot)
        if not self.features.move_stores:
            running = {v.job: v.current.num_stores for v in snapshot.jobs if v.current is not None}
            self.stores = {**self.stores, **running}
        self.plans = {view.job: self._plans(view, snapshot) for view in snapshot.jobs}
        self.corrections = {
            view.job: self.corrections.get(view.job) or Correction() for view in snapshot.jobs
        }
        targets = {
            view.job: self.plans[view.job].sizes[plan]
            for view, plan in zip(snapshot.jobs, self._share(snapshot), strict=True)
            if plan != WAITING
        }
        return self._settle(targets, snapshot)

    def _share(self, snapshot: ClusterView) -> tuple[int, ...]:
        """Return the plan of each job; recomputed when the jobs or their estimates changed."""
        key = tuple((view.job, self.plans[view.job].key) for view in snapshot.jobs)
        if key != self.shared[0]:
            capacity = snapshot.capacity
            budget = replace(PRICES, cpus=capacity.cpus, memory=int(capacity.memory_bytes))
            self.shared = key, share_budget(self._options(snapshot), budget, exchanges=0)
        return self.shared[1]

    def _options(self, snapshot: ClusterView) -> list[Options]:
        all_plans = [self.plans[view.job] for view in snapshot.jobs]
        if not self.features.urgent:
            return [plans.options for plans in all_plans]
        steps = [v.left_samples / snapshot.batch_samples[v.kind] for v in snapshot.jobs]
        remaining_sec = np.array(steps) * np.array([plans.seconds[-1] for plans in all_plans])
        runs = np.array([view.current is not None for view in snapshot.jobs], bool)
        weights = urgencies(remaining_sec, runs).tolist()
        return [
            replace(plans.options, urgency=urgency)
            for plans, urgency in zip(all_plans, weights, strict=True)
        ]

    def _plans(self, view: SimulatedJob, snapshot: ClusterView) -> Plans:
        """Return the plans of a job; recomputed only when its estimates changed."""
        kind = self.estimates.kinds.get(view.kind)
        stores = self.stores.get(view.job, 0)
        ends = kind is not None and self._ends_soon(view, kind, snapshot)
        versions = 0 if kind is None else kind.version, self.estimates.jobs[view.job].version
        key = (*versions, stores, ends)
        old = self.plans.get(view.job)
        if old is not None and old.key == key:
            return old
        if ends and view.current is not None:
            return _single_plan(view.current, kind, view, key)
        usable = None if kind is None else _with_stores(kind, stores)
        cores = None if usable is None else self.estimates.cores(view, usable)
        if usable is None or cores is None or not np.isfinite(cores).any():
            return _single_plan(self.estimates.request_sizes(view), kind, view, key)
        known = np.isfinite(cores[0])
        cores = cores[0][known], cores[1][known]
        return self._trusted_plans(view, usable.at(known), cores, key)

    def _ends_soon(self, view: SimulatedJob, kind: KindModel, snapshot: ClusterView) -> bool:
        """Return whether a running job ends so soon that no change of it pays for itself."""
        current = view.current
        at = None if current is None else kind.index_of(current.num_replicas, current.num_stores)
        if at is None:
            return False
        steps = view.left_samples / snapshot.batch_samples[view.kind]
        return steps * float(kind.seconds[at]) < MIN_REMAINING_SEC

    def _trusted_plans(
        self, view: SimulatedJob, kind: KindModel, cores: tuple[Floats, Floats], key: Key
    ) -> Plans:
        memory = self.estimates.memory(view)
        cpus = kind.replicas * cores[0] + kind.stores * cores[1]
        total_memory = kind.replicas * memory[0] + memory[1]
        price = PRICES.cpu_hour_price * cpus + PRICES.gib_hour_price * total_memory / GIB
        weighted = weighted_cost(
            kind.seconds, kind.seconds * price, self.features.time_cost_exponent
        )
        preferred = int(weighted.argmin())
        front = pareto_front(np.stack([price, kind.seconds], axis=1))
        slower = front[kind.seconds[front] > kind.seconds[preferred]]
        slower = slower[price[slower] < price[preferred]]
        indices = np.append(_spaced(slower, kind.seconds), preferred)
        seconds = kind.seconds[indices]
        sizes = tuple(
            Allocation(
                int(kind.replicas[i]),
                int(kind.stores[i]),
                float(cores[0][i]),
                float(cores[1][i]),
                *memory,
            )
            for i in indices
        )
        options = Options(
            priority=view.priority,
            cpus=cpus[indices],
            memory_bytes=total_memory[indices],
            gain=seconds[-1] / seconds,
        )
        return Plans(key, sizes, seconds, options)

    def _settle(
        self, targets: dict[int, Allocation], snapshot: ClusterView
    ) -> dict[int, Allocation]:
        """Keep the sizes of running jobs if a change is not worth it and all fit."""
        running = [view for view in snapshot.jobs if view.current is not None]
        wanted = dict(targets)
        held: list[tuple[float, int]] = []
        for view in running:
            assert view.current is not None, "the job runs"
            target = targets.get(view.job)
            if target is not None and not self._is_worth_it(view, target, snapshot):
                wanted[view.job] = view.current
                held.append((view.current.cpus - target.cpus, view.job))
        # Others may need what exceeds a share.
        release_excess(wanted, targets, held, snapshot.capacity)
        self._try_cores(wanted, snapshot)
        counting = any(c.num_agreeing_ticks for c in self.corrections.values())
        self.interval_sec = CONFIRM_SEC if counting else INTERVAL_SEC
        return wanted

    def _try_cores(self, wanted: dict[int, Allocation], snapshot: ClusterView) -> None:
        """Give free cores to running jobs of which more cores may shorten the steps."""
        free = snapshot.capacity.cpus - sum(sizes.cpus for sizes in wanted.values())
        for view in snapshot.jobs:
            current, tried = view.current, self._with_trial(view)
            if tried is None or current is None or wanted.get(view.job) != current:
                continue
            more, ends = tried.cpus - current.cpus, self.plans[view.job].key[-1]
            if not ends and 0.0 < more <= free:
                wanted[view.job], free = tried, free - more

    def _with_trial(self, view: SimulatedJob) -> Allocation | None:
        """Return the current sizes of a job with the cores of a trial; None without one."""
        current, own = view.current, self.estimates.jobs[view.job].grant
        if current is None or own is None or not own.trying:
            return None
        if self.estimates.jobs[view.job].cores.sizes != (current.num_replicas, current.num_stores):
            return None
        return replace(current, replica_cpus=own.cpus[0], store_cpus=own.cpus[1])

    def _is_worth_it(self, view: SimulatedJob, target: Allocation, snapshot: ClusterView) -> bool:
        current = view.current
        assert current is not None, "the job runs"
        if target == current:
            return False
        plans, kind = self.plans[view.job], self.estimates.kinds.get(view.kind)
        steps = view.left_samples / snapshot.batch_samples[view.kind]
        if target.memory_bytes > 1.01 * current.memory_bytes and (
            target.replica_memory > 1.01 * current.replica_memory
        ):
            return True  # it may run out of memory
        at = None if kind is None else kind.index_of(current.num_replicas, current.num_stores)
        if kind is None or at is None:
            return False
        now_sec = steps * float(kind.seconds[at])
        if now_sec == 0.0:
            return False  # it ends now
        if (target.num_replicas, target.num_stores) == (current.num_replicas, current.num_stores):
            if current == self._with_trial(view):
                return False  # not measured yet
            grows = target.cpus > current.cpus
            least_sec = MIN_REMAINING_SEC if grows else MIN_SHRINK_SEC
            return now_sec > least_sec and _is_far_off(current, target)
        new_sec = steps * float(plans.seconds[plans.sizes.index(target)]) + PAUSE_SEC
        if not np.isfinite(new_sec):
            return False
        now, new = (
            weighted_cost(seconds, seconds * _price(sizes), self.features.time_cost_exponent)
            for seconds, sizes in ((now_sec, current), (new_sec, target))
        )
        comparison = SizeComparison(
            current=_candidate(current, now_sec),
            best=_candidate(target, new_sec),
            gain=1.0 - new / now,
            confident=self.estimates.jobs[view.job].cores.sizes
            == (current.num_replicas, current.num_stores),
        )
        before = self.corrections[view.job]
        if before.in_flight is not None:
            before = end_change(before, view.since_sec + PAUSE_SEC)
        verdict = decide_correction(before, snapshot.now_sec, comparison)
        self.corrections[view.job] = verdict.state
        return verdict.change is not None


def _single_plan(sizes: Allocation, kind: KindModel | None, view: SimulatedJob, key: Key) -> Plans:
    one = np.ones(1)
    options = Options(
        priority=view.priority,
        cpus=sizes.cpus * one,
        memory_bytes=sizes.memory_bytes * one,
        gain=one,
    )
    at = None if kind is None else kind.index_of(sizes.num_replicas, sizes.num_stores)
    seconds = np.nan if kind is None or at is None else float(kind.seconds[at])
    return Plans(key, (sizes,), seconds * one, options)


def _with_stores(kind: KindModel, stores: int) -> KindModel:
    """Return a kind's model at sizes with this number of stores, or at all sizes for 0."""
    return kind.at(kind.stores == stores) if stores else kind


def _spaced(indices: np.ndarray, seconds: Floats) -> np.ndarray:
    """Return indices of a front, slowest first, at least `MIN_SPEED_STEP` apart."""
    steps = np.floor(np.log(seconds[indices]) / -np.log1p(MIN_SPEED_STEP))
    return indices[np.diff(steps, prepend=-np.inf) > 0]


def _is_far_off(current: Allocation, target: Allocation) -> bool:
    cpus, memory = target.cpus / current.cpus, target.memory_bytes / current.memory_bytes
    return min(cpus, memory) < 1.0 - MIN_GAIN or cpus > 1.0 + MIN_GAIN / 2.0


def _price(sizes: Allocation) -> float:
    return PRICES.cpu_hour_price * sizes.cpus + PRICES.gib_hour_price * sizes.memory_bytes / GIB


def _candidate(sizes: Allocation, seconds: float) -> Candidate:
    price = _price(sizes)
    return Candidate(
        segment_jobs=0,
        workers_per_job=0,
        num_replicas=sizes.num_replicas,
        num_stores=sizes.num_stores,
        predicted_sec=seconds,
        cost=price * seconds / 3600.0,
        cost_per_hour=price,
    )
