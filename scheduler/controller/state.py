"""The controller's state: jobs, their processes, and their measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from scheduler.controller.events import (
    RULES,
    Event,
    LoadKnown,
    RunnerName,
    RunnerSet,
    SlotsRead,
    SlotsUnread,
)
from scheduler.elasticity import CoreReadings, PoolSizes
from scheduler.model.fit import Window
from scheduler.model.snapshot import Snapshot
from scheduler.planner.correction import Correction, Sizes
from scheduler.planner.policy import counted
from schemas.config.schedule import BudgetConfig

# How many workers a segment job may have where it runs: by its file, and by free slots.
#
# A slot of a cluster has one worker. What this scheduler's own jobs are to have is counted by
# what was started, because a job has its slots seconds after its start, and between its two
# pipelines none; of the cluster only what others hold is believed.

SLOTS_VALID_SEC = 300.0
"""So long after a cluster fell silent its last answer counts; a segment job takes minutes, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSlots:
    """What a cluster last said, in slots."""

    total: int
    """All."""
    others: int
    """Held by jobs that are not this scheduler's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Where segment jobs run."""

    name: RunnerName = "local"
    """Which of Beam's runners."""
    largest: int | None = None
    """Workers of one segment job at most; None where nobody said."""
    address: str | None = None
    """Of a cluster."""
    slots: ClusterSlots | None = None
    """Of a cluster that has answered."""
    silent_sec: float | None = None
    """Since when it answers no more."""

    @property
    def total_slots(self) -> int | None:
        """Return all slots of a cluster that has answered, None where none bounds segment jobs."""
        return None if self.slots is None else self.slots.total


@dataclass(frozen=True, slots=True)
class WorkerBound:
    """What the next segment job gets.

    Attributes:
        workers: how many; 0 while there is no slot for one.
        reason: why, in words; empty where nothing but the wanted sizes matters.
        values: numbers that the reason rests on.
    """

    workers: int
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


def update_runner(runner: Runner, event: Event) -> Runner:
    """Take in what an event tells of the place where segment jobs run."""
    if isinstance(event, RunnerSet):
        return Runner(
            name=event.name,
            largest=event.largest,
            address=event.address,
            slots=_slots(event.free, event.own, event.total),
        )
    if isinstance(event, SlotsRead):
        slots = _slots(event.free, event.own, event.total)
        return replace(runner, slots=slots, silent_sec=None)
    if isinstance(event, SlotsUnread) and runner.silent_sec is None:
        return replace(runner, silent_sec=event.time_sec)
    return runner


def _slots(free: int | None, own: int | None, total: int | None) -> ClusterSlots | None:
    if free is None or own is None or total is None:
        return None
    # What was read one after the other need not add up.
    return ClusterSlots(total=total, others=max(0, total - free - own))


def bound_workers(runner: Runner, wanted: int, booked: int, now_sec: float) -> WorkerBound:
    """Return how many workers the next segment job gets.

    Args:
        runner: where it runs.
        wanted: by the job's sizes.
        booked: workers of all segment jobs that live.
        now_sec: the time.
    """
    most = wanted if runner.largest is None else min(wanted, runner.largest)
    by_file = f"the runner's file allows {counted(most, 'worker')}" if most < wanted else ""
    if runner.name != "flink":
        return WorkerBound(most, by_file)
    silent = None if runner.silent_sec is None else now_sec - runner.silent_sec
    slots = runner.slots
    if slots is None or (silent is not None and silent > SLOTS_VALID_SEC):
        return WorkerBound(
            max(0, min(most, 1 - booked)), "the cluster is silent, so one worker at a time"
        )
    free = max(0, slots.total - slots.others - booked)
    said = f"{free} of {counted(slots.total, 'slot')} {'is' if free == 1 else 'are'} free"
    if silent is not None:
        said += f", as the cluster said before it fell silent {silent:,.0f} s ago"
    if by_file and free >= most:
        said += f", {by_file}"
    values = {"free_slots": float(free), "total_slots": float(slots.total)}
    return WorkerBound(min(most, free), said, values)


PoolName = Literal["segment", "lead", "replica", "store"]
"""`segment`: segment jobs. `lead`: the one process that begins and ends a job's training; alone it
also trains. `replica`: those that train when there are several. `store`: embedding stores."""
Status = Literal["starting", "running", "leaving"]
Phase = Literal["submitted", "waiting", "running", "draining", "drained", "finished", "failed"]
ENDED_PHASES: tuple[Phase, ...] = ("drained", "finished", "failed")


def empty() -> Mapping[str, int]:
    """Return a mapping without an entry."""
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that was started and has not ended."""

    name: str
    """`<pool>-<number>.<attempt>`, never given twice in a job."""
    pool: PoolName
    """What it does."""
    number: int
    """Segment, replica or store."""
    status: Status
    """`leaving`: asked to leave, or being ended."""
    cpus: float
    """Cores that are booked for it."""
    memory_bytes: int
    """Memory that is booked for it."""
    workers: int = 1
    """Pipeline workers of a segment job."""
    began_sec: float
    """When it was started."""
    readings: tuple[tuple[int, int], ...] = ()
    """Positions, and memory that was read there."""
    rate: float | None = None
    """Work per second that was read last."""
    busy_cores: float | None = None
    """Cores that it kept busy, as read last."""
    slow_ticks: int = 0
    """Looks in a row at which it was slow."""
    memory_before: int | None = None
    """What it had before a change of its memory that is in flight."""
    cpus_before: float | None = None
    """Cores that it had before a change of them that is in flight."""
    fixed: bool = False
    """Whether its memory cannot be changed while it runs."""

    cpu_resize_refused_at: float | None = None
    """When other cores were refused."""
    mem_shrink_refused_at: float | None = None
    """When less memory was refused."""

    @property
    def held_cpus(self) -> float:
        """Return the cores that nobody else may have: until fewer are confirmed, those before."""
        return max(self.cpus, self.cpus_before or 0.0)

    @property
    def held_memory(self) -> int:
        """Return the bytes that nobody else may have: until less is confirmed, that before."""
        return max(self.memory_bytes, self.memory_before or 0)

    @property
    def is_changing(self) -> bool:
        """Tell whether a change of its cores or its memory is in flight."""
        return self.memory_before is not None or self.cpus_before is not None

    @property
    def task_id(self) -> str:
        """Return what it does without the attempt, `<pool>-<number>`."""
        return f"{self.pool}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffState:
    """How often the process of one place ended without having done its work."""

    failed: int = 0
    """Times that it said it cannot."""
    lost: int = 0
    """Times that it was gone, since its job last made progress."""
    retry_sec: float = 0.0
    """Before this time it is not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageWindow:
    """What trainers and stores did since their number or their cores changed last."""

    at: PoolSizes = (0, 0)
    """Processes that train, and stores."""
    cpus: tuple[float, ...] = ()
    """Cores of each trainer and, where there are stores, of each of them."""
    busy: tuple[tuple[float, ...], ...] = ()
    """By look, those that they kept busy, in the mean of each pool."""
    steps: tuple[float, ...] = ()
    """Seconds of steps."""
    fresh: bool = False
    """Whether steps were made since the last look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job."""

    name: str
    """Of the job."""
    submitted_sec: float
    """When it was submitted."""
    document: str
    """Text of its job file then."""
    snapshot: Snapshot
    """What was known of it then."""
    num_segments: int
    """Segments of its input."""
    phase: Phase = "submitted"
    """What becomes of it."""
    sizes: Sizes | None = None
    """What its pools are to be; None while it waits for room."""
    grouped: bool = False
    """Whether the lead has replicas beside it; so it stays once there were several."""
    worker_memory: int
    """Bytes of one pipeline worker."""
    replica_memory: int
    """Bytes of one replica."""
    store_memory: int
    """Bytes of one store."""
    worker_peak: int = 0
    """Largest bytes of a pipeline worker that were read, in the mean of its job's."""
    replica_cpus: float
    """Cores of one replica."""
    store_cpus: float
    """Cores of one store."""
    usage: UsageWindow = field(default_factory=UsageWindow)
    """Of the reading that is on its way."""
    cores: CoreReadings = field(default_factory=CoreReadings)
    """Readings of cores and steps."""
    steps_suspect: bool = False
    """Whether its steps are longer for want of cores, or may be: nothing is learned of them."""
    num_outgrown: int = 0
    """Times that it needed more memory than its share, as a process was killed for it."""
    num_returns: int = 0
    """Times that it gave memory back that others may wait for."""
    spare_ticks: Mapping[str, int] = field(default_factory=empty)
    """Looks in a row at which a pool had memory to spare."""
    processes: Mapping[str, Process] = field(default_factory=dict[str, Process])
    """Live ones, by name."""
    built: frozenset[int] = frozenset()
    """Segments that are committed."""
    waits_for_slots: bool = False
    """Whether its next segment job waits for a slot of the cluster, as was said."""
    attempts: Mapping[str, int] = field(default_factory=empty)
    """Starts so far, by place."""
    backoffs: Mapping[str, BackoffState] = field(default_factory=dict[str, BackoffState])
    """By place."""
    replaced: frozenset[str] = frozenset()
    """Places whose process was replaced once because it was slow."""
    next_step: int = 0
    """The step after the last committed one."""
    num_trained: int = 0
    """Samples trained, every epoch counted."""
    correction: Correction = field(default_factory=Correction)
    """What the looks before have come to."""
    steps: Window = field(default_factory=Window)
    """Measured steps."""
    builds: Window = field(default_factory=Window)
    """Measured segment jobs."""
    load: LoadKnown | None = None
    """What the oracle tells."""
    num_stores: int | None = None
    """Stores that hold its rows, from the first step on; None before training begins."""
    stores: tuple[int, ...] = ()
    """Their numbers, the first that come and the last that go first; none by older rules."""
    first_initial_store: int = 0
    """The first store that it began with: that and those after it had slots from the start."""
    num_initial_stores: int = 0
    """How many these were."""
    owners: tuple[int, ...] = ()
    """Number of the store of each range of slots, once it is known."""
    moving: tuple[int, ...] = ()
    """Ranges of slots that are on their way, from one store to another."""
    emptying_store: int | None = None
    """Store of these that gives all that it has."""
    move_failed_sec: float | None = None
    """When a move of slots failed last; None where the last one did not."""
    num_failed_moves: int = 0
    """Moves of slots that failed, one after the other."""
    maybe_owners: tuple[int, ...] = ()
    """Stores that were to get slots by moves that failed: they may have some."""

    @property
    def remaining_segments(self) -> int:
        """Segments that are not committed."""
        return self.num_segments - len(self.built)

    @property
    def num_steps(self) -> int:
        """Steps of all epochs, as far as sizes are known."""
        facts, train = self.snapshot.facts, self.snapshot.job.train
        return -(-facts.num_train_samples * train.epochs // train.batch_samples)

    @property
    def num_serving(self) -> int:
        """Stores that have slots."""
        return len(set(self.owners)) if self.stores and self.owners else self.num_stores or 0

    @property
    def running_stores(self) -> list[int]:
        """Numbers of the stores that run."""
        return [p.number for p in self.of_pool("store") if p.status == "running"]

    def of_pool(self, pool: PoolName) -> list[Process]:
        """Return the live processes of one pool, by number."""
        found = [p for p in self.processes.values() if p.pool == pool]
        return sorted(found, key=lambda p: (p.number, p.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All jobs and what they share."""

    now_sec: float = 0.0
    """Time of the last event."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Of all jobs together."""
    resizes: bool = False
    """Whether cores and memory of a process are limits, which may be changed while it runs."""
    rules: int = RULES
    """By which is decided."""
    runner: Runner = field(default_factory=Runner)
    """Where segment jobs run."""
    jobs: Mapping[str, JobState] = field(default_factory=dict[str, JobState])
    """By name, in the order in which they were submitted."""

    @property
    def by_priority(self) -> list[JobState]:
        """Return the jobs that have not ended, highest priority first, then the earliest."""
        live = [job for job in self.jobs.values() if job.phase not in ENDED_PHASES]
        return sorted(live, key=lambda job: -job.snapshot.job.schedule.priority)

    @property
    def used(self) -> tuple[float, int]:
        """Return the cores and bytes that are booked for live processes."""
        live = [p for job in self.jobs.values() for p in job.processes.values()]
        return sum(p.held_cpus for p in live), sum(p.held_memory for p in live)


Verb = Literal[
    "start",
    "drain",
    "stop",
    "migrate",
    "resize",
    "admit",
    "wait",
    "scale",
    "replace",
    "hand back",
    "give memory",
    "give back",
    "fit cores",
    "finish",
    "fail",
]
"""The first five are carried out; the others say why."""
EXECUTED_VERBS: tuple[Verb, ...] = ("start", "drain", "stop", "migrate", "resize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One decision, with its reason."""

    verb: Verb
    """What is done. `drain` asks a process to leave with nothing lost; `stop` ends it."""
    job: str
    """Whose."""
    process: str = ""
    """Which process, where it is one."""
    reason: str
    """Why, in words and numbers."""
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the reason rests on, and that a driver needs."""
