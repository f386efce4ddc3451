"""Our policy: models, choice under one budget and hysteresis that run live, and parts that do not.

Of each job the sizes whose prediction may be trusted are compared by time^haste x cost.
All jobs then share the cluster by `share`, a gain counting for more the sooner its job
is done, and a running job is changed as `correct` says, or because others need its share.
`Parts` says what can be turned off; `presage-live` is what is left without all that the
scheduler which runs does not do.

Source: the functions are those of `scheduler.share` and `scheduler.correction`; that the
jobs with the least left go first is Schrage's (1968) rule for one processor, and Berg et
al. (2020, "heSRPT") for jobs that run on several with diminishing returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from scheduler.correction import ENOUGH, Correction, correct, ended
from scheduler.decision import Candidate
from scheduler.front import front
from scheduler.grid import GIB
from scheduler.machine.look import PAUSE_SEC
from scheduler.model import Floats
from scheduler.options import WAITING, Options, urgency_of
from scheduler.outlook import Outlook
from scheduler.policy import weigh
from scheduler.share import share
from scheduler.simulator.estimates import Estimates
from scheduler.simulator.kinds import Kind
from scheduler.simulator.parts import ALL, Parts
from scheduler.simulator.static import give_back
from scheduler.simulator.views import Handling, JobView, Sizes, Snapshot
from schemas.job_schedule import BudgetConfig

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
            self.shared = key, share(self._asking(snapshot), budget, exchanges=0)
        return self.shared[1]

    def _asking(self, snapshot: Snapshot) -> list[Options]:
        """Return what each job asks for; one of which nothing is known is as urgent as most."""
        found = [self.plans[view.job] for view in snapshot.jobs]
        if not self.parts.urgent:
            return [plans.options for plans in found]
        steps = [v.left_samples / snapshot.batch_samples[v.kind] for v in snapshot.jobs]
        left = np.array(steps) * np.array([plans.seconds[-1] for plans in found])
        runs = np.array([view.current is not None for view in snapshot.jobs], bool)
        urgencies = urgency_of(left, runs).tolist()
        return [
            replace(plans.options, urgency=urgency)
            for plans, urgency in zip(found, urgencies, strict=True)
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
        weighed = weigh(kind.seconds, kind.seconds * price, self.parts.haste)
        preferred = int(weighed.argmin())
        best = front(np.stack([price, kind.seconds], axis=1))
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
            weigh(seconds, seconds * _price(sizes), self.parts.haste)
            for seconds, sizes in ((now_sec, current), (new_sec, target))
        )
        seen = Outlook(
            current=_candidate(current, now_sec),
            best=_candidate(target, new_sec),
            gain=1.0 - new / now,
            confident=self.estimates.needs[view.job].cores.at
            == (current.num_replicas, current.num_stores),
        )
        before = self.corrections[view.job]
        if before.in_flight is not None:
            before = ended(before, view.since_sec + PAUSE_SEC)
        verdict = correct(before, snapshot.now_sec, seen)
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
    return min(cpus, memory) < 1.0 - ENOUGH or cpus > 1.0 + ENOUGH / 2.0


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
