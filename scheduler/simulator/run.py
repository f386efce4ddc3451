"""One job as it goes on: what it has trained, what it holds, and what happens to it next.

Training advances at a constant rate between events. With sizes of speed v (of its table),
cores that hold c of what the busier process needs, and a straggler of factor f,

    rate = v min(1, c) / f / samples of the job

while no pause is on. Memory of each process grows with the rows that were touched:
share(p) = EMPTY + (1 - EMPTY) (1 - exp(-FILLING p)) / (1 - exp(-FILLING)) of its peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from scheduler.simulator.draw import ACCIDENTS, JobSpec
from scheduler.simulator.views import Handling, Sizes

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
