"""Jobs of one trace under one policy, event by event.

A job that a policy does not place though nothing else runs will never fit: it has failed.
Jobs that wait are looked at each ROUND_SEC when something came or went, and those that
run at the policy's interval too. What a policy wants is checked: never more than there is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.simulator.draw import ACCIDENTS, JobSpec
from scheduler.simulator.outcome import Ended
from scheduler.simulator.run import MAX_OOM, Happening, Run, Used, filled
from scheduler.simulator.tables import Table
from scheduler.simulator.views import (
    Capacity,
    JobView,
    Measured,
    Policy,
    Readings,
    Sizes,
    Snapshot,
)

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
