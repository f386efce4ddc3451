"""Simulate the jobs of one trace under one policy, event by event.

Training advances at a constant rate between events. With sizes of speed v (of the kind's table),
cores that cover a share c of what the busier process needs, and a straggler of factor f,

    rate = v min(1, c) / f / samples of the job

except during pauses. Memory of each process grows with the touched rows, as a share of its peak:

    share(p) = EMPTY + (1 - EMPTY) (1 - exp(-FILLING p)) / (1 - exp(-FILLING))

Waiting jobs are decided each ROUND_SEC after an event, running ones also at the policy's interval.
A job that a policy does not place in an empty cluster has failed. Decisions are checked against the
capacity.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from presage.scheduler.simulator.jobs import ACCIDENTS, JobSpec, Table
from presage.scheduler.simulator.views import (
    Allocation,
    Capacity,
    ClusterView,
    FailurePolicy,
    Measurement,
    Policy,
    Readings,
    SimulatedJob,
)

EMPTY = 0.5
"""Share of its peak memory that a process uses at its first step."""
FILLING = 3.0
"""Rate at which tables fill: 95 % of the rest within the job."""
START_SEC = 30.0
"""Time from placement to the first step, under any policy."""
CHECKPOINT_SEC = 1800.0
"""Training time between checkpoints."""
ALONE_SEC = 47.0
"""Pause after the loss of a process of a job with one replica, under a policy with `keeps_steps`:
it restarts from its checkpoint (the slower of two runs, `benchmarks/recovery.md`)."""
FOUND_SEC = 120.0
"""Time until a policy with `replaces_slow` detects a straggler."""
MAX_OOM = 3
"""Number of out-of-memory failures after which a job has failed."""

EventKind = Literal["finish", "oom", "loss", "slow", "fast"]


def memory_share_at(progress: float) -> float:
    """Return the share of its peak memory that a process uses.

    Example:
        >>> memory_share_at(0.0), memory_share_at(1.0), round(memory_share_at(0.5), 3)
        (0.5, 1.0, 0.909)
    """
    return EMPTY + (1.0 - EMPTY) * math.expm1(-FILLING * progress) / math.expm1(-FILLING)


def progress_at_share(share: float) -> float:
    """Return the progress at which a process uses this share of its peak memory.

    Example:
        >>> round(progress_at_share(memory_share_at(0.3)), 9), progress_at_share(0.4)
        (0.3, 0.0)
    """
    if share >= 1.0:
        return math.inf
    part = max(0.0, share - EMPTY) / (1.0 - EMPTY)
    return -math.log1p(part * math.expm1(-FILLING)) / FILLING


@dataclass(slots=True, kw_only=True)
class ResourceUse:
    """Core seconds and byte seconds."""

    cpus_given: float = 0.0
    cpus_busy: float = 0.0
    memory_given: float = 0.0
    memory_held: float = 0.0


@dataclass(slots=True, kw_only=True)
class JobRun:
    """A submitted job."""

    job: int
    spec: JobSpec
    failure_policy: FailurePolicy
    used: ResourceUse
    """Resource use of all jobs, updated in place."""
    sizes: Allocation | None = None
    """None while it waits."""
    since_sec: float = 0.0
    now_sec: float = 0.0
    progress: float = 0.0
    """Trained share of its samples."""
    unsaved: float = 0.0
    """Share that was trained since its checkpoint."""
    unsaved_sec: float = 0.0
    """Training time since its checkpoint."""
    resumes_sec: float = 0.0
    slow: float = 1.0
    """Factor of a step's time with the current straggler."""
    slow_until: float = math.inf
    losses: int = 0
    stragglers: int = 0
    loss_left: float = 0.0
    """Process seconds until the next loss."""
    slow_left: float = 0.0
    """Process seconds until the next straggler."""
    num_oom: int = 0
    most_replicas: int = 1
    measured: bool = True
    """Whether its current sizes were measured."""
    version: int = 0
    """Number of changes; events of an older version are ignored."""
    rate: float = field(default=0.0)
    """Share of its samples that it trains per second."""
    busy: tuple[float, float] = (0.0, 0.0)
    """Busy cores of one replica and one store."""

    def __post_init__(self) -> None:
        """Set the times of the first faults."""
        self.loss_left = float(self.spec.failures[0])
        self.slow_left = float(self.spec.stragglers[0])

    def advance(self, now_sec: float) -> None:
        """Advance to a time before which no event occurs."""
        elapsed, sizes = now_sec - self.now_sec, self.sizes
        active = max(0.0, now_sec - max(self.now_sec, self.resumes_sec))
        self.now_sec = now_sec
        if sizes is None or elapsed <= 0.0:
            return
        gained = min(self.rate * active, 1.0 - self.progress)
        middle = memory_share_at(self.progress + gained / 2.0)
        self.progress += gained
        self.unsaved += gained
        self.unsaved_sec += active
        if self.unsaved_sec >= CHECKPOINT_SEC:
            self.unsaved_sec %= CHECKPOINT_SEC
            self.unsaved = min(self.unsaved, self.rate * self.unsaved_sec)
        process_sec = active * sizes.num_processes
        self.loss_left -= process_sec
        if self.slow == 1.0:
            self.slow_left -= process_sec
        self._account(sizes, elapsed, active, middle)

    def _account(self, sizes: Allocation, elapsed: float, active: float, middle: float) -> None:
        busy = sizes.num_replicas * self.busy[0] + sizes.num_stores * self.busy[1]
        peak = sizes.num_replicas * self.spec.replica_bytes + self.spec.tables_bytes
        used = self.used
        used.cpus_given += elapsed * sizes.cpus
        used.cpus_busy += active * busy / self.slow
        used.memory_given += elapsed * sizes.memory_bytes
        used.memory_held += elapsed * min(sizes.memory_bytes, middle * peak)

    def place(self, sizes: Allocation | None, now_sec: float) -> None:
        """Set its sizes, or none; a start or a change pauses it."""
        if sizes == self.sizes:
            return
        before, self.sizes = self.sizes, sizes
        self.since_sec, self.measured = now_sec, False
        self.version += 1
        # It saves a checkpoint before it stops or changes.
        self.unsaved = self.unsaved_sec = 0.0
        if sizes is None:
            self.slow, self.slow_until = 1.0, math.inf
            return
        if before is None:
            self.resumes_sec = now_sec + START_SEC
        else:
            self.resumes_sec = max(self.resumes_sec, now_sec + self.failure_policy.change_sec)
        self.most_replicas = max(self.most_replicas, sizes.num_replicas)
        self._set_rate(sizes)

    def _set_rate(self, sizes: Allocation) -> None:
        table, at = self.spec.table, (sizes.num_stores, sizes.num_replicas)
        replica = self.spec.cpu_scale * float(table.replica_busy[at])
        store = self.spec.cpu_scale * float(table.store_busy[at])
        covered = min(sizes.replica_cpus / replica, sizes.store_cpus / store) / self.spec.peak
        covered = min(1.0, covered + 1e-9)
        self.busy = (covered * replica, covered * store)
        self.rate = covered * float(table.speed[at]) / self.slow / self.spec.num_samples

    def lose(self) -> None:
        """Return to the checkpoint, unless other replicas keep the steps."""
        if not self.keeps_steps:
            self.progress = max(0.0, self.progress - self.unsaved)
        self.unsaved = self.unsaved_sec = 0.0

    @property
    def keeps_steps(self) -> bool:
        """Whether the loss of a process costs no step."""
        sizes = self.sizes
        return self.failure_policy.keeps_steps and sizes is not None and sizes.num_replicas > 1

    def _pause(self, pause_sec: float) -> None:
        self.resumes_sec = max(self.resumes_sec, self.now_sec + pause_sec)

    @property
    def memory_share(self) -> float:
        """Smallest memory of a process, as a share of its peak."""
        if self.sizes is None:
            return math.inf
        spec, sizes = self.spec, self.sizes
        shares = sizes.replica_memory / spec.replica_bytes, sizes.tables_memory / spec.tables_bytes
        return min(shares) + 1e-9

    def next_event(self) -> tuple[float, EventKind]:
        """Return the time and kind of the next event, if nothing else changes."""
        assert self.sizes is not None, "the job runs"
        start = max(self.now_sec, self.resumes_sec)
        processes = self.sizes.num_processes
        full = max(0.0, progress_at_share(self.memory_share) - self.progress)
        events: list[tuple[float, EventKind]] = [
            (start + (1.0 - self.progress) / self.rate, "finish"),
            (start + full / self.rate, "oom"),
            (start + max(0.0, self.loss_left) / processes, "loss"),
        ]
        if self.slow == 1.0:
            events.append((start + max(0.0, self.slow_left) / processes, "slow"))
        else:
            events.append((max(self.now_sec, self.slow_until), "fast"))
        return min(events, key=lambda event: event[0])

    def apply_event(self, kind: EventKind) -> None:
        """Apply a fault; the cluster handles `finish` and `oom`."""
        self.version += 1
        if kind == "loss":
            self.losses += 1
            self.loss_left = float(self.spec.failures[self.losses % ACCIDENTS])
            alone = self.failure_policy.keeps_steps and not self.keeps_steps
            self._pause(ALONE_SEC if alone else self.failure_policy.recovery_sec)
            self.lose()
        elif kind == "slow":
            self._slow_down()
        elif kind == "fast":
            self.slow, self.slow_until = 1.0, math.inf
            if self.failure_policy.replaces_slow:
                self._pause(self.failure_policy.change_sec)
        assert self.sizes is not None, "the job runs"
        self._set_rate(self.sizes)

    def _slow_down(self) -> None:
        spec, number = self.spec, self.stragglers % ACCIDENTS
        self.stragglers += 1
        self.slow = float(spec.slowness[number])
        slow_sec = float(spec.slow_sec[number])
        if self.failure_policy.replaces_slow:
            slow_sec = min(slow_sec, FOUND_SEC)
        self.slow_until = self.now_sec + slow_sec
        self.slow_left = float(spec.stragglers[self.stragglers % ACCIDENTS])


@dataclass(frozen=True, slots=True)
class EndedJob:
    """The result of one job."""

    submit_sec: float
    end_sec: float
    completed: bool
    deadline_sec: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMetrics:
    """Metrics of one simulation. JCT: job completion time of finished jobs, from submission."""

    jct_mean_sec: float | None
    """Mean; None if no job finished."""
    jct_p50_sec: float | None
    jct_p95_sec: float | None
    completion_rate: float
    """Share of all jobs that finished."""
    cpu_utilisation: float
    """Busy over reserved core seconds."""
    memory_utilisation: float
    """Resident over reserved byte seconds."""
    deadline_miss_rate: float | None
    """Share of jobs with a deadline that missed it or failed; None if no job has one."""


def outcome_of(ended: Sequence[EndedJob], used: ResourceUse) -> PolicyMetrics:
    """Return the metrics of one simulation."""
    times = np.array([job.end_sec - job.submit_sec for job in ended if job.completed])
    dated = [job for job in ended if job.deadline_sec is not None]
    late = [
        not job.completed or job.end_sec - job.submit_sec > (job.deadline_sec or 0.0)
        for job in dated
    ]
    any_finished = len(times) > 0
    return PolicyMetrics(
        jct_mean_sec=float(times.mean()) if any_finished else None,
        jct_p50_sec=float(np.median(times)) if any_finished else None,
        jct_p95_sec=float(np.quantile(times, 0.95)) if any_finished else None,
        completion_rate=len(times) / len(ended),
        cpu_utilisation=used.cpus_busy / max(used.cpus_given, 1e-12),
        memory_utilisation=used.memory_held / max(used.memory_given, 1e-12),
        deadline_miss_rate=sum(late) / len(dated) if dated else None,
    )


ROUND_SEC = 60.0
"""Minimum time between two decisions."""
MEASURE_SEC = 60.0
"""Training time with new sizes after which they are measured."""
NOISE = 0.05
"""Standard deviation of the log error of measured steps and cores."""
MEMORY_NOISE = 0.01
"""Standard deviation of the log error of a memory reading."""
NUM_READINGS = 128
"""Memory readings of a job, evenly over its trained part."""
STEPS = 1000
"""Resolution of memory readings."""
TOUCHED_SHARE = np.array([memory_share_at(step / STEPS) for step in range(STEPS + 1)])

_SUBMIT, _ROUND = -1, -2


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one simulation."""

    ended: tuple[EndedJob, ...]
    used: ResourceUse


class SimulatedCluster:
    """A cluster on which a policy places jobs."""

    def __init__(self, specs: Sequence[JobSpec], policy: Policy, capacity: Capacity) -> None:
        self.policy, self.capacity, self.specs = policy, capacity, specs
        self.used = ResourceUse()
        self.active: dict[int, JobRun] = {}
        self.ended: dict[int, EndedJob] = {}
        self.tables: dict[str, Table] = {spec.table.kind: spec.table for spec in specs}
        self.allowed = {kind: table.allowed for kind, table in self.tables.items()}
        self.batches = {kind: table.batch_samples for kind, table in self.tables.items()}
        self.events: list[tuple[float, int, int, int, EventKind | None]] = []
        self.count = 0
        self.next_round = math.inf

    def simulate(self) -> Result:
        """Run until every job has ended.

        Raises:
            AssertionError: the policy exceeded the capacity.
        """
        for job, spec in enumerate(self.specs):
            self._push(spec.submit_sec, _SUBMIT, job, None)
        while self.events:
            now, _, version, job, kind = heapq.heappop(self.events)
            if version == _SUBMIT:
                self._submit(job, now)
            elif version == _ROUND:
                self._round(now)
            elif job in self.active and self.active[job].version == version:
                self._apply_event(self.active[job], kind, now)
        assert not self.active, f"{self.policy.name} left {len(self.active)} jobs"
        ended = tuple(self.ended[job] for job in range(len(self.specs)))
        return Result(ended, self.used)

    def _push(self, at: float, version: int, job: int, kind: EventKind | None) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, version, job, kind))

    def _submit(self, job: int, now: float) -> None:
        run = JobRun(
            job=job,
            spec=self.specs[job],
            failure_policy=self.policy.failure_policy,
            used=self.used,
            now_sec=now,
        )
        self.active[job] = run
        self._schedule_round(now)

    def _schedule_round(self, now: float) -> None:
        self._round_at(ROUND_SEC * math.ceil((now + 1e-6) / ROUND_SEC))

    def _round_at(self, at: float) -> None:
        if at < self.next_round:
            self.next_round = at
            self._push(at, _ROUND, 0, None)

    def _apply_event(self, run: JobRun, kind: EventKind | None, now: float) -> None:
        assert kind is not None, "an event of a job has a kind"
        run.advance(now)
        if kind == "finish":
            self._end(run, now, completed=True)
        elif kind == "oom":
            run.num_oom += 1
            run.lose()
            run.place(None, now)
            if run.num_oom >= MAX_OOM:
                self._end(run, now, completed=False)
            self._schedule_round(now)
        else:
            run.apply_event(kind)
            self._push_next_event(run)

    def _end(self, run: JobRun, now: float, *, completed: bool) -> None:
        self.ended[run.job] = EndedJob(run.spec.submit_sec, now, completed, run.spec.deadline_sec)
        del self.active[run.job]
        self._schedule_round(now)

    def _push_next_event(self, run: JobRun) -> None:
        at, kind = run.next_event()
        self._push(at, run.version, run.job, kind)

    def _round(self, now: float) -> None:
        if now < self.next_round:
            return  # replaced by an earlier one
        self.next_round = math.inf
        if not self.active:
            return
        for run in self.active.values():
            run.advance(now)
        self._apply(self.policy.decide(self._snapshot(now)), now)
        self._round_at(now + max(ROUND_SEC, self.policy.interval_sec))

    def _apply(self, decided: Mapping[int, Allocation], now: float) -> None:
        self._check(decided)
        for run in self.active.values():
            sizes = decided.get(run.job)
            if sizes == run.sizes:
                continue
            run.place(sizes, now)
            if sizes is not None:
                self._push_next_event(run)
        if all(run.sizes is None for run in self.active.values()):
            # The cluster is empty, so none of them will ever fit.
            for run in list(self.active.values()):
                self._end(run, now, completed=False)

    def _check(self, decided: Mapping[int, Allocation]) -> None:
        cpus = sum(sizes.cpus for sizes in decided.values()) / self.capacity.cpus
        memory = sum(sizes.memory_bytes for sizes in decided.values()) / self.capacity.memory_bytes
        name = self.policy.name
        assert max(cpus, memory) <= 1.0 + 1e-6, (
            f"{name} exceeds the capacity: {cpus:.4f}, {memory:.4f}"
        )
        assert decided.keys() <= self.active.keys(), f"{name} places jobs that do not exist"

    def _snapshot(self, now: float) -> ClusterView:
        return ClusterView(
            now,
            self.capacity,
            tuple(self._view(run) for run in self.active.values()),
            tuple(self._measure(run) for run in self.active.values() if _is_measurable(run, now)),
            self.allowed,
            self.batches,
            self._readings,
        )

    def _view(self, run: JobRun) -> SimulatedJob:
        spec = run.spec
        return SimulatedJob(
            run.job,
            spec.table.kind,
            spec.priority,
            spec.request,
            run.sizes,
            run.since_sec,
            (1.0 - run.progress) * spec.num_samples,
            run.progress,
            run.num_oom,
            run.most_replicas,
        )

    def _measure(self, run: JobRun) -> Measurement:
        assert run.sizes is not None, "the job runs"
        run.measured = True
        errors = np.exp(NOISE * np.roll(run.spec.noise, run.version)[:3])
        table, sizes = run.spec.table, run.sizes
        step_sec = table.batch_samples / (run.rate * run.spec.num_samples)
        return Measurement(
            run.job,
            table.kind,
            sizes.num_replicas,
            sizes.num_stores,
            step_sec * float(errors[0]),
            run.busy[0] / run.slow * float(errors[1]),
            run.busy[1] / run.slow * float(errors[2]),
        )

    def _readings(self, job: int) -> Readings:
        run = self.active[job]
        steps = np.unique(np.linspace(0, int(run.progress * STEPS), NUM_READINGS).astype(int))
        errors = np.exp(MEMORY_NOISE * run.spec.noise[np.arange(len(steps)) % ACCIDENTS])
        spec = run.spec
        resident = spec.replica_bytes * TOUCHED_SHARE[steps] * errors
        return Readings(
            steps.astype(np.float64),
            resident,
            TOUCHED_SHARE,
            spec.tables_bytes / spec.replica_bytes,
        )


def _is_measurable(run: JobRun, now: float) -> bool:
    return not run.measured and run.sizes is not None and now - run.resumes_sec >= MEASURE_SEC
