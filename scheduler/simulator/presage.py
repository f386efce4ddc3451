"""Our policy: the models, the choice under one budget and the hysteresis that run live.

Of each job the sizes whose prediction may be trusted are compared by time^HASTE x cost.
All jobs then share the cluster by `share`, a gain counting for more the sooner its job
is done, and a running job is changed as `correct` says, or because others need its share.

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
from scheduler.outlook import Outlook
from scheduler.share import WAITING, Options, share
from scheduler.simulator.estimates import Estimates, Kind
from scheduler.simulator.views import Handling, JobView, Sizes, Snapshot
from schemas.job_schedule import BudgetConfig

HASTE = 8.0
"""By what power time counts against cost when jobs wait for each other; 1 is a job alone."""
WORTHWHILE = 10.0
"""Time that is left, in pauses, below which cores and memory are not fitted to a job any more."""
APART = 0.05
"""Speed between two plans of a job, at least."""
PRICES = BudgetConfig()


@dataclass(frozen=True, slots=True)
class Plans:
    """Sizes that one job may get, each as large as it should be.

    Attributes:
        key: what they were made from.
        sizes: one for each plan, thriftiest first.
        seconds: (n,) of a step.
        options: what each takes and gives.
    """

    key: tuple[int, int]
    sizes: tuple[Sizes, ...]
    seconds: Floats
    options: Options


class PresagePolicy:
    """Ours."""

    name = "presage"
    handling = Handling(PAUSE_SEC, PAUSE_SEC, keeps_steps=True, replaces_slow=True)
    interval_sec = 300.0

    def __init__(self) -> None:
        """Begin with nothing known."""
        self.estimates = Estimates()
        self.plans: dict[int, Plans] = {}
        self.corrections: dict[int, Correction] = {}

    def decide(self, snapshot: Snapshot) -> Mapping[int, Sizes]:
        """Return all sizes: shared anew, and those that run kept where little is gained."""
        self.estimates.take_in(snapshot)
        self.plans = {view.job: self._plans(view, snapshot) for view in snapshot.jobs}
        self.corrections = {
            view.job: self.corrections.get(view.job, Correction()) for view in snapshot.jobs
        }
        budget = replace(
            PRICES, cpus=snapshot.capacity.cpus, memory=int(snapshot.capacity.memory_bytes)
        )
        asking = [self._urgent(view, snapshot) for view in snapshot.jobs]
        chosen = share(asking, budget, exchanges=0)
        targets = {
            view.job: self.plans[view.job].sizes[plan]
            for view, plan in zip(snapshot.jobs, chosen, strict=True)
            if plan != WAITING
        }
        return self._settle(targets, snapshot)

    def _urgent(self, view: JobView, snapshot: Snapshot) -> Options:
        plans = self.plans[view.job]
        left = view.left_samples / snapshot.batch_samples[view.kind] * float(plans.seconds[-1])
        return replace(plans.options, urgency=1.0 / max(left, 1.0))

    def _plans(self, view: JobView, snapshot: Snapshot) -> Plans:
        """Return the plans of a job; made again only when something was learned of it."""
        kind = self.estimates.kinds.get(view.kind)
        allowed = snapshot.allowed[view.kind]
        key = (0 if kind is None else kind.version, self.estimates.needs[view.job].version)
        old = self.plans.get(view.job)
        if old is not None and old.key == key:
            return old
        if kind is None or self.estimates.knowledge.sample(view, allowed) is not None:
            return _only(self.estimates.request_sizes(view, allowed), view, key)
        return self._trusted(view, kind, key)

    def _trusted(self, view: JobView, kind: Kind, key: tuple[int, int]) -> Plans:
        cores, memory = self.estimates.cores(view, kind), self.estimates.memory(view)
        cpus = kind.replicas * cores[0] + kind.stores * cores[1]
        held = kind.replicas * memory[0] + memory[1]
        price = PRICES.cpu_hour_price * cpus + PRICES.gib_hour_price * held / GIB
        preferred = int((kind.seconds ** (HASTE + 1.0) * price).argmin())
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
        cpus = sum(sizes.cpus for sizes in wanted.values()) - snapshot.capacity.cpus
        memory = sum(sizes.memory_bytes for sizes in wanted.values())
        memory -= snapshot.capacity.memory_bytes
        # Others need what is held beyond a share: the largest part is given back first.
        for _, job in sorted(held, reverse=True):
            if cpus <= 0.0 and memory <= 0.0:
                break
            cpus -= wanted[job].cpus - targets[job].cpus
            memory -= wanted[job].memory_bytes - targets[job].memory_bytes
            wanted[job] = targets[job]
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
        if (target.num_replicas, target.num_stores) == (current.num_replicas, current.num_stores):
            return now_sec > WORTHWHILE * PAUSE_SEC and _fitted(current, target)
        new_sec = steps * float(plans.seconds[plans.sizes.index(target)]) + PAUSE_SEC
        gain = 1.0 - _objective(new_sec, target) / max(_objective(now_sec, current), 1e-12)
        seen = Outlook(
            current=_candidate(current, now_sec),
            best=_candidate(target, new_sec),
            gain=gain,
            confident=self.estimates.needs[view.job].at
            == (current.num_replicas, current.num_stores),
        )
        before = self.corrections[view.job]
        if before.in_flight is not None:
            before = ended(before, view.since_sec + PAUSE_SEC)
        verdict = correct(before, snapshot.now_sec, seen)
        self.corrections[view.job] = verdict.state
        return verdict.change is not None


def _only(sizes: Sizes, view: JobView, key: tuple[int, int]) -> Plans:
    """Return one plan, for a job of which nothing is known."""
    one = np.ones(1)
    options = Options(
        priority=view.priority,
        cpus=sizes.cpus * one,
        memory_bytes=sizes.memory_bytes * one,
        gain=one,
    )
    return Plans(key, (sizes,), one, options)


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


def _objective(seconds: float, sizes: Sizes) -> float:
    return seconds ** (HASTE + 1.0) * _price(sizes)


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
