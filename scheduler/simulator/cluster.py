"""Simulate the jobs of one trace under one policy, event by event."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from scheduler.simulator.jobs import ACCIDENTS, JobSpec, Table
from scheduler.simulator.views import (
    Capacity,
    Handling,
    JobView,
    Measured,
    Policy,
    Readings,
    Sizes,
    Snapshot,
)

# One job as it goes on: what it has trained, what it holds, and what happens to it next.
#
# Training advances at a constant rate between events. With sizes of speed v (of its table), cores
# that hold c of what the busier process needs, and a straggler of factor f,
#
#     rate = v min(1, c) / f / samples of the job
#
# while no pause is on. Memory of each process grows with the rows that were touched: share(p) =
# EMPTY + (1 - EMPTY) (1 - exp(-FILLING p)) / (1 - exp(-FILLING)) of its peak.

EMPTY = 0.5
"""Share of the peak that a process holds at its first step."""
FILLING = 3.0
"""How fast tables fill: 95 % of the rest within the job."""
START_SEC = 30.0
"""From being placed to the first step, under any policy."""
CHECKPOINT_SEC = 1800.0
"""Training between checkpoints."""
ALONE_SEC = 47.0
"""Pause after a job of one replica lost a process, under a policy that keeps the steps of others:
it goes on from its checkpoint (the slower of two runs, `benchmarks/recovery.md`)."""
FOUND_SEC = 120.0
"""Until a straggler is found by a policy that looks for them."""
MAX_OOM = 3
"""A job that ran out of memory so often has failed."""

Happening = Literal["finish", "oom", "loss", "slow", "fast"]


def filled(progress: float) -> float:
    """Return the share of its peak that a process holds.

    Example:
        >>> filled(0.0), filled(1.0), round(filled(0.5), 3)
        (0.5, 1.0, 0.909)
    """
    return EMPTY + (1.0 - EMPTY) * math.expm1(-FILLING * progress) / math.expm1(-FILLING)


def progress_of(share: float) -> float:
    """Return when a process holds this share of its peak; the inverse of `filled`.

    Example:
        >>> round(progress_of(filled(0.3)), 9), progress_of(0.4), progress_of(1.0)
        (0.3, 0.0, inf)
    """
    if share >= 1.0:
        return math.inf
    part = max(0.0, share - EMPTY) / (1.0 - EMPTY)
    return -math.log1p(part * math.expm1(-FILLING)) / FILLING


@dataclass(slots=True, kw_only=True)
class Used:
    """Products of resources and seconds."""

    cpus_given: float = 0.0
    """Cores."""
    cpus_busy: float = 0.0
    """Cores that did something."""
    memory_given: float = 0.0
    """Bytes."""
    memory_held: float = 0.0
    """Bytes that were resident."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A job that was submitted."""

    job: int
    """Its number."""
    spec: JobSpec
    """What is true of it."""
    handling: Handling
    """Of the policy."""
    used: Used
    """Of all jobs together, added to."""
    sizes: Sizes | None = None
    """What it has; None while it waits."""
    since_sec: float = 0.0
    """When it got that."""
    now_sec: float = 0.0
    """Up to when it was advanced."""
    done: float = 0.0
    """Share of its samples that is trained."""
    unsaved: float = 0.0
    """Share that is trained since its checkpoint."""
    unsaved_sec: float = 0.0
    """How long that took."""
    resumes_sec: float = 0.0
    """End of its pause."""
    slow: float = 1.0
    """By what a step takes longer."""
    slow_until: float = math.inf
    """When that ends."""
    losses: int = 0
    """Processes that it lost."""
    stragglers: int = 0
    """Stragglers that it had."""
    loss_left: float = 0.0
    """Process seconds until the next loss."""
    slow_left: float = 0.0
    """Process seconds until the next straggler."""
    num_oom: int = 0
    """Times that it ran out of memory."""
    most_replicas: int = 1
    """Most replicas that it had."""
    measured: bool = True
    """Whether its sizes were measured since they changed."""
    version: int = 0
    """Counts changes: an event of an older version no longer happens."""
    rate: float = field(default=0.0)
    """Share of its samples that is trained in a second."""
    busy: tuple[float, float] = (0.0, 0.0)
    """Cores that one replica and one store keep busy."""

    def __post_init__(self) -> None:
        """Draw the first accidents."""
        self.loss_left = float(self.spec.failures[0])
        self.slow_left = float(self.spec.stragglers[0])

    def advance(self, now_sec: float) -> None:
        """Go on to a time at which nothing happened before."""
        held, sizes = now_sec - self.now_sec, self.sizes
        active = max(0.0, now_sec - max(self.now_sec, self.resumes_sec))
        self.now_sec = now_sec
        if sizes is None or held <= 0.0:
            return
        gained = min(self.rate * active, 1.0 - self.done)
        middle = filled(self.done + gained / 2.0)
        self.done += gained
        self.unsaved += gained
        self.unsaved_sec += active
        if self.unsaved_sec >= CHECKPOINT_SEC:
            self.unsaved_sec %= CHECKPOINT_SEC
            self.unsaved = min(self.unsaved, self.rate * self.unsaved_sec)
        process_sec = active * sizes.num_processes
        self.loss_left -= process_sec
        if self.slow == 1.0:
            self.slow_left -= process_sec
        self._account(sizes, held, active, middle)

    def _account(self, sizes: Sizes, held: float, active: float, middle: float) -> None:
        busy = sizes.num_replicas * self.busy[0] + sizes.num_stores * self.busy[1]
        peak = sizes.num_replicas * self.spec.replica_bytes + self.spec.tables_bytes
        used = self.used
        used.cpus_given += held * sizes.cpus
        used.cpus_busy += active * busy / self.slow
        used.memory_given += held * sizes.memory_bytes
        used.memory_held += held * min(sizes.memory_bytes, middle * peak)

    def place(self, sizes: Sizes | None, now_sec: float) -> None:
        """Give it sizes, or none; the first ones, and each change of them, pause it."""
        if sizes == self.sizes:
            return
        before, self.sizes = self.sizes, sizes
        self.since_sec, self.measured = now_sec, False
        self.version += 1
        # It is asked to leave, or to change: it saves.
        self.unsaved = self.unsaved_sec = 0.0
        if sizes is None:
            self.slow, self.slow_until = 1.0, math.inf
            return
        if before is None:
            self.resumes_sec = now_sec + START_SEC
        else:
            self.resumes_sec = max(self.resumes_sec, now_sec + self.handling.change_sec)
        self.most_replicas = max(self.most_replicas, sizes.num_replicas)
        self._set_rate(sizes)

    def _set_rate(self, sizes: Sizes) -> None:
        table, at = self.spec.table, (sizes.num_stores, sizes.num_replicas)
        needs = float(table.replica_busy[at]), float(table.store_busy[at])
        needs = tuple(self.spec.cpu_scale * need for need in needs)
        kept = min(sizes.replica_cpus / needs[0], sizes.store_cpus / needs[1]) / self.spec.peak
        kept = min(1.0, kept + 1e-9)
        self.busy = (kept * needs[0], kept * needs[1])
        self.rate = kept * float(table.speed[at]) / self.slow / self.spec.num_samples

    def lose(self) -> None:
        """Go back to the checkpoint, where no other replica keeps the steps."""
        if not self.keeps_steps:
            self.done = max(0.0, self.done - self.unsaved)
        self.unsaved = self.unsaved_sec = 0.0

    @property
    def keeps_steps(self) -> bool:
        """Return whether a lost process costs no step: others hold what it trained."""
        sizes = self.sizes
        return self.handling.keeps_steps and sizes is not None and sizes.num_replicas > 1

    def _pause(self, pause_sec: float) -> None:
        self.resumes_sec = max(self.resumes_sec, self.now_sec + pause_sec)

    @property
    def memory_share(self) -> float:
        """Return the memory of the process that has the least, as a share of its peak."""
        if self.sizes is None:
            return math.inf
        spec, sizes = self.spec, self.sizes
        shares = sizes.replica_memory / spec.replica_bytes, sizes.tables_memory / spec.tables_bytes
        return min(shares) + 1e-9

    def next(self) -> tuple[float, Happening]:
        """Return what happens next if nothing else does, and when."""
        assert self.sizes is not None, "what waits does not go on"
        start = max(self.now_sec, self.resumes_sec)
        processes = self.sizes.num_processes
        full = max(0.0, progress_of(self.memory_share) - self.done)
        found: list[tuple[float, Happening]] = [
            (start + (1.0 - self.done) / self.rate, "finish"),
            (start + full / self.rate, "oom"),
            (start + max(0.0, self.loss_left) / processes, "loss"),
        ]
        if self.slow == 1.0:
            found.append((start + max(0.0, self.slow_left) / processes, "slow"))
        else:
            found.append((max(self.now_sec, self.slow_until), "fast"))
        return min(found, key=lambda event: event[0])

    def happen(self, what: Happening) -> None:
        """Change as an accident changes it; `finish` and `oom` are the cluster's to handle."""
        self.version += 1
        if what == "loss":
            self.losses += 1
            self.loss_left = float(self.spec.failures[self.losses % ACCIDENTS])
            alone = self.handling.keeps_steps and not self.keeps_steps
            self._pause(ALONE_SEC if alone else self.handling.recovery_sec)
            self.lose()
        elif what == "slow":
            self._slow_down()
        elif what == "fast":
            self.slow, self.slow_until = 1.0, math.inf
            if self.handling.replaces_slow:
                self._pause(self.handling.change_sec)
        assert self.sizes is not None, "what waits has no accident"
        self._set_rate(self.sizes)

    def _slow_down(self) -> None:
        spec, number = self.spec, self.stragglers % ACCIDENTS
        self.stragglers += 1
        self.slow = float(spec.slowness[number])
        slow_sec = float(spec.slow_sec[number])
        if self.handling.replaces_slow:
            slow_sec = min(slow_sec, FOUND_SEC)
        self.slow_until = self.now_sec + slow_sec
        self.slow_left = float(spec.stragglers[self.stragglers % ACCIDENTS])


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one job.

    Attributes:
        submit_sec: when it came.
        end_sec: when it was finished, or given up.
        completed: whether it was finished.
        deadline_sec: wanted seconds between the two, None for any.
    """

    submit_sec: float
    end_sec: float
    completed: bool
    deadline_sec: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of all jobs. JCT: seconds from submission to end, of jobs that were finished."""

    jct_mean_sec: float | None
    """Mean; None when no job was finished."""
    jct_p50_sec: float | None
    """Median."""
    jct_p95_sec: float | None
    """19 of 20 took no longer."""
    completion_rate: float
    """Share of all jobs that were finished."""
    cpu_utilisation: float
    """Busy core seconds over those that jobs held."""
    memory_utilisation: float
    """Resident byte seconds over those that jobs held."""
    deadline_miss_rate: float | None
    """Share of jobs with a deadline that missed it or were not finished; None where no job has."""


def outcome_of(ended: Sequence[Ended], used: Used) -> Outcome:
    """Return the numbers of one simulation."""
    times = np.array([job.end_sec - job.submit_sec for job in ended if job.completed])
    dated = [job for job in ended if job.deadline_sec is not None]
    late = [
        not job.completed or job.end_sec - job.submit_sec > (job.deadline_sec or 0.0)
        for job in dated
    ]
    known = len(times) > 0
    return Outcome(
        jct_mean_sec=float(times.mean()) if known else None,
        jct_p50_sec=float(np.median(times)) if known else None,
        jct_p95_sec=float(np.quantile(times, 0.95)) if known else None,
        completion_rate=len(times) / len(ended),
        cpu_utilisation=used.cpus_busy / max(used.cpus_given, 1e-12),
        memory_utilisation=used.memory_held / max(used.memory_given, 1e-12),
        deadline_miss_rate=sum(late) / len(dated) if dated else None,
    )


# Jobs of one trace under one policy, event by event.
#
# A job that a policy does not place though nothing else runs will never fit: it has failed. Jobs
# that wait are looked at each ROUND_SEC when something came or went, and those that run at the
# policy's interval too. What a policy wants is checked: never more than there is.

ROUND_SEC = 60.0
"""Seconds between two decisions, at least."""
MEASURE_SEC = 60.0
"""Seconds of training at its sizes after which a job's step and cores are known."""
NOISE = 0.05
"""Log error of a measured step, and of measured cores."""
MEMORY_NOISE = 0.01
"""Log error of a memory reading."""
NUM_READINGS = 128
"""Readings of memory that a policy gets, evenly over what a job has trained."""
STEPS = 1000
"""Parts of a job in which memory is read."""
_LOAD = np.array([filled(step / STEPS) for step in range(STEPS + 1)])

_SUBMIT, _ROUND = -1, -2


@dataclass(frozen=True, slots=True)
class Result:
    """What became of all jobs.

    Attributes:
        ended: one entry per job, by its number.
        used: resources times seconds.
        num_rounds: decisions of the policy.
        num_changes: changes of jobs that ran.
        peak: most cores and bytes at once, as shares of the capacity.
    """

    ended: tuple[Ended, ...]
    used: Used
    num_rounds: int
    num_changes: int
    peak: tuple[float, float]


class Cluster:
    """A cluster on which a policy places jobs."""

    def __init__(self, specs: Sequence[JobSpec], policy: Policy, capacity: Capacity) -> None:
        """Store what is to be simulated.

        Args:
            specs: jobs by time of submission.
            policy: decides.
            capacity: what they share.
        """
        self.policy, self.capacity, self.specs = policy, capacity, specs
        self.used = Used()
        self.active: dict[int, Run] = {}
        self.ended: dict[int, Ended] = {}
        self.tables: dict[str, Table] = {spec.table.kind: spec.table for spec in specs}
        self.allowed = {kind: table.allowed for kind, table in self.tables.items()}
        self.batches = {kind: table.batch_samples for kind, table in self.tables.items()}
        self.events: list[tuple[float, int, int, int, Happening | None]] = []
        self.count = self.num_rounds = self.num_changes = 0
        self.next_round = math.inf
        self.peak = (0.0, 0.0)

    def simulate(self) -> Result:
        """Run until every job has ended.

        Raises:
            AssertionError: the policy gave more than there is.
        """
        for job, spec in enumerate(self.specs):
            self._push(spec.submit_sec, _SUBMIT, job, None)
        while self.events:
            now, _, kind, job, what = heapq.heappop(self.events)
            if kind == _SUBMIT:
                self._submit(job, now)
            elif kind == _ROUND:
                self._round(now)
            elif job in self.active and self.active[job].version == kind:
                self._happen(self.active[job], what, now)
        assert not self.active, f"{self.policy.name} must run every job, left {len(self.active)}"
        ended = tuple(self.ended[job] for job in range(len(self.specs)))
        return Result(ended, self.used, self.num_rounds, self.num_changes, self.peak)

    def _push(self, at: float, kind: int, job: int, what: Happening | None) -> None:
        self.count += 1
        heapq.heappush(self.events, (at, self.count, kind, job, what))

    def _submit(self, job: int, now: float) -> None:
        run = Run(
            job=job,
            spec=self.specs[job],
            handling=self.policy.handling,
            used=self.used,
            now_sec=now,
        )
        self.active[job] = run
        self._soon(now)

    def _soon(self, now: float) -> None:
        """Decide at the next round; rounds lie on a grid of ROUND_SEC."""
        self._round_at(ROUND_SEC * math.ceil((now + 1e-6) / ROUND_SEC))

    def _round_at(self, at: float) -> None:
        if at < self.next_round:
            self.next_round = at
            self._push(at, _ROUND, 0, None)

    def _happen(self, run: Run, what: Happening | None, now: float) -> None:
        assert what is not None, "an accident has a name"
        run.advance(now)
        if what == "finish":
            self._end(run, now, completed=True)
        elif what == "oom":
            run.num_oom += 1
            run.lose()
            run.place(None, now)
            if run.num_oom >= MAX_OOM:
                self._end(run, now, completed=False)
            self._soon(now)
        else:
            run.happen(what)
            self._expect(run)

    def _end(self, run: Run, now: float, *, completed: bool) -> None:
        self.ended[run.job] = Ended(run.spec.submit_sec, now, completed, run.spec.deadline_sec)
        del self.active[run.job]
        self._soon(now)

    def _expect(self, run: Run) -> None:
        at, what = run.next()
        self._push(at, run.version, run.job, what)

    def _round(self, now: float) -> None:
        if now < self.next_round:
            return  # an earlier one took its place
        self.next_round = math.inf
        if not self.active:
            return
        for run in self.active.values():
            run.advance(now)
        self.num_rounds += 1
        self._apply(self.policy.decide(self._snapshot(now)), now)
        self._round_at(now + max(ROUND_SEC, self.policy.interval_sec))

    def _apply(self, wanted: Mapping[int, Sizes], now: float) -> None:
        self._check(wanted)
        for run in self.active.values():
            sizes = wanted.get(run.job)
            if sizes == run.sizes:
                continue
            self.num_changes += run.sizes is not None
            run.place(sizes, now)
            if sizes is not None:
                self._expect(run)
        if all(run.sizes is None for run in self.active.values()):
            # The policy had the whole cluster, so none of them will ever fit.
            for run in list(self.active.values()):
                self._end(run, now, completed=False)

    def _check(self, wanted: Mapping[int, Sizes]) -> None:
        cpus = sum(sizes.cpus for sizes in wanted.values()) / self.capacity.cpus
        memory = sum(sizes.memory_bytes for sizes in wanted.values()) / self.capacity.memory_bytes
        self.peak = max(self.peak[0], cpus), max(self.peak[1], memory)
        name = self.policy.name
        assert max(cpus, memory) <= 1.0 + 1e-6, f"{name} must fit, took {cpus:.4f}, {memory:.4f}"
        assert wanted.keys() <= self.active.keys(), f"{name} must place jobs that are there"

    def _snapshot(self, now: float) -> Snapshot:
        return Snapshot(
            now,
            self.capacity,
            tuple(self._view(run) for run in self.active.values()),
            tuple(self._measure(run) for run in self.active.values() if _ripe(run, now)),
            self.allowed,
            self.batches,
            self._readings,
        )

    def _view(self, run: Run) -> JobView:
        spec = run.spec
        return JobView(
            run.job,
            spec.table.kind,
            spec.priority,
            spec.request,
            run.sizes,
            run.since_sec,
            (1.0 - run.done) * spec.num_samples,
            run.done,
            run.num_oom,
            run.most_replicas,
        )

    def _measure(self, run: Run) -> Measured:
        """Return the measurement of sizes that were held long enough, once for each change."""
        assert run.sizes is not None, "what waits has no speed"
        run.measured = True
        errors = np.exp(NOISE * np.roll(run.spec.noise, run.version)[:3])
        table, sizes = run.spec.table, run.sizes
        step_sec = table.batch_samples / (run.rate * run.spec.num_samples)
        return Measured(
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
        steps = np.unique(np.linspace(0, int(run.done * STEPS), NUM_READINGS).astype(int))
        errors = np.exp(MEMORY_NOISE * run.spec.noise[np.arange(len(steps)) % ACCIDENTS])
        spec = run.spec
        resident = spec.replica_bytes * _LOAD[steps] * errors
        return Readings(
            steps.astype(np.float64), resident, _LOAD, spec.tables_bytes / spec.replica_bytes
        )


def _ripe(run: Run, now: float) -> bool:
    return not run.measured and run.sizes is not None and now - run.resumes_sec >= MEASURE_SEC
