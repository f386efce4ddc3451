"""What our policy thinks of each job: its cores and its memory, from measurements alone.

What a usual job of its kind keeps busy is `kinds`'; a job that was measured scales that to its
own, with the headroom that bursts of the kind need, and gets no more than its user asked for
unless it was seen to lack cores. Memory is what `forecast` says, which knows the rows touched
at every later step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.cores import Headroom, Reading, headroom_of
from scheduler.correction import HEADROOM, MemoryWatch, after_oom, is_urgent
from scheduler.model import Floats
from scheduler.pools import Both, Cores, Given, Place, bursts, fitted, heard
from scheduler.simulator.kinds import MIN_ROWS, Kind, fit_ours, kind_of
from scheduler.simulator.knowledge import Knowledge
from scheduler.simulator.parts import Parts
from scheduler.simulator.views import JobView, Measured, Readings, Sizes, Snapshot
from scheduler.trend import forecast

LOOKS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Progress at which memory is foreseen; it lasts at least until the next of them."""
MAX_GROUPS = 64
"""Jobs of a kind that tell of its bursts, the first ones: a kind does not age."""
MOVED = 1.02
"""Headroom of a kind over that before, or before over it, from which plans are made anew."""


@dataclass(slots=True)
class Needs:
    """What is known of one job.

    Attributes:
        version: counts what was learned.
        cores: what was measured of them.
        memory: bytes of one replica, and of all stores, that it is to get; None for its request.
        looks: how many of LOOKS were made.
        oom: times it ran out of memory, that were answered.
        given: cores that it is to get, with the version and the headroom that they are made from.
    """

    version: int = 0
    cores: Cores = field(default_factory=Cores)
    memory: tuple[float, float] | None = None
    looks: int = 0
    oom: int = 0
    given: tuple[int, Headroom, Given | None] | None = None


class Estimates:
    """Kinds and jobs, as measurements come in."""

    def __init__(self, parts: Parts) -> None:
        """Begin with nothing.

        Args:
            parts: what is on.
        """
        self.parts = parts
        self.knowledge = Knowledge(fit_ours)
        self.kinds: dict[str, Kind] = {}
        self.needs: dict[int, Needs] = {}
        self.bursts: dict[str, dict[tuple[int, Place], list[Reading]]] = {}
        self.headrooms: dict[str, Headroom] = {}
        self.updates: dict[str, int] = {}

    def take_in(self, snapshot: Snapshot) -> None:
        """Learn from all that was measured since the last decision."""
        self.needs = {view.job: self.needs.get(view.job) or Needs() for view in snapshot.jobs}
        views = {view.job: view for view in snapshot.jobs}
        for measured in snapshot.measured:
            self._measured(measured, views[measured.job])
        doubted = {measured.job for measured in snapshot.measured if self._doubts(measured)}
        self.knowledge.take_in(snapshot, doubted)
        for kind, version in self.knowledge.versions.items():
            latest = version + self.updates.get(kind, 0)
            if kind not in self.kinds or self.kinds[kind].version != latest:
                self.kinds[kind] = kind_of(
                    latest,
                    self.knowledge.seconds[kind],
                    snapshot.allowed[kind],
                    self.knowledge.cores(kind, MIN_ROWS),
                    self._headroom(kind),
                )
        for view in snapshot.jobs:
            self._memory(view, snapshot)

    def _measured(self, measured: Measured, view: JobView) -> None:
        needs = self.needs[measured.job]
        needs.version += 1
        at = measured.num_replicas, measured.num_stores
        needs.cores = heard(needs.cores, at, readings_of(measured, view.current or view.request))
        told = self.bursts.setdefault(measured.kind, {})
        found = bursts(needs.cores.here())
        if found and self.parts.fit_cores and self.parts.kin and len(told) < MAX_GROUPS:
            told[measured.job, needs.cores.at] = found
            self._burst(measured.kind)

    def _burst(self, kind: str) -> None:
        """Take over the headroom of a kind, where it is another one."""
        before, after = self._headroom(kind), headroom_of(list(self.bursts[kind].values()))
        changes = after.give / before.give, after.doubted / before.doubted
        if after.known > before.known or max(changes) > MOVED or min(changes) < 1.0 / MOVED:
            self.headrooms[kind] = after
            self.updates[kind] = self.updates.get(kind, 0) + 1

    def _headroom(self, kind: str) -> Headroom:
        return self.headrooms.get(kind, Headroom())

    def _doubts(self, measured: Measured) -> bool:
        """Tell whether a job was slowed down by its cores, or may have been."""
        given = self.fitted(measured.job, measured.kind)
        return given is not None and (given.trying or given.slower)

    def fitted(self, job: int, kind: str) -> Given | None:
        """Return what a job is to get where it was measured last; None before that."""
        if not self.parts.fit_cores:
            return None
        needs, headroom = self.needs[job], self._headroom(kind)
        if needs.given is None or needs.given[:2] != (needs.version, headroom):
            needs.given = needs.version, headroom, fitted(needs.cores, headroom)
        return needs.given[2]

    def cores(self, view: JobView, kind: Kind) -> tuple[Floats, Floats]:
        """Return the cores to give one replica and one store at each trusted size.

        A job that was measured gets what it was seen to need; any other one what MOST jobs of
        its kind do, once enough is known of their bursts; and both never more in proportion
        than their user asked for, unless the job was seen to lack cores, or is given more to see.
        """
        request, known = view.request, self.needs[view.job].cores
        asked = request.replica_cpus, request.store_cpus
        if not self.parts.kin:
            own = self.fitted(view.job, view.kind)
            replica, store = asked if own is None else own.cpus
            count = len(kind.replica_busy)
            return np.full(count, replica), np.full(count, store)
        units = asked if kind.relative else (1.0, 1.0)
        usual = units[0] * kind.replica_busy, units[1] * kind.store_busy
        given, at = self.fitted(view.job, view.kind), kind.place(*known.at)
        unknown = given is None and not kind.headroom.known
        if not self.parts.fit_cores or unknown or not np.isfinite(usual[0]).all():
            return np.full(len(usual[0]), asked[0]), np.full(len(usual[1]), asked[1])
        give = kind.headroom.give
        own = give * kind.most[0], give * kind.most[1]
        if given is not None and at is not None:
            own = given.cpus[0] / usual[0][at], given.cpus[1] / usual[1][at]
        limit = kind.place(request.num_replicas, request.num_stores)
        capped = limit is not None and (given is None or not (given.trying or given.limited))
        found: list[Floats] = []
        for part, scale, cpus in zip(usual, own, asked, strict=True):
            wanted = scale * part
            found.append(np.minimum(wanted, cpus * part / part[limit]) if capped else wanted)
        return found[0], found[1]

    def memory(self, view: JobView) -> tuple[float, float]:
        """Return the bytes to give one replica, and all stores together."""
        known = self.needs[view.job].memory
        request = view.request
        return (request.replica_memory, request.tables_memory) if known is None else known

    def _memory(self, view: JobView, snapshot: Snapshot) -> None:
        """Foresee the memory of a job, each time that it has come to the next of LOOKS."""
        needs = self.needs[view.job]
        killed = view.num_oom > needs.oom
        if not killed and (view.current is None or needs.looks == len(LOOKS)):
            return
        passed = sum(view.progress >= look for look in LOOKS)
        if not killed and passed <= needs.looks:
            return
        needs.looks, needs.oom = max(passed, needs.looks), view.num_oom
        given = self.memory(view)
        readings = snapshot.readings(view.job)
        wanted = _foreseen(readings, given[0], passed, give_back=self.parts.give_back)
        if killed and self.parts.grow_after_oom:
            wanted = max(wanted or 0.0, after_oom(given[0], 0.0, np.inf))
        if wanted is not None:
            needs.memory = wanted, wanted * readings.tables_share
            needs.version += 1

    def sample(self, view: JobView, allowed: np.ndarray) -> Sizes | None:
        """Return the sizes at which a job is to be measured; None where it need not be."""
        return self.knowledge.sample(view, allowed) if self.parts.sample else None

    def request_sizes(self, view: JobView, allowed: np.ndarray) -> Sizes:
        """Return what the user asked for, or sizes to be measured, with the memory foreseen."""
        memory = self.memory(view)
        sampled = self.sample(view, allowed) if view.current is None else view.current
        return replace(sampled or view.request, replica_memory=memory[0], tables_memory=memory[1])


def readings_of(measured: Measured, given: Sizes) -> Both:
    """Return what was measured of a job's pools.

    Args:
        measured: the measurement.
        given: what the job had.
    """
    return (
        Reading(given.replica_cpus, measured.replica_busy, measured.step_sec),
        Reading(given.store_cpus, measured.store_busy, measured.step_sec),
    )


def _foreseen(readings: Readings, given: float, passed: int, *, give_back: bool) -> float | None:
    """Return the bytes that a replica is to get, None to leave it as it is."""
    seen = forecast(
        readings.steps, readings.replica_bytes, end_step=1000, limit_bytes=int(given),
        load=readings.load,
    )  # fmt: skip
    if not seen.confident:
        return None
    wanted = HEADROOM * seen.needed_bytes
    if give_back:
        return wanted
    now = int(readings.steps[-1])
    later = [int(1000 * look) for look in LOOKS[passed:]] or [1000]
    watch = MemoryWatch(
        pool="training",
        forecast=seen,
        now_step=now,
        lead_steps=later[0] - now,
        limit_bytes=int(given),
        room_bytes=int(given),
    )
    return wanted if is_urgent(watch) and wanted > given else None
