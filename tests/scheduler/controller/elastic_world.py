"""A simulated world in which stores of jobs come and go, and which knows where rows really lie."""

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np

from presage.scheduler.controller.events import (
    Ended,
    Event,
    Moved,
    Preempted,
    Started,
    Stepped,
    Tick,
)
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.slots import NUM_RANGES, initial_owners
from presage.scheduler.controller.state import Action, JobState, State, Status
from tests.scheduler.controller.world import BATCH, STEPS_PER_SEGMENT, check_laws, check_logged

NOBODY = -1
"""Owner of a range whose store was removed with it."""
NUM_TRACED = 60
"""Latest events and actions that are told when a law is broken."""

TRACED = ("job", "process", "outcome", "target", "moved", "cpus")
"""What is told of an event."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What happens in a world, beside stores that become more and fewer."""

    deaths: bool = True
    """Whether processes are killed and taken away."""
    budgets: bool = False
    """Whether the budget changes."""
    drains: bool = False
    """Whether the job is drained, and submitted again."""
    torn_moves: bool = False
    """Whether moves that fail may have moved the ranges."""
    num_jobs: int = 1
    """Jobs that share the budget."""


@dataclass(frozen=True)
class Flight:
    """Ranges of slots on their way."""

    ranges: tuple[int, ...]
    givers: frozenset[int]
    target: int


@dataclass
class Rows:
    """Where the rows of one job really lie."""

    owners: list[int] = field(default_factory=list[int])
    """Store of each range; none before a trainer began."""
    folders: set[int] = field(default_factory=set[int])
    """Stores whose folders are there."""

    def removed(self, number: int) -> None:
        """Remove the folder of a store, and what it had."""
        self.folders.remove(number)
        self.owners = [NOBODY if owner == number else owner for owner in self.owners]

    def start_process(self, job: JobState, alive: Collection[int]) -> None:
        """Begin to train, as a trainer does: who has slots keeps them, the rest is given out.

        Args:
            job: what the trainer is told of.
            alive: stores that it finds.
        """
        addresses = sorted({*(job.owners or job.stores)})
        there = [number for number in alive if number in {*addresses, *self.owners}]
        owners = self.owners or list(initial_owners(addresses))
        missing = set(owners) - {NOBODY, *alive}
        assert not missing, (
            f"the coordinator waits for nobody who is gone, got {missing}, {job.owners}"
        )
        if NOBODY in owners:
            fewest = min(there, key=lambda store: (owners.count(store), store))
            owners = [fewest if owner == NOBODY else owner for owner in owners]
        self.owners = owners

    def end_move(self, flight: Flight) -> None:
        """Give the ranges of a move to its target."""
        for number in flight.ranges:
            if self.owners[number] in flight.givers:
                self.owners[number] = flight.target


@dataclass
class ElasticWorld:
    """Processes and rows of jobs, and a machine that is told what happens to them."""

    rng: np.random.Generator
    kind: Kind
    state: State = field(default_factory=State)
    now: float = 0.0
    children: dict[tuple[str, str], Status] = field(default_factory=dict[tuple[str, str], Status])
    started: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    rows: dict[str, Rows] = field(default_factory=dict[str, Rows])
    flights: dict[str, Flight] = field(default_factory=dict[str, Flight])
    steps: Counter[str] = field(default_factory=Counter[str])
    trace: deque[str] = field(default_factory=lambda: deque[str](maxlen=NUM_TRACED))

    def send(self, event: Event) -> None:
        """Tell the machine, check what holds after every event, and do what it asks for."""
        before, old = self.state.used, self.state
        self.state, actions = handle(old, event)
        check_logged(self.state)
        if actions or not isinstance(event, Tick):
            event_text = [f"{self.now:.1f}", type(event).__name__]
            event_text += [f"{key}={getattr(event, key)}" for key in TRACED if hasattr(event, key)]
            self.trace.append(" ".join(event_text))
        self._check(before)
        for action in actions:
            self.trace.append(f"  {action.verb} {action.job} {action.process}: {action.reason}")
            self._carry_out(action)
        watched = {(job.name, name) for job in self.state.jobs.values() for name in job.processes}
        assert self.children.keys() == watched, "each process is watched until it has ended"

    def set_num_stores(self, name: str, num_stores: int) -> None:
        """Let a job want so many stores."""
        job = self.state.jobs[name]
        assert job.sizes is not None
        job = replace(job, sizes=replace(job.sizes, num_stores=num_stores))
        self.state = replace(self.state, jobs={**self.state.jobs, name: job})
        self.trace.append(f"  {name} gets {num_stores} stores")

    def event_texts(self) -> str:
        """Return what happened last, and how jobs stand."""
        jobs = [
            f"{job.name} {job.phase}: stores={job.stores} "
            f"moving={job.moving} from {job.moving_from} to {job.moving_to}\n"
            f"  believed={job.owners}\n"
            f"  really  ={tuple(self.rows.get(job.name, Rows()).owners)}\n"
            f"  { ({p.name: p.status for p in job.processes.values()}) }"
            for job in self.state.jobs.values()
        ]
        return "\n".join([*self.trace, *jobs])

    def _check(self, before: tuple[float, int]) -> None:
        """Check that nothing is booked over the budget; one that shrank takes nothing away."""
        budget, (cpus, memory) = self.state.budget, self.state.used
        assert cpus <= max(before[0], budget.cpus) + 1e-9, "cores are within the budget"
        assert memory <= max(before[1], budget.memory), "memory is within the budget"
        ample = replace(budget, cpus=max(cpus, budget.cpus), memory=max(memory, budget.memory))
        check_laws(replace(self.state, budget=ample))

    def _carry_out(self, action: Action) -> None:
        if action.verb == "start":
            self._start(action)
        elif action.verb in ("drain", "stop"):
            self._ask_to_leave(action)
        elif action.verb == "migrate":
            self._begin_move(action)
        elif action.verb == "fail":
            expected = "budget does not hold"
            assert expected in action.reason, f"jobs fail for room, got {action.reason}"

    def _start(self, action: Action) -> None:
        job, (pool, number) = self.state.jobs[action.job], place_of(action.process)
        key = (action.job, action.process)
        assert key not in self.started, "a name is given once"
        assert number not in self._alive(action.job, pool), "one place, one process"
        rows = self.rows.setdefault(action.job, Rows())
        if pool in ("coordinator", "store"):
            self._clean_up(job, rows)
        self.children[key] = "starting"
        self.started.add(key)
        if pool == "store":
            rows.folders.add(number)
        elif pool == "coordinator":
            rows.start_process(job, self._alive(action.job, "store"))

    def _clean_up(self, job: JobState, rows: Rows) -> None:
        """Remove folders of stores that are no more, as drivers do."""
        kept = {process.number for process in job.of_pool("store")} | {*job.stores}
        for number in rows.folders - kept:
            lies = number in rows.owners and self._trains(job.name)
            assert not lies, f"no folder is removed with rows, got that of store {number}"
            rows.removed(number)

    def _ask_to_leave(self, action: Action) -> None:
        pool, number = place_of(action.process)
        if pool == "store" and self._trains(action.job):
            free = number not in self.rows[action.job].owners or "preempted" in action.reason
            assert free, f"no store leaves with rows, got {action.process}"
        if (key := (action.job, action.process)) in self.children:
            self.children[key] = "leaving"

    def _begin_move(self, action: Action) -> None:
        assert action.job not in self.flights, "one move at a time"
        job = self.state.jobs[action.job]
        source, target = int(action.values["source"]), int(action.values["target"])
        if action.values.get("whole"):
            flight = Flight(tuple(range(NUM_RANGES)), frozenset({source}), target)
        else:
            running = {p.number for p in job.of_pool("store") if p.status == "running"}
            flight = Flight(job.moving, frozenset(running - {target}), target)
        self.flights[action.job] = flight

    def _alive(self, job: str, pool: str) -> list[int]:
        places = [place_of(name) for owner, name in self.children if owner == job]
        return [number for found, number in places if found == pool]

    def _trains(self, job: str) -> bool:
        return bool(self._alive(job, "coordinator") or self._alive(job, "replica"))

    def _later(self) -> float:
        self.now += float(self.rng.uniform(0.1, 4.0))
        return self.now

    def next_event(self, *, calm: bool) -> Event:
        """Return what happens next; when it is calm, nobody dies and every move succeeds."""
        if self.flights and self.rng.random() < (0.5 if calm else 0.25):
            return self._end_move(min(self.flights), calm=calm)
        keys = sorted(self.children)
        if not keys or self.rng.random() < 0.25:
            return Tick(time_sec=self._later())
        job, name = keys[int(self.rng.integers(len(keys)))]
        chance = 1.0 if calm or not self.kind.deaths else self.rng.random()
        who = {"time_sec": self._later(), "job": job, "process": name}
        if chance < 0.04:
            del self.children[job, name]
            return Ended(**who, outcome="lost", detail="signal 9")
        if self.children[job, name] == "leaving":
            del self.children[job, name]
            return Ended(**who, outcome="left")
        if self.children[job, name] == "starting":
            self.children[job, name] = "running"
            return Started(**who)
        if chance < 0.05:
            return Preempted(**who, grace_sec=10.0)
        return self._work(job, name)

    def _end_move(self, name: str, *, calm: bool) -> Moved:
        flight, chance = self.flights.pop(name), 0.0 if calm else self.rng.random()
        there = {flight.target, *flight.givers} <= {*self._alive(name, "store")}
        moved = there and self._trains(name) and chance < 0.6
        torn = there and self._trains(name) and self.kind.torn_moves and 0.6 <= chance < 0.8
        if moved or torn:
            self.rows[name].end_move(flight)
        return Moved(time_sec=self._later(), job=name, moved=moved)

    def _work(self, job: str, name: str) -> Event:
        state, (pool, _) = self.state.jobs[job], place_of(name)
        who = {"time_sec": self.now, "job": job, "process": name}
        over = self.steps[job] >= state.num_segments * STEPS_PER_SEGMENT
        if pool == "segment" or (pool == "coordinator" and over):
            del self.children[job, name]
            samples = STEPS_PER_SEGMENT * BATCH if pool == "segment" else 0
            return Ended(**who, outcome="done", num_samples=samples, work_sec=5.0)
        trains = pool == "replica" or (pool == "coordinator" and not state.has_replicas)
        if trains and self.steps[job] < len(state.built) * STEPS_PER_SEGMENT:
            return self._make_steps(job, len(state.built) * STEPS_PER_SEGMENT)
        return Tick(time_sec=self.now)

    def _make_steps(self, job: str, most: int) -> Stepped:
        self.steps[job] = min(most, self.steps[job] + int(self.rng.integers(1, 3)))
        return Stepped(
            time_sec=self.now,
            job=job,
            next_step=self.steps[job],
            num_samples=self.steps[job] * BATCH,
            num_replicas=max(1, len(self._alive(job, "replica"))),
            seconds=(float(self.rng.uniform(0.4, 1.2)),),
        )


def place_of(process: str) -> tuple[str, int]:
    """Return the pool and the number of `<pool>-<number>.<attempt>`."""
    pool, _, rest = process.rpartition("-")
    return pool, int(rest.partition(".")[0])
