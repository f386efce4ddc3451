"""What our policy thinks of kinds and of jobs: steps, cores and memory, from measurements alone.

Seconds of a step are those of `fit` and `predict_seconds`, only where their interval is
narrow enough to act upon. Cores that a process keeps busy follow what it computes,

    busy = a + b v / n                          v samples a second, n processes of its pool

fitted to all jobs of the kind, or, where those differ less so, to what they are of the cores
that were asked for; a job that was measured scales them to its own, and gets no more than
its user asked for unless it was seen to lack cores. Memory is
what `forecast` says, which knows the rows touched at every later step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import nnls

from scheduler.cells import Window
from scheduler.cores import Headroom, Reading, headroom_of
from scheduler.correction import HEADROOM, MemoryWatch, is_urgent
from scheduler.fit import fit_window, predict_seconds
from scheduler.model import Floats, TrainingSetting
from scheduler.outlook import REACH
from scheduler.simulator.knowledge import Knowledge, setting_of, sizes_of
from scheduler.simulator.parts import Parts
from scheduler.simulator.short import Cores, Given, Place, bursts, fitted, heard
from scheduler.simulator.views import JobView, Measured, Readings, Sizes, Snapshot
from scheduler.trend import forecast

MOST = 0.9
"""Share of past jobs that kept no more cores busy than what a new one is given."""
LATEST_ROWS = 512
"""Measurements of cores of a kind that are fitted, the latest ones."""
MIN_ROWS = 5
"""Measurements of cores before they say anything of a new job."""
LOOKS = (0.05, 0.1, 0.2, 0.4, 0.7)
"""Progress at which memory is foreseen; it lasts at least until the next of them."""
MAX_GROUPS = 64
"""Jobs of a kind that tell of its bursts, the first ones: a kind does not age."""
MOVED = 1.02
"""Headroom of a kind over that before, or before over it, from which plans are made anew."""
AGAIN = 1.5
"""Memory after running out of it, over that before, at least."""


def fit_ours(window: Window, allowed: np.ndarray, batch_samples: float) -> Floats:
    """Return seconds of a step at each size; nan out of reach of what was measured."""
    replicas, stores = sizes_of(allowed)
    fit = fit_window(window, TrainingSetting)
    found = predict_seconds(fit, setting_of(replicas, stores, batch_samples))
    most_replicas, most_stores = window.columns()[:, 3:5].max(axis=0)
    seconds = found.seconds.copy()
    # What was measured needs no model.
    for cell in window.cells.values():
        here = (replicas == round(cell.columns[3])) & (stores == round(cell.columns[4]))
        seconds[here] = np.median(cell.seconds)
    near = (replicas <= REACH * most_replicas) & (stores <= REACH * most_stores)
    return np.where(near, seconds, np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is known of a kind at the sizes that are trusted; arrays have one entry per size."""

    version: int = 0
    """Of the knowledge that it was made from."""
    replicas: np.ndarray
    """(n,) of each size."""
    stores: np.ndarray
    """(n,) of each size."""
    seconds: Floats
    """(n,) of a step."""
    replica_busy: Floats
    """(n,) cores that one replica of a usual job keeps busy."""
    store_busy: Floats
    """(n,) cores that one store keeps busy."""
    relative: bool = False
    """Whether these are shares of the cores that its user asked for."""
    most: tuple[float, float]
    """Replica's and store's cores over these, that MOST of all jobs do not exceed."""
    headroom: Headroom = field(default_factory=Headroom)
    """Of its processes."""

    def place(self, num_replicas: int, num_stores: int) -> int | None:
        """Return the index of a size, None where it is not trusted."""
        found = np.flatnonzero((self.replicas == num_replicas) & (self.stores == num_stores))
        return int(found[0]) if len(found) else None


@dataclass(slots=True)
class Needs:
    """What is known of one job.

    Attributes:
        version: counts what was learned.
        cores: what was measured of them.
        memory: bytes of one replica, and of all stores, that it is to get; None for its request.
        looks: how many of LOOKS were made.
        oom: times it ran out of memory, that were answered.
    """

    version: int = 0
    cores: Cores = field(default_factory=Cores)
    memory: tuple[float, float] | None = None
    looks: int = 0
    oom: int = 0


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
        self.needs = {view.job: self.needs.get(view.job, Needs()) for view in snapshot.jobs}
        views = {view.job: view for view in snapshot.jobs}
        for measured in snapshot.measured:
            self._measured(measured, views[measured.job])
        doubted = {measured.job for measured in snapshot.measured if self._doubts(measured)}
        self.knowledge.take_in(snapshot, doubted)
        for kind, version in self.knowledge.versions.items():
            latest = version + self.updates.get(kind, 0)
            if kind not in self.kinds or self.kinds[kind].version != latest:
                found = self._kind(kind, latest, snapshot)
                self.kinds[kind] = replace(found, headroom=self._headroom(kind))
        for view in snapshot.jobs:
            self._memory(view, snapshot)

    def _measured(self, measured: Measured, view: JobView) -> None:
        needs = self.needs[measured.job]
        needs.version += 1
        needs.cores = heard(needs.cores, measured, view.current or view.request)
        told = self.bursts.setdefault(measured.kind, {})
        found = bursts(needs.cores.here())
        if found and self.parts.fit_cores and len(told) < MAX_GROUPS:
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
        given = self._fitted(measured.job, measured.kind)
        return given is not None and (given.trying or given.slower)

    def _fitted(self, job: int, kind: str) -> Given | None:
        known = self.needs[job].cores
        return fitted(known, self._headroom(kind)) if self.parts.fit_cores else None

    def _kind(self, kind: str, version: int, snapshot: Snapshot) -> Kind:
        seconds = self.knowledge.seconds[kind]
        trusted = np.isfinite(seconds)
        replicas, stores = (part[trusted] for part in sizes_of(snapshot.allowed[kind]))
        seconds = seconds[trusted]
        rows = np.array(self.knowledge.cores(kind, MIN_ROWS)[-LATEST_ROWS:])
        speeds = 1.0 / np.where(trusted, self.knowledge.seconds[kind], np.inf)
        by_size = np.zeros(snapshot.allowed[kind].shape)
        by_size[snapshot.allowed[kind]] = speeds
        measured = by_size[rows[:, 1].astype(int), rows[:, 0].astype(int)]
        rows, measured = rows[measured > 0], measured[measured > 0]
        if len(rows) < MIN_ROWS:
            none = np.full(len(seconds), np.nan)
            return Kind(
                version=version,
                replicas=replicas,
                stores=stores,
                seconds=seconds,
                replica_busy=none,
                store_busy=none,
                most=(1.0, 1.0),
            )
        rates = measured[:, None] / rows[:, :2], 1.0 / seconds / np.stack([replicas, stores])
        plain, shares = (
            [_busy(rates[0][:, pool], busy[:, pool], rates[1][pool]) for pool in (0, 1)]
            for busy in (rows[:, 2:4], rows[:, 2:4] / rows[:, 4:6])
        )
        relative = sum(part[2] for part in shares) < sum(part[2] for part in plain)
        first, second = shares if relative else plain
        return Kind(
            relative=relative,
            version=version,
            replicas=replicas,
            stores=stores,
            seconds=seconds,
            replica_busy=first[0],
            store_busy=second[0],
            most=(first[1], second[1]),
        )

    def cores(self, view: JobView, kind: Kind) -> tuple[Floats, Floats]:
        """Return the cores to give one replica and one store at each trusted size.

        A job that was measured gets what it was seen to need; any other one what MOST jobs of
        its kind do, once enough is known of their bursts; and both never more in proportion
        than their user asked for, unless the job was seen to lack cores, or is given more to see.
        """
        request, known = view.request, self.needs[view.job].cores
        asked = request.replica_cpus, request.store_cpus
        units = asked if kind.relative else (1.0, 1.0)
        usual = units[0] * kind.replica_busy, units[1] * kind.store_busy
        given, at = self._fitted(view.job, view.kind), kind.place(*known.at)
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
        passed = sum(view.progress >= look for look in LOOKS)
        if not killed and (view.current is None or passed <= needs.looks):
            return
        needs.looks, needs.oom = max(passed, needs.looks), view.num_oom
        given = self.memory(view)
        readings = snapshot.readings(view.job)
        wanted = _foreseen(readings, given[0], passed, give_back=self.parts.give_back)
        if killed and self.parts.grow_after_oom:
            wanted = max(wanted or 0.0, AGAIN * given[0])
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


def _busy(rates: Floats, busy: Floats, wanted: Floats) -> tuple[Floats, float, float]:
    """Return cores kept busy at wanted rates, and how measurements lie about that.

    Returns:
        (n,) cores; what MOST measurements do not exceed over them; and the log of that over
        what most of them exceed.
    """
    scale = max(float(rates.mean()), 1e-12)
    terms = np.stack([np.ones_like(rates), rates / scale], axis=1)
    found = nnls(terms / busy[:, None], np.ones(len(busy)))[0]
    ratios = busy / (terms @ found)
    low, high = np.quantile(ratios, [1.0 - MOST, MOST])
    cores = found[0] + found[1] * wanted / scale
    return cores, float(high), float(np.log(high / low))
