"""What our policy thinks of kinds and of jobs: steps, cores and memory, from measurements alone.

Seconds of a step are those of `fit` and `predict_seconds`, only where their interval is
narrow enough to act upon. Cores that a process keeps busy follow what it computes,

    busy = a + b v / n                          v samples a second, n processes of its pool

fitted to all jobs of the kind, or, where those differ less so, to what they are of the cores
that were asked for; a job that was measured scales them to its own. Memory is
what `forecast` says, which knows the rows touched at every later step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import nnls

from scheduler.cells import Window
from scheduler.correction import HEADROOM, MemoryWatch, is_urgent
from scheduler.fit import fit_window, predict_seconds
from scheduler.model import Floats, TrainingSetting
from scheduler.outlook import REACH
from scheduler.simulator.knowledge import Knowledge, setting_of, sizes_of
from scheduler.simulator.views import JobView, Measured, Readings, Sizes, Snapshot
from scheduler.trend import forecast

CPU_HEADROOM = 1.3
"""Cores that are given over the mean of those kept busy: half of a step's work comes in bursts."""
MOST = 0.9
"""Share of past jobs that kept no more cores busy than what a new one is given."""
LATEST_ROWS = 512
"""Measurements of cores of a kind that are fitted, the latest ones."""
MIN_ROWS = 5
"""Measurements of cores before they say anything of a new job."""
LOOKS = (0.05, 0.1, 0.2, 0.4, 0.7)
"""Progress at which memory is foreseen; it lasts at least until the next of them."""
SETTLED = 0.2
"""Progress from which more memory is given because it is foreseen; before, tables that fill look
like a line, which foresees too much, and more is given only where it will be needed soon."""
SHORT = 0.81
"""Share of its cores that a process keeps busy, above which it may want more than it has: then its
step says nothing of its kind."""
SHORT_OF = 1.5
"""Cores that are then taken to be busy, over those that are."""
AGAIN = 1.5
"""Memory after running out of it, over that before, where nothing can be foreseen."""


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

    def place(self, num_replicas: int, num_stores: int) -> int | None:
        """Return the index of a size, None where it is not trusted."""
        found = np.flatnonzero((self.replicas == num_replicas) & (self.stores == num_stores))
        return int(found[0]) if len(found) else None


@dataclass(slots=True)
class Needs:
    """What is known of one job.

    Attributes:
        version: counts what was learned.
        busy: cores of one replica and one store that were measured last, at their sizes.
        at: replicas and stores of that measurement.
        memory: bytes of one replica, and of all stores, that it is to get; None for its request.
        looks: how many of LOOKS were made.
        oom: times it ran out of memory, that were answered.
    """

    version: int = 0
    busy: tuple[float, float] | None = None
    at: tuple[int, int] = (0, 0)
    memory: tuple[float, float] | None = None
    looks: int = 0
    oom: int = field(default=0)


class Estimates:
    """Kinds and jobs, as measurements come in."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.knowledge = Knowledge(fit_ours)
        self.kinds: dict[str, Kind] = {}
        self.needs: dict[int, Needs] = {}

    def take_in(self, snapshot: Snapshot) -> None:
        """Learn from all that was measured since the last decision."""
        views = {view.job: view for view in snapshot.jobs}
        free = tuple(one for one in snapshot.measured if not _is_short(one, views[one.job]))
        self.knowledge.take_in(replace(snapshot, measured=free))
        for kind, version in self.knowledge.versions.items():
            if kind not in self.kinds or self.kinds[kind].version != version:
                self.kinds[kind] = self._kind(kind, version, snapshot)
        self.needs = {view.job: self.needs.get(view.job, Needs()) for view in snapshot.jobs}
        for measured in snapshot.measured:
            self._measured(measured, short=measured not in free)
        for view in snapshot.jobs:
            self._memory(view, snapshot)

    def _measured(self, measured: Measured, *, short: bool) -> None:
        needs, more = self.needs[measured.job], SHORT_OF if short else 1.0
        needs.busy = more * measured.replica_busy, more * measured.store_busy
        needs.at = measured.num_replicas, measured.num_stores
        needs.version += 1

    def _kind(self, kind: str, version: int, snapshot: Snapshot) -> Kind:
        seconds = self.knowledge.seconds[kind]
        trusted = np.isfinite(seconds)
        replicas, stores = (part[trusted] for part in sizes_of(snapshot.allowed[kind]))
        seconds = seconds[trusted]
        rows = np.array(self.knowledge.cores[kind][-LATEST_ROWS:])
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

        A job that was measured gets what it keeps busy; any other one what MOST jobs of its
        kind do, and never more in proportion than its user asked for.
        """
        request, needs = view.request, self.needs[view.job]
        asked = request.replica_cpus, request.store_cpus
        units = asked if kind.relative else (1.0, 1.0)
        usual = units[0] * kind.replica_busy, units[1] * kind.store_busy
        if needs.busy is not None:
            at = kind.place(*needs.at)
            if at is not None and np.isfinite(usual[0]).all():
                own = [busy / part[at] for busy, part in zip(needs.busy, usual, strict=True)]
                return CPU_HEADROOM * own[0] * usual[0], CPU_HEADROOM * own[1] * usual[1]
        at = kind.place(request.num_replicas, request.num_stores)
        found: list[Floats] = []
        for part, most, cpus in zip(usual, kind.most, asked, strict=True):
            if not np.isfinite(part).all():
                found.append(np.full(len(part), cpus))
                continue
            given = CPU_HEADROOM * most * part
            found.append(given if at is None else np.minimum(given, cpus * part / part[at]))
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
        wanted = _foreseen(readings, given[0], passed, killed=killed)
        if killed:
            wanted = max(wanted or 0.0, AGAIN * given[0])
        if wanted is not None:
            needs.memory = wanted, wanted * readings.tables_share
            needs.version += 1

    def request_sizes(self, view: JobView, allowed: np.ndarray) -> Sizes:
        """Return what the user asked for, or sizes to be measured, with the memory foreseen."""
        memory = self.memory(view)
        sampled = self.knowledge.sample(view, allowed) if view.current is None else view.current
        return replace(sampled or view.request, replica_memory=memory[0], tables_memory=memory[1])


def _foreseen(readings: Readings, given: float, passed: int, *, killed: bool) -> float | None:
    """Return the bytes that a replica is to get, None to leave it as it is."""
    seen = forecast(
        readings.steps, readings.replica_bytes, end_step=1000, limit_bytes=int(given),
        load=readings.load,
    )  # fmt: skip
    if not seen.confident:
        return None
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
    wanted = HEADROOM * seen.needed_bytes
    if now >= 1000 * SETTLED or killed or wanted < given:
        return wanted
    return wanted if is_urgent(watch) else None


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


def _is_short(measured: Measured, view: JobView) -> bool:
    """Tell whether a process may be slowed down by its cores."""
    given = view.current or view.request
    shares = measured.replica_busy / given.replica_cpus, measured.store_busy / given.store_cpus
    return max(shares) > SHORT
