"""A simulated platform that carries out actions, one event after the other, from a seed."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from presage.scheduler.controller.budget import candidate_sizes
from presage.scheduler.controller.events import (
    BudgetSet,
    Ended,
    Event,
    Preempted,
    Read,
    Resized,
    Started,
    Stepped,
    Submitted,
    Tick,
)
from presage.scheduler.controller.handle import ROUNDING
from presage.scheduler.controller.log import decode, encode
from presage.scheduler.controller.state import ENDED_PHASES, Action, State, shares_of
from presage.scheduler.model.past_runs import History
from presage.schemas.errors import PlanError
from tests.scheduler.small_job import FACTS, JOB

GIB = 1 << 30
MIB = 1 << 20
BUDGET = BudgetSet(time_sec=0.0, cpus=8.0, memory_bytes=32 * GIB)
BATCH = 256
STEPS_PER_SEGMENT = 4
BUSY_CORES = (0.0, 0.2, 0.7, 1.0)


def submitted(
    name: str, num_segments: int = 3, schedule: str = "  priority: 0", time_sec: float = 0.0
) -> Submitted:
    """Return a job that takes STEPS_PER_SEGMENT steps for each of its segments."""
    samples = num_segments * STEPS_PER_SEGMENT * BATCH
    return Submitted(
        time_sec=time_sec,
        job=name,
        document=JOB.replace("SCHEDULE", schedule).replace("name: small", f"name: {name}"),
        facts=replace(FACTS, num_samples=samples, num_train_samples=samples),
        history=History(),
        num_segments=num_segments,
    )


@dataclass
class Child:
    """A process of the world."""

    pool: str
    number: int
    memory_bytes: int = 0
    resized_bytes: int | None = None
    """Its memory after a resize that is in flight."""
    runs: bool = False
    leaving: bool = False
    has_replicas: bool = False


@dataclass
class World:
    """Processes, their work so far, and their next events."""

    jobs: Sequence[Submitted]
    children: dict[tuple[str, str], Child] = field(default_factory=dict[tuple[str, str], Child])
    known: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    built: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    steps: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])
    now: float = 0.0

    def carry_out(self, action: Action) -> None:
        """Carry out an action, unless it was carried out before."""
        if action.verb not in ("start", "drain", "stop", "resize"):
            return
        key = (action.job, action.process)
        if action.verb == "resize":
            child = self.children[key]
            memory = action.values.get("memory_bytes", child.resized_bytes or child.memory_bytes)
            child.resized_bytes = int(memory)
            return
        if action.verb == "start":
            if key in self.known:
                return
            pool, _, rest = action.process.rpartition("-")
            number = int(rest.partition(".")[0])
            same = [c for (job, _), c in self.children.items() if job == action.job]
            places = [(c.pool, c.number) for c in same]
            assert (pool, number) not in places, "one process per task"
            self.known.add(key)
            self.children[key] = Child(
                pool,
                number,
                memory_bytes=int(action.values["memory_bytes"]),
                has_replicas=bool(action.values.get("has_replicas")),
            )
        elif key in self.children:
            self.children[key].leaving = True

    def next_event(self, rng: np.random.Generator, *, calm: bool) -> Event:
        """Return the next event; a calm world has no kills and no preemptions."""
        self.now += float(rng.uniform(0.1, 5.0))
        keys = sorted(self.children)
        if not keys or rng.random() < 0.2:
            return Tick(time_sec=self.now)
        job, name = keys[int(rng.integers(len(keys)))]
        child = self.children[job, name]
        who = {"time_sec": self.now, "job": job, "process": name}
        chance = rng.random()
        if not calm and chance < 0.1:
            del self.children[job, name]
            return Ended(**who, outcome="oom" if chance < 0.03 else "lost", detail="signal 9")
        if child.leaving:
            del self.children[job, name]
            return Ended(**who, outcome="left")
        if not child.runs:
            child.runs = True
            return Started(**who)
        if child.resized_bytes is not None:
            resized = chance < 0.7
            child.memory_bytes = child.resized_bytes if resized else child.memory_bytes
            child.resized_bytes = None
            return Resized(**who, resized=resized)
        if not calm and chance < 0.15:
            return Preempted(**who, grace_sec=10.0)
        if chance < 0.3:
            position = int(self.now)
            busy = round(float(rng.choice(BUSY_CORES)), 4)
            return Read(**who, position=position, resident_bytes=GIB // 2, busy_cores=busy)
        return self._works(job, name, child, who)

    def _works(self, job: str, name: str, child: Child, who: dict) -> Event:
        total = next(one.num_segments for one in self.jobs if one.job == job)
        there = sum(1 for (owner, _), times in self.built.items() if owner == job and times)
        if child.pool == "segment":
            if child.number > there:  # it waits until those before it are committed
                return Tick(time_sec=self.now)
            del self.children[job, name]
            self.built[job, child.number] += 1
            samples = STEPS_PER_SEGMENT * BATCH
            return Ended(**who, outcome="done", num_samples=samples, work_sec=5.0)
        if child.pool == "coordinator" and self.steps[job] == total * STEPS_PER_SEGMENT:
            del self.children[job, name]
            self.finished[job] += 1
            return Ended(**who, outcome="done")
        trains = child.pool == "replica" or (child.pool == "coordinator" and not child.has_replicas)
        if trains and self.steps[job] < there * STEPS_PER_SEGMENT:
            self.steps[job] += 1
            return Stepped(
                time_sec=self.now,
                job=job,
                next_step=self.steps[job],
                num_samples=self.steps[job] * BATCH,
                num_replicas=1,
                seconds=(0.5,),
            )
        return Tick(time_sec=self.now)


def check_waiting(state: State) -> None:
    """Check that shares fit the budget, and that no job waits that fits beside the others."""
    used_cpus, used_memory = map(sum, zip((0.0, 0), *shares_of(state).values(), strict=True))
    assert used_cpus <= (1 + ROUNDING) * state.budget.cpus
    assert used_memory <= (1 + ROUNDING) * state.budget.memory
    for job in state.by_priority:
        if job.phase == "waiting":
            with suppress(PlanError):  # it does not even fit alone
                options = candidate_sizes(job, state)[2]
                fits = (options.cpus <= state.budget.cpus - used_cpus) & (
                    options.memory_bytes <= state.budget.memory - used_memory
                )
                assert not fits.any(), f"{job.name} fits, got {shares_of(state)}"


def check_logged(state: State) -> None:
    """Check that a state is the same after it was in a snapshot."""
    assert decode(State, json.loads(json.dumps(encode(State, state), allow_nan=False))) == state


def check_laws(state: State) -> None:
    """Check what holds after every event."""
    cpus, memory = state.used
    assert cpus <= state.budget.cpus + 1e-9
    assert memory <= state.budget.memory
    for job in state.jobs.values():
        places = [p.task_id for p in job.processes.values()]
        assert len(places) == len(set(places)), "one process per task"
        assert not job.built & {p.number for p in job.of_pool("segment")}, "built once"


def run(
    world: World,
    state: State,
    send: Callable[[State, Event], tuple[State, Sequence[Action]]],
    rng: np.random.Generator,
    events: Sequence[Event] = (),
    num_wild: int = 60,
) -> State:
    """Run the world and the controller until every job has ended.

    Args:
        world: as it stands.
        state: of the controller.
        tell: takes an event; what it returns is carried out.
        rng: of what happens.
        events: told first, one by one.
        num_wild: events until nobody is killed any more, so that the end is reached.
    """
    waiting = list(events)
    for number in range(3000):
        if waiting:
            event = waiting.pop(0)
        elif state.jobs and all(job.phase in ENDED_PHASES for job in state.jobs.values()):
            if not world.children:
                return state
            event = world.next_event(rng, calm=True)
        else:
            event = world.next_event(rng, calm=number > num_wild)
        state, actions = send(state, event)
        check_laws(state)
        check_waiting(state)
        for action in actions:
            assert action.reason
            world.carry_out(action)
        watched = {(job.name, name) for job in state.jobs.values() for name in job.processes}
        assert world.children.keys() == watched, "each process is watched until it has ended"
        held = sum(max(c.memory_bytes, c.resized_bytes or 0) for c in world.children.values())
        assert held <= state.budget.memory
    raise AssertionError(f"jobs must end, got {state.jobs}")
