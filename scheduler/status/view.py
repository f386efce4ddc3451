"""What people and monitors are shown: one plain picture of the machine's state and its journal."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.fit import predict_seconds
from scheduler.grid import training_resources
from scheduler.machine.elastic import wanted_stores
from scheduler.machine.left import Left, left_of, room_of
from scheduler.machine.state import ENDED, JobState, Phase, PoolName, State, Status
from scheduler.models import training_setting
from scheduler.predictions import SEC_PER_HOUR, predict
from scheduler.status.journal import Incident, Journal, Kind, Usage, hour_price
from scheduler.status.processes import ProcessView, process_view
from scheduler.status.speeds import Speed
from scheduler.status.stores import Stores, stores_of
from schemas.events import Decision

POOLS: tuple[PoolName, ...] = ("segment", "lead", "replica", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """Processes that do the same for a job."""

    name: PoolName
    """What they do."""
    wanted: int
    """How many there are to be now."""
    processes: tuple[ProcessView, ...]
    """Those that live."""

    def count(self, status: Status) -> int:
        """Return how many do that."""
        return sum(process.status == status for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is predicted of a job at its sizes."""

    left_sec: float
    """Seconds until its model is trained."""
    left_cost: float
    """Price of these."""
    samples_per_sec: float
    """Samples trained while there are segments."""
    rows_per_sec: float | None
    """Samples prepared, start-up of segment jobs included; None when all segments are built."""
    low: float
    """Lower end of the 90 % interval of step times, as a share of the predicted time."""
    high: float
    """Upper end."""
    confident: bool
    """Whether that is narrow enough to act upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job."""

    name: str
    """Of the job."""
    phase: Phase
    """What becomes of it."""
    priority: int
    """Larger goes first."""
    since_sec: float
    """When it was submitted."""
    ended_sec: float | None
    """When it ended."""
    deadline_sec: float | None
    """Wanted seconds from then."""
    segments_built: int
    """Segments that are committed."""
    num_segments: int
    """Of its input."""
    next_step: int
    """Steps that are committed."""
    num_trained: int
    """Samples trained, every epoch counted."""
    num_to_train: int
    """Samples of all epochs, as far as they are known; the trained ones when it is finished."""
    pools: tuple[PoolView, ...]
    """Those with processes, or that are to have some."""
    stores: Stores | None
    """Who holds its rows; None where it has no stores."""
    speeds: tuple[Speed, ...]
    """Measured, oldest first."""
    forecast: Forecast | None
    """None unless it runs."""
    spent: float
    """Price so far."""
    hour_price: float
    """Price of one more hour of what is booked now."""
    last_reason: str
    """Of the latest decision on the job itself, not on one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that is shown."""

    begun_sec: float
    """Time of the first event."""
    now_sec: float
    """Time of the last one."""
    num_events: int
    """Events so far."""
    cpus: float
    """Cores of the budget."""
    memory_bytes: int
    """Memory of the budget."""
    used_cpus: float
    """Cores that are booked."""
    used_memory_bytes: int
    """Memory that is booked."""
    usage: tuple[Usage, ...]
    """What was booked before, oldest first."""
    jobs: tuple[JobView, ...]
    """In the order in which they were submitted."""
    incidents: tuple[Incident, ...]
    """The latest ones, newest first."""
    decisions: tuple[Decision, ...]
    """The latest ones, newest first."""
    num_decided: tuple[tuple[str, str, int], ...]
    """Job, what was done, and how often."""
    num_incidents: tuple[tuple[str, Kind, int], ...]
    """Job, kind, and how often."""

    @property
    def is_over(self) -> bool:
        """Whether every job has ended, with all its processes."""
        return all(job.phase in ENDED and not job.pools for job in self.jobs)

    def is_open(self, incident: Incident) -> bool:
        """Tell whether something that is gone still has no successor, and needs one."""
        live = {job.name for job in self.jobs if job.phase not in ENDED}
        return bool(incident.process) and incident.back_sec is None and incident.job in live


def view_of(state: State, journal: Journal) -> View:
    """Return the picture of one moment; nothing here reads a clock or a file."""
    cpus, memory_bytes = state.used
    decided, incidents = journal.num_decided.items(), journal.num_incidents.items()
    return View(
        begun_sec=journal.begun_sec,
        now_sec=state.now_sec,
        num_events=journal.num_events,
        cpus=state.budget.cpus,
        memory_bytes=state.budget.memory,
        used_cpus=cpus,
        used_memory_bytes=memory_bytes,
        usage=journal.usage,
        jobs=tuple(_job_view(job, state, journal) for job in state.jobs.values()),
        incidents=journal.incidents[::-1],
        decisions=journal.decisions[::-1],
        num_decided=tuple((*key, count) for key, count in sorted(decided)),
        num_incidents=tuple((*key, count) for key, count in sorted(incidents)),
    )


def forecast(job: JobState, left: Left | None) -> Forecast | None:
    """Return what is predicted of a job's sizes for what is left of it; None unless it runs."""
    if left is None or job.sizes is None:
        return None
    grid = job.sizes.grid
    steps = predict_seconds(
        left.models.training, training_setting(left.snapshot, left.config, grid)
    )
    found = predict(grid, left.snapshot, left.config, left.models)
    seconds, cost = float(found.predicted_sec[0]), float(found.cost[0])
    if not job.left_segments:
        rest = job.snapshot.facts.num_train_samples * job.snapshot.job.train.epochs
        seconds = max(0, rest - job.num_trained) / float(found.samples_per_sec[0])
        price = training_resources(grid, left.config).hour_price(left.config.budget)
        cost = seconds * float(price[0]) / SEC_PER_HOUR
    return Forecast(
        left_sec=seconds,
        left_cost=cost,
        samples_per_sec=float(found.samples_per_sec[0]),
        rows_per_sec=float(found.rows_per_sec[0]) if job.left_segments else None,
        low=float(steps.low[0] / steps.seconds[0]),
        high=float(steps.high[0] / steps.seconds[0]),
        confident=bool(steps.confident[0]),
    )


def _job_view(job: JobState, state: State, journal: Journal) -> JobView:
    facts, document = job.snapshot.facts, job.snapshot.job
    deadline = document.schedule.deadline
    own = [d for d in journal.decisions if d.job == job.name and not d.process]
    pools = tuple(_pool_view(job, name) for name in POOLS)
    left = None
    if job.sizes is not None and job.phase == "running":
        left = left_of(job, state.now_sec, room_of(state, job), state.runner)
    return JobView(
        name=job.name,
        phase=job.phase,
        priority=document.schedule.priority,
        since_sec=job.since_sec,
        ended_sec=journal.ended_sec.get(job.name),
        deadline_sec=None if deadline is None else deadline.total_seconds(),
        segments_built=len(job.built),
        num_segments=job.num_segments,
        next_step=job.next_step,
        num_trained=job.num_trained,
        num_to_train=job.num_trained
        if job.phase == "finished"
        else facts.num_train_samples * document.train.epochs,
        pools=tuple(pool for pool in pools if pool.processes or pool.wanted),
        stores=stores_of(job, left, own),
        speeds=journal.speeds.get(job.name, ()),
        forecast=forecast(job, left),
        spent=journal.spent.get(job.name, 0.0),
        hour_price=hour_price(job),
        last_reason=own[-1].reason if own else "",
    )


def _pool_view(job: JobState, name: PoolName) -> PoolView:
    return PoolView(
        name=name,
        wanted=_wanted(job, name),
        processes=tuple(map(process_view, job.of_pool(name))),
    )


def _wanted(job: JobState, name: PoolName) -> int:
    """Return how many processes of a pool there are to be now."""
    sizes = job.sizes
    if sizes is None:
        return 0
    if name == "segment":
        return min(sizes.segment_jobs if job.built else 1, job.left_segments)
    if not job.built:
        return 0
    replicas = sizes.num_replicas if job.grouped else 0
    stores = wanted_stores(sizes) if job.stores else job.num_stores or 0
    return {"lead": 1, "replica": replicas, "store": stores}[name]
