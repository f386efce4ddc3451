"""The controller's state: the jobs, their processes and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from presage.scheduler.controller.events import BudgetSet, LoadKnown, Stepped
from presage.scheduler.model.elasticity import CoreReadings, TrainingSizes
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import PoolSizes
from presage.scheduler.model.throughput import Window
from presage.scheduler.planner.correction import Correction
from presage.scheduler.planner.machine_sizes import cluster_schedule
from presage.schemas.config.job import Job, parse_job
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig

PoolName = Literal["segment", "coordinator", "replica", "store"]
"""`segment`: segment jobs. `coordinator`: the coordinator, one process that starts and ends a job's
training, and trains itself while there are no replicas. `replica`: trainers beside a coordinator.
`store`: embedding stores. The names are part of process names in the log."""
Status = Literal["starting", "running", "leaving"]
Phase = Literal["submitted", "waiting", "running", "draining", "drained", "finished", "failed"]
ENDED_PHASES: tuple[Phase, ...] = ("drained", "finished", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolProcess:
    """One process that was started and has not ended."""

    name: str
    """`<pool>-<number>.<attempt>`, unique in the job over all attempts."""
    pool: PoolName
    number: int
    status: Status
    """`leaving`: asked to leave, or being stopped."""
    cpus: float
    memory_bytes: int
    workers: int = 1
    began_sec: float
    readings: tuple[tuple[int, int], ...] = ()
    """Positions, and resident bytes at each."""
    busy_cores: float | None = None
    memory_before: int | None = None
    """Its memory before a resize that is in flight."""
    cpus_before: float | None = None
    """Its cores before a resize that is in flight."""
    fixed: bool = False
    """Whether more memory was refused, so that it cannot be raised in place."""
    cpu_resize_refused_at: float | None = None
    mem_shrink_refused_at: float | None = None

    @property
    def held_cpus(self) -> float:
        """Cores that it may use: until a resize is confirmed, the larger number."""
        return max(self.cpus, self.cpus_before or 0.0)

    @property
    def held_memory(self) -> int:
        """Bytes that it may use: until a resize is confirmed, the larger number."""
        return max(self.memory_bytes, self.memory_before or 0)

    @property
    def is_changing(self) -> bool:
        """Whether a resize is in flight."""
        return self.memory_before is not None or self.cpus_before is not None

    @property
    def trains_alone(self) -> bool:
        """Whether it is a coordinator that trains itself, without replicas."""
        return self.pool == "coordinator" and self.cpus > 0

    @property
    def task_id(self) -> str:
        """`<pool>-<number>`: the name without the attempt."""
        return f"{self.pool}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffState:
    """Ends of the processes of one task before their work was done."""

    failed: int = 0
    """Times that the process reported an error."""
    lost: int = 0
    """Times that the process was killed since its job last made progress."""
    retry_sec: float = 0.0
    """Time before which the task is not restarted."""


CORE_TICKS = 12
"""Ticks at constant sizes and cores that make one reading of cores; at least 60 s."""
CORE_STEPS = 20
"""Fewest steps of a reading."""
MAX_STEPS = 512
"""Most steps of a reading, the latest ones."""
IDLE_CPUS = 0.001
"""Busy cores assumed for an idle process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageWindow:
    """Core usage and step times since the number or the cores of the processes last changed."""

    sizes: TrainingSizes = (0, 0)
    """Trainers and stores."""
    cpus: tuple[float, ...] = ()
    """Cores of each trainer and, if there are stores, of each store."""
    busy: tuple[tuple[float, ...], ...] = ()
    """By tick, the busy cores of the busiest process of each pool."""
    step_sec: tuple[float, ...] = ()
    has_new_steps: bool = False
    """Whether steps were committed since the previous tick."""

    @property
    def is_complete(self) -> bool:
        """Whether it makes a reading."""
        return len(self.busy) >= CORE_TICKS and len(self.step_sec) >= CORE_STEPS

    def with_steps(self, event: Stepped) -> UsageWindow:
        """Return the window with the steps of an event, if they were made at its sizes."""
        if event.num_replicas != self.sizes[0] or not event.seconds:
            return self
        step_sec = (*self.step_sec, *event.seconds)[-MAX_STEPS:]
        return replace(self, step_sec=step_sec, has_new_steps=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """The predicted duration of a step."""

    num_replicas: int
    seconds: float
    low: float
    """Lower end of the 90 % interval."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What decisions about a job depend on."""

    name: str
    submitted_sec: float
    document: str
    schedule: ScheduleConfig | None = None
    """The schedule as submitted."""
    snapshot: PlanInputs
    num_segments: int
    phase: Phase = "submitted"
    sizes: PoolSizes | None = None
    """Target sizes of its pools; None while it waits for budget."""
    has_replicas: bool = False
    """Whether replicas train beside its coordinator; stays set once there were several."""
    worker_memory: int
    replica_memory: int
    store_memory: int
    worker_peak: int = 0
    """Largest bytes of a pipeline worker that were read, averaged over its segment job."""
    replica_cpus: float
    store_cpus: float
    usage: UsageWindow = field(default_factory=UsageWindow)
    """The next reading of cores and step times, while it is collected."""
    cores: CoreReadings = field(default_factory=CoreReadings)
    steps_suspect: bool = False
    """Whether its steps may be slow for lack of cores; such steps are not fitted."""
    spare_ticks: Mapping[str, int] = field(default_factory=dict[str, int])
    """By pool, consecutive ticks at which it had memory to spare."""
    processes: Mapping[str, PoolProcess] = field(default_factory=dict[str, PoolProcess])
    built: frozenset[int] = frozenset()
    """Committed segments."""
    attempts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Starts by task."""
    backoffs: Mapping[str, BackoffState] = field(default_factory=dict[str, BackoffState])
    """Failures by task."""
    replaced: frozenset[str] = frozenset()
    """Tasks whose process was replaced once because it was slow."""
    next_step: int = 0
    """The step after the last committed one."""
    num_trained: int = 0
    """Samples trained, over all epochs."""
    correction: Correction = field(default_factory=Correction)
    checked_sec: float = 0.0
    """Time of the last tick at which its sizes were compared."""
    predicted_step: StepPrediction | None = None
    """What was predicted then, at its sizes."""
    verdict: str = ""
    """Why its sizes changed, or did not, then."""
    shortage: str = ""
    """What the next process needs that the budget does not have; empty if nothing is lacking."""
    steps: Window = field(default_factory=Window)
    builds: Window = field(default_factory=Window)
    load: LoadKnown | None = None
    num_stores: int | None = None
    """Stores of the job; None before training starts."""
    stores: tuple[int, ...] = ()
    """Numbers of its stores in order of creation; the last ones are removed first."""
    owners: tuple[int, ...] = ()
    """Store of each slot range; empty before the first store runs."""
    moving: tuple[int, ...] = ()
    """Slot ranges that are moving between stores, until a move of them has succeeded."""
    moving_from: int = 0
    moving_to: int = 0
    move_failed_sec: float | None = None
    """Time at which the move failed, which will be repeated; None if none did."""
    num_failed_moves: int = 0
    """Consecutive moves that failed."""

    @property
    def remaining_segments(self) -> int:
        """Segments that are not committed."""
        return self.num_segments - len(self.built)

    @property
    def num_steps(self) -> int:
        """Steps of all epochs, as far as the size of the data is known."""
        facts, train = self.snapshot.facts, self.snapshot.job.train
        return -(-facts.num_train_samples * train.epochs // train.batch_samples)

    @property
    def num_serving(self) -> int:
        """Stores that own slots."""
        return len(set(self.owners)) if self.stores and self.owners else self.num_stores or 0

    @property
    def running_stores(self) -> list[int]:
        """Numbers of the stores that run."""
        return [p.number for p in self.of_pool("store") if p.status == "running"]

    @property
    def trainers(self) -> list[PoolProcess]:
        """The coordinator and the replicas."""
        return [*self.of_pool("coordinator"), *self.of_pool("replica")]

    def of_pool(self, pool: PoolName) -> list[PoolProcess]:
        """Return the live processes of one pool, by number."""
        processes = [p for p in self.processes.values() if p.pool == pool]
        return sorted(processes, key=lambda p: (p.number, p.name))

    def memory_of(self, pool: PoolName) -> int:
        """Return the bytes of the next process of a pool; of each worker of a segment job."""
        if pool == "segment":
            return self.worker_memory
        return self.store_memory if pool == "store" else self.replica_memory

    def with_memory(self, pool: PoolName, memory_bytes: int) -> JobState:
        """Return the job with other memory for the next processes of a pool."""
        if pool == "segment":
            return replace(self, worker_memory=memory_bytes)
        if pool == "store":
            return replace(self, store_memory=memory_bytes)
        return replace(self, replica_memory=memory_bytes)

    def with_process(self, process: PoolProcess) -> JobState:
        """Return the job with a process added or replaced."""
        return replace(self, processes={**self.processes, process.name: process})

    def usage_after_tick(self) -> UsageWindow:
        """Return the usage window with one more tick; a new one if sizes or cores changed.

        Ticks without new steps are left out, because processes that wait for data are idle.
        """
        trainers, stores = [p for p in self.trainers if p.cpus], self.of_pool("store")
        pools, sizes = [pool for pool in (trainers, stores) if pool], (len(trainers), len(stores))
        if not trainers or any(p.status != "running" or p.is_changing for p in trainers + stores):
            return UsageWindow(sizes=sizes)
        cpus = tuple(min(p.cpus for p in pool) for pool in pools)
        usage = self.usage
        if (usage.sizes, usage.cpus) != (sizes, cpus):
            usage = UsageWindow(sizes=sizes, cpus=cpus)
        busy_cores = [[p.busy_cores for p in pool] for pool in pools]
        if not usage.has_new_steps or any(busy is None for pool in busy_cores for busy in pool):
            return replace(usage, has_new_steps=False)
        busy = tuple(max(IDLE_CPUS, *filter(None, pool), IDLE_CPUS) for pool in busy_cores)
        return replace(usage, busy=(*usage.busy, busy), has_new_steps=False)


def job_of_document(document: str, name: str, schedule: ScheduleConfig | None) -> Job:
    """Return the job of a file with this schedule, or for None with the budget of Pods.

    Raises:
        SchemaError: the file is invalid.
    """
    job = parse_job(document, name)
    return replace(job, schedule=schedule or cluster_schedule(job.schedule))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All jobs and what they share."""

    now_sec: float = 0.0
    """Time of the last event."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    resizes: bool = False
    largest_job: int | None = None
    jobs: Mapping[str, JobState] = field(default_factory=dict[str, JobState])
    """By name, in order of submission."""

    @property
    def by_priority(self) -> list[JobState]:
        """The jobs that have not ended: highest priority first, then in order of submission."""
        live = [job for job in self.jobs.values() if job.phase not in ENDED_PHASES]
        return sorted(live, key=lambda job: -job.snapshot.job.schedule.priority)

    @property
    def used(self) -> tuple[float, int]:
        """Cores and bytes that live processes hold."""
        live = [p for job in self.jobs.values() for p in job.processes.values()]
        return sum(p.held_cpus for p in live), sum(p.held_memory for p in live)

    def with_budget(self, event: BudgetSet) -> State:
        """Return the state with another budget."""
        budget = replace(
            self.budget,
            cpus=event.cpus,
            memory=event.memory_bytes,
            time_cost_exponent=event.time_cost_exponent,
        )
        return replace(self, budget=budget, resizes=event.resizes, largest_job=event.largest_job)

    def with_job(self, job: JobState) -> State:
        """Return the state with a job added or replaced."""
        return replace(self, jobs={**self.jobs, job.name: job})


# What is booked.


def booked_resources(job: JobState, sizes: PoolSizes | None) -> tuple[float, int]:
    """Return the cores and bytes of the pools at these sizes; none while the job waits."""
    if sizes is None:
        return 0.0, 0
    workers = sizes.segment_jobs * sizes.workers_per_job
    cpus = workers * job.snapshot.job.schedule.preprocessing.worker.cpus
    cpus += sizes.num_replicas * job.replica_cpus + sizes.num_stores * job.store_cpus
    memory = workers * job.worker_memory
    memory += sizes.num_replicas * job.replica_memory + sizes.num_stores * job.store_memory
    return cpus, memory


def shares_of(state: State) -> dict[str, tuple[float, int]]:
    """Return the cores and bytes that are booked for each job that has not ended."""
    return {job.name: booked_resources(job, job.sizes) for job in state.by_priority}


def available_budget(
    state: State, job: JobState, shares: Mapping[str, tuple[float, int]] | None = None
) -> BudgetConfig:
    """Return the budget of a job with sizes: what the others leave, and at least its own share."""
    shares = shares_of(state) if shares is None else shares
    others = [share for name, share in shares.items() if name != job.name]
    cpus, memory = booked_resources(job, job.sizes)
    return replace(
        state.budget,
        cpus=max(cpus, state.budget.cpus - sum(cpus for cpus, _ in others)),
        memory=max(memory, state.budget.memory - sum(memory for _, memory in others)),
    )


# Decisions.

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
"""Kinds of decisions; those after `resize` only record a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One decision with its reason."""

    verb: Verb
    """`drain` asks a process to leave without losing work; `stop` ends it."""
    job: str
    process: str = ""
    reason: str
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers behind the reason, and those that the driver needs."""


def sizes_as_values(sizes: PoolSizes) -> dict[str, float]:
    """Return sizes as the values of a decision."""
    return {name: float(value) for name, value in asdict(sizes).items()}
