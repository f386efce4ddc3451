"""Our policy in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.controller.tick import PAUSE_SEC
from scheduler.elasticity import (
    CoreGrant,
    CoreReadings,
    Headroom,
    PoolReadings,
    PoolSizes,
    Reading,
    add_readings,
    burst_readings,
    estimate_headroom,
    fit_pool_cores,
)
from scheduler.model.grid import GIB
from scheduler.model.memory import forecast
from scheduler.model.terms import Floats
from scheduler.planner.candidates import pareto_front
from scheduler.planner.correction import (
    MEMORY_HEADROOM,
    MIN_GAIN,
    Correction,
    MemoryWatch,
    SizeComparison,
    decide_correction,
    end_change,
    is_urgent,
    memory_after_oom,
)
from scheduler.planner.policy import TIME_COST_EXPONENT, Candidate, weighted_cost
from scheduler.planner.share import WAITING, Options, share_budget, urgencies
from scheduler.simulator.baselines import give_back
from scheduler.simulator.knowledge import MIN_ROWS, Kind, Knowledge, fit_ours, kind_of
from scheduler.simulator.views import Handling, JobView, Measured, Readings, Sizes, Snapshot
from schemas.config.schedule import BudgetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What of our policy is on. What is not of `LIVE` is not done by the scheduler that runs."""

    haste: float = TIME_COST_EXPONENT
    """By what power time counts against cost."""
    urgent: bool = True
    """Whether jobs with less left go first, and gain more."""
    fit_cores: bool = True
    """Whether processes get the cores that they keep busy, not those of the request."""
    kin: bool = True
    """Whether jobs of a kind tell each other what cores they need, at each of their sizes."""
    give_back: bool = True
    """Whether memory that is not needed is given back, and more is given before it is urgent."""
    grow_after_oom: bool = True
    """Whether a job that ran out of memory gets more."""
    sample: bool = True
    """Whether the first jobs of a kind run at sizes that are to be measured."""
    move_stores: bool = True
    """Whether stores of a job that ran may become more or fewer."""


ALL = Parts()
OFF = Parts(
    haste=1.0,
    urgent=False,
    fit_cores=False,
    kin=False,
    give_back=False,
    grow_after_oom=False,
    sample=False,
    move_stores=False,
)
"""None of them: time x cost, by priority and then by arrival."""
LIVE = replace(ALL, kin=False, sample=False)
"""What the machine does, too."""


# What our policy thinks of each job: its cores and its memory, from measurements alone.
#
# What a usual job of its kind keeps busy is `kinds`'; a job that was measured scales that to its
# own, with the headroom that bursts of the kind need, and gets no more than its user asked for
# unless it was seen to lack cores. Memory is what `forecast` says, which knows the rows touched
# at every later step.

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
    cores: CoreReadings = field(default_factory=CoreReadings)
    memory: tuple[float, float] | None = None
    looks: int = 0
    oom: int = 0
    given: tuple[int, Headroom, CoreGrant | None] | None = None


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
        self.bursts: dict[str, dict[tuple[int, PoolSizes], list[Reading]]] = {}
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
        needs.cores = add_readings(
            needs.cores, at, readings_of(measured, view.current or view.request)
        )
        told = self.bursts.setdefault(measured.kind, {})
        found = burst_readings(needs.cores.latest())
        if found and self.parts.fit_cores and self.parts.kin and len(told) < MAX_GROUPS:
            told[measured.job, needs.cores.sizes] = found
            self._burst(measured.kind)

    def _burst(self, kind: str) -> None:
        """Take over the headroom of a kind, where it is another one."""
        before, after = self._headroom(kind), estimate_headroom(list(self.bursts[kind].values()))
        changes = after.factor / before.factor, after.suspect_below / before.suspect_below
        if after.known > before.known or max(changes) > MOVED or min(changes) < 1.0 / MOVED:
            self.headrooms[kind] = after
            self.updates[kind] = self.updates.get(kind, 0) + 1

    def _headroom(self, kind: str) -> Headroom:
        return self.headrooms.get(kind, Headroom())

    def _doubts(self, measured: Measured) -> bool:
        """Tell whether a job was slowed down by its cores, or may have been."""
        given = self.fitted(measured.job, measured.kind)
        return given is not None and (given.trying or given.slower)

    def fitted(self, job: int, kind: str) -> CoreGrant | None:
        """Return what a job is to get where it was measured last; None before that."""
        if not self.parts.fit_cores:
            return None
        needs, headroom = self.needs[job], self._headroom(kind)
        if needs.given is None or needs.given[:2] != (needs.version, headroom):
            needs.given = needs.version, headroom, fit_pool_cores(needs.cores, headroom)
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
        given, at = self.fitted(view.job, view.kind), kind.place(*known.sizes)
        unknown = given is None and not kind.headroom.known
        if not self.parts.fit_cores or unknown or not np.isfinite(usual[0]).all():
            return np.full(len(usual[0]), asked[0]), np.full(len(usual[1]), asked[1])
        give = kind.headroom.factor
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
            wanted = max(wanted or 0.0, memory_after_oom(given[0], 0.0, np.inf))
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


def readings_of(measured: Measured, given: Sizes) -> PoolReadings:
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
    wanted = MEMORY_HEADROOM * seen.needed_bytes
    if give_back:
        return wanted
    now = int(readings.steps[-1])
    later = [int(1000 * look) for look in LOOKS[passed:]] or [1000]
    watch = MemoryWatch(
        pool="training",
        forecast=seen,
        now_step=now,
        lookahead_steps=later[0] - now,
        limit_bytes=int(given),
        room_bytes=int(given),
    )
    return wanted if is_urgent(watch) and wanted > given else None


# Our policy: models, choice under one budget and hysteresis that run live, and parts that do not.
#
# Of each job the sizes whose prediction may be trusted are compared by time^haste x cost. All
# jobs then share the cluster by `share`, a gain counting for more the sooner its job is done, and
# a running job is changed as `correct` says, or because others need its share. `Parts` says what
# can be turned off; `presage-live` is what is left without all that the scheduler which runs does
# not do.
#
# Source: the functions are those of `scheduler.planner.share` and `scheduler.planner.correction`;
# that the jobs with the least left go first is Schrage's (1968) rule for one processor, and Berg
# et al. (2020, "heSRPT") for jobs that run on several with diminishing returns.

WORTHWHILE = 10.0
"""Time that is left, in pauses, below which cores and memory are not fitted to a job any more."""
APART = 0.05
"""Speed between two plans of a job, at least."""
PRICES = BudgetConfig()

Key = tuple[int, int, int]
"""Versions of what is known of a kind and of a job, and its stores, 0 for any."""


@dataclass(frozen=True, slots=True)
class Plans:
    """Sizes that one job may get, each as large as it should be.

    Attributes:
        key: what they were made from.
        sizes: one for each plan, thriftiest first.
        seconds: (n,) of a step; nan where nothing is known of it.
        options: what each takes and gives.
    """

    key: Key
    sizes: tuple[Sizes, ...]
    seconds: Floats
    options: Options


class PresagePolicy:
    """Ours."""

    handling = Handling(PAUSE_SEC, PAUSE_SEC, keeps_steps=True, replaces_slow=True)
    interval_sec = 300.0

    def __init__(self, parts: Parts = ALL, name: str = "presage") -> None:
        """Begin with nothing known.

        Args:
            parts: what of it is on.
            name: as on the command line.
        """
        self.parts, self.name = parts, name
        self.estimates = Estimates(parts)
        self.plans: dict[int, Plans] = {}
        self.stores: dict[int, int] = {}
        self.corrections: dict[int, Correction] = {}
        self.shared: tuple[tuple[tuple[int, Key], ...], tuple[int, ...]] = ((), ())

    def decide(self, snapshot: Snapshot) -> Mapping[int, Sizes]:
        """Return all sizes: shared anew, and those that run kept where little is gained."""
        self.estimates.take_in(snapshot)
        if not self.parts.move_stores:
            running = {v.job: v.current.num_stores for v in snapshot.jobs if v.current is not None}
            self.stores = {**self.stores, **running}
        self.plans = {view.job: self._plans(view, snapshot) for view in snapshot.jobs}
        self.corrections = {
            view.job: self.corrections.get(view.job) or Correction() for view in snapshot.jobs
        }
        targets = {
            view.job: self.plans[view.job].sizes[plan]
            for view, plan in zip(snapshot.jobs, self._chosen(snapshot), strict=True)
            if plan != WAITING
        }
        return self._settle(targets, snapshot)

    def _chosen(self, snapshot: Snapshot) -> tuple[int, ...]:
        """Return the plan of each job; shared anew when a job came, went or was measured."""
        key = tuple((view.job, self.plans[view.job].key) for view in snapshot.jobs)
        if key != self.shared[0]:
            capacity = snapshot.capacity
            budget = replace(PRICES, cpus=capacity.cpus, memory=int(capacity.memory_bytes))
            self.shared = key, share_budget(self._asking(snapshot), budget, exchanges=0)
        return self.shared[1]

    def _asking(self, snapshot: Snapshot) -> list[Options]:
        """Return what each job asks for; one of which nothing is known is as urgent as most."""
        found = [self.plans[view.job] for view in snapshot.jobs]
        if not self.parts.urgent:
            return [plans.options for plans in found]
        steps = [v.left_samples / snapshot.batch_samples[v.kind] for v in snapshot.jobs]
        left = np.array(steps) * np.array([plans.seconds[-1] for plans in found])
        runs = np.array([view.current is not None for view in snapshot.jobs], bool)
        weights = urgencies(left, runs).tolist()
        return [
            replace(plans.options, urgency=urgency)
            for plans, urgency in zip(found, weights, strict=True)
        ]

    def _plans(self, view: JobView, snapshot: Snapshot) -> Plans:
        """Return the plans of a job; made again only when something was learned of it."""
        kind = self.estimates.kinds.get(view.kind)
        allowed = snapshot.allowed[view.kind]
        stores = self.stores.get(view.job, 0)
        key = (0 if kind is None else kind.version, self.estimates.needs[view.job].version, stores)
        old = self.plans.get(view.job)
        if old is not None and old.key == key:
            return old
        few = kind is None or self.estimates.sample(view, allowed) is not None
        had = None if few or kind is None else _having(kind, stores)
        if had is None or not len(had.seconds):
            return _only(self.estimates.request_sizes(view, allowed), kind, view, key)
        return self._trusted(view, had, key)

    def _trusted(self, view: JobView, kind: Kind, key: Key) -> Plans:
        cores, memory = self.estimates.cores(view, kind), self.estimates.memory(view)
        cpus = kind.replicas * cores[0] + kind.stores * cores[1]
        held = kind.replicas * memory[0] + memory[1]
        price = PRICES.cpu_hour_price * cpus + PRICES.gib_hour_price * held / GIB
        weighed = weighted_cost(kind.seconds, kind.seconds * price, self.parts.haste)
        preferred = int(weighed.argmin())
        best = pareto_front(np.stack([price, kind.seconds], axis=1))
        slower = best[kind.seconds[best] > kind.seconds[preferred]]
        slower = slower[price[slower] < price[preferred]]
        places = np.append(_apart(slower, kind.seconds), preferred)
        seconds = kind.seconds[places]
        sizes = tuple(
            Sizes(
                int(kind.replicas[place]),
                int(kind.stores[place]),
                float(cores[0][place]),
                float(cores[1][place]),
                *memory,
            )
            for place in places
        )
        options = Options(
            priority=view.priority,
            cpus=cpus[places],
            memory_bytes=held[places],
            gain=seconds[-1] / seconds,
        )
        return Plans(key, sizes, seconds, options)

    def _settle(self, targets: dict[int, Sizes], snapshot: Snapshot) -> dict[int, Sizes]:
        """Keep running jobs as they are where nothing else is worth it and all fit."""
        running = [view for view in snapshot.jobs if view.current is not None]
        wanted = dict(targets)
        held: list[tuple[float, int]] = []
        for view in running:
            assert view.current is not None, "it runs"
            target = targets.get(view.job)
            if target is not None and not self._changes(view, target, snapshot):
                wanted[view.job] = view.current
                held.append((view.current.cpus - target.cpus, view.job))
        # Others need what is held beyond a share.
        give_back(wanted, targets, held, snapshot.capacity)
        return wanted

    def _changes(self, view: JobView, target: Sizes, snapshot: Snapshot) -> bool:
        """Tell whether a running job is to be changed for its own sake."""
        current = view.current
        assert current is not None, "it runs"
        if target == current:
            return False
        plans, kind = self.plans[view.job], self.estimates.kinds.get(view.kind)
        steps = view.left_samples / snapshot.batch_samples[view.kind]
        if target.memory_bytes > 1.01 * current.memory_bytes and (
            target.replica_memory > 1.01 * current.replica_memory
        ):
            return True  # it may run out of memory
        at = None if kind is None else kind.place(current.num_replicas, current.num_stores)
        if kind is None or at is None:
            return False
        now_sec = steps * float(kind.seconds[at])
        if now_sec == 0.0:
            return False  # it has nothing left, and ends at this very time
        if (target.num_replicas, target.num_stores) == (current.num_replicas, current.num_stores):
            return now_sec > WORTHWHILE * PAUSE_SEC and _fitted(current, target)
        new_sec = steps * float(plans.seconds[plans.sizes.index(target)]) + PAUSE_SEC
        if not np.isfinite(new_sec):
            return False
        now, new = (
            weighted_cost(seconds, seconds * _price(sizes), self.parts.haste)
            for seconds, sizes in ((now_sec, current), (new_sec, target))
        )
        seen = SizeComparison(
            current=_candidate(current, now_sec),
            best=_candidate(target, new_sec),
            gain=1.0 - new / now,
            confident=self.estimates.needs[view.job].cores.sizes
            == (current.num_replicas, current.num_stores),
        )
        before = self.corrections[view.job]
        if before.in_flight is not None:
            before = end_change(before, view.since_sec + PAUSE_SEC)
        verdict = decide_correction(before, snapshot.now_sec, seen)
        self.corrections[view.job] = verdict.state
        return verdict.change is not None


def _only(sizes: Sizes, kind: Kind | None, view: JobView, key: Key) -> Plans:
    """Return one plan, for a job of which little is known."""
    one = np.ones(1)
    options = Options(
        priority=view.priority,
        cpus=sizes.cpus * one,
        memory_bytes=sizes.memory_bytes * one,
        gain=one,
    )
    at = None if kind is None else kind.place(sizes.num_replicas, sizes.num_stores)
    known = np.nan if kind is None or at is None else float(kind.seconds[at])
    return Plans(key, (sizes,), known * one, options)


def _having(kind: Kind, stores: int) -> Kind:
    """Return a kind at sizes with so many stores, or at all of them for 0."""
    had = kind.stores == stores if stores else np.ones(len(kind.stores), bool)
    names = ("replicas", "stores", "seconds", "replica_busy", "store_busy")
    return replace(kind, **{name: getattr(kind, name)[had] for name in names})


def _apart(places: np.ndarray, seconds: Floats) -> np.ndarray:
    """Return those of a front, slowest first, that lie APART."""
    steps = np.floor(np.log(seconds[places]) / -np.log1p(APART))
    return places[np.diff(steps, prepend=-np.inf) > 0]


def _fitted(current: Sizes, target: Sizes) -> bool:
    """Tell whether cores or memory are so far off that a change pays, or too few."""
    cpus, memory = target.cpus / current.cpus, target.memory_bytes / current.memory_bytes
    return min(cpus, memory) < 1.0 - MIN_GAIN or cpus > 1.0 + MIN_GAIN / 2.0


def _price(sizes: Sizes) -> float:
    return PRICES.cpu_hour_price * sizes.cpus + PRICES.gib_hour_price * sizes.memory_bytes / GIB


def _candidate(sizes: Sizes, seconds: float) -> Candidate:
    """Return sizes as `correct` sees them; there is no preprocessing pool."""
    price = _price(sizes)
    return Candidate(
        segment_jobs=0,
        workers_per_job=0,
        num_replicas=sizes.num_replicas,
        num_stores=sizes.num_stores,
        preprocessing_cpus=0.0,
        preprocessing_memory_bytes=0,
        training_cpus=sizes.cpus,
        training_memory_bytes=int(sizes.memory_bytes),
        rows_per_sec=0.0,
        samples_per_sec=0.0,
        waiting_sec=0.0,
        predicted_sec=seconds,
        cost=price * seconds / 3600.0,
        cost_per_hour=price,
    )
