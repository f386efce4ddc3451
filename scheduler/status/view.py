"""The data of the status page: a summary of the controller's state and log."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from scheduler.controller.reconcile import target_stores
from scheduler.controller.remaining import RemainingWork, available_budget, remaining_work
from scheduler.controller.slots import format_spans, store_loads
from scheduler.controller.state import (
    ENDED_PHASES,
    JobState,
    Phase,
    PoolName,
    Process,
    State,
    Status,
)
from scheduler.controller.watch import accesses_at, future_step, lookahead_steps, predict_step_sec
from scheduler.model.fit import predict_seconds
from scheduler.model.grid import GIB, MIB, training_resources
from scheduler.model.predict import training_setting
from scheduler.planner.candidates import SEC_PER_HOUR, predict_candidates
from scheduler.status.journal import Incident, Journal, Kind, Speed, Usage, hour_price
from schemas.run_log import Decision


def duration(seconds: float) -> str:
    """Return a time span.

    Example:
        >>> duration(4.25), duration(61), duration(7384), duration(200000)
        ('4.2 s', '1 min 1 s', '2 h 3 min', '2 d 7 h')
    """
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(time_sec: float) -> str:
    """Return the time of day.

    Example:
        >>> clock(3661.5)
        '01:01:01'
    """
    return f"{datetime.fromtimestamp(time_sec, UTC):%H:%M:%S}"


def moment(time_sec: float) -> str:
    """Return a moment as HTML wants it.

    Example:
        >>> moment(0.0)
        '1970-01-01T00:00:00Z'
    """
    return f"{datetime.fromtimestamp(time_sec, UTC):%Y-%m-%dT%H:%M:%SZ}"


def memory(num_bytes: float) -> str:
    """Return bytes with a binary unit.

    Example:
        >>> memory(3 << 29), memory(300 << 20)
        ('1.50 GiB', '300 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def digits(value: float) -> str:
    """Return about three significant digits.

    Example:
        >>> digits(12345.6), digits(12.34), digits(0.01234), digits(0)
        ('12,346', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share.

    Example:
        >>> percent(0.831), percent(1.2)
        ('83 %', '120 %')
    """
    return f"{100 * share:.0f} %"


def visible(text: str) -> str:
    """Return a text in which control characters, and those that turn its direction, are marked.

    Example:
        >>> visible(chr(27) + "[2J" + chr(10)) == chr(0xFFFD) + "[2J" + chr(0xFFFD)
        True
    """
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf") else c for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One live process."""

    name: str
    """`<pool>-<number>.<attempt>`."""
    status: Status
    """What it does."""
    since_sec: float
    """When it was started."""
    cpus: float
    """Cores that are booked for it."""
    busy_cores: float | None
    """Cores that it kept busy, as read last; None before."""
    limit_bytes: int
    """Memory that is booked for it, 0 where it is that of another process."""
    resident_bytes: int | None
    """Memory that was read last; None before."""


def process_view(process: Process) -> ProcessView:
    """Return what is shown of a process."""
    return ProcessView(
        name=process.name,
        status=process.status,
        since_sec=process.began_sec,
        cpus=process.cpus,
        busy_cores=process.busy_cores,
        limit_bytes=process.memory_bytes,
        resident_bytes=process.readings[-1][1] if process.readings else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """One store: it has ranges, a process, or both."""

    number: int
    """Of the store."""
    process: ProcessView | None
    """None while none lives."""
    ranges: tuple[int, ...]
    """Ranges of slots that are its own."""
    share: float | None
    """Of all accesses of the steps around now, those to its ranges; None while nobody knows."""
    share_ahead: float | None
    """The same as far ahead as hot ranges are looked for, if no range moves until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Ranges of slots that are on their way."""

    ranges: tuple[int, ...]
    """Their numbers."""
    source: int
    """The store whose they are until they have arrived."""
    target: int | None
    """The store that is to have them; None where the decision is too long ago to be kept."""


def in_words(move: Move) -> str:
    """Return what moves from where to where, as far as it is known."""
    many = len(move.ranges) > 1
    what = f"ranges {format_spans(move.ranges)} are" if many else f"range {move.ranges[0]} is"
    target = "" if move.target is None else f" to {move.target}"
    return f"{what} moving from {move.source}{target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of a job."""

    stores: tuple[StoreView, ...]
    """By number; numbers may be missing."""
    owners: tuple[int, ...]
    """Number of the store of each range; none before the first store ran."""
    move: Move | None
    """None while none moves."""
    step: int | None
    """The step of now, the last one at most; None where the oracle told nothing."""
    step_ahead: int | None
    """The step at which hot ranges are looked for; None where nobody knows."""


def stores_of(
    job: JobState, left: RemainingWork | None, decisions: Sequence[Decision]
) -> Stores | None:
    """Return who holds a job's rows; None where it has no stores, or none any more.

    Args:
        job: as it stands.
        left: of it, None unless it runs.
        decisions: on the job, oldest first.
    """
    processes = {process.number: process for process in job.of_pool("store")}
    owners = () if job.phase in ENDED_PHASES else job.owners
    numbers = sorted(processes.keys() | set(owners))
    if not numbers:
        return None
    now, num_steps = future_step(job, 0), _steps_ahead(job, left)
    ahead = None if num_steps is None else future_step(job, num_steps)
    shares, shares_ahead = (_shares(job, owners, numbers, step) for step in (now, ahead))
    return Stores(
        stores=tuple(
            StoreView(
                number=number,
                process=process_view(processes[number]) if number in processes else None,
                ranges=tuple(i for i, owner in enumerate(owners) if owner == number),
                share=shares.get(number),
                share_ahead=shares_ahead.get(number),
            )
            for number in numbers
        ),
        owners=owners,
        move=_move(job, owners, decisions),
        step=now,
        step_ahead=ahead,
    )


def _steps_ahead(job: JobState, left: RemainingWork | None) -> int | None:
    if left is None or job.sizes is None:
        return None
    return lookahead_steps(left, predict_step_sec(left, job.sizes))


def _shares(
    job: JobState, owners: Sequence[int], numbers: Sequence[int], step: int | None
) -> Mapping[int, float]:
    """Return each store's share of the accesses around a step; none while nobody knows."""
    whose = set(owners)
    if len(whose) == 1:  # all is answered by one
        return {number: float(number in whose) for number in numbers}
    if step is None or job.load is None or not whose:
        return {}
    loads = store_loads(owners, accesses_at(job.load, step).tolist(), numbers)
    whole = sum(loads.values())
    return {store: load / whole for store, load in loads.items()} if whole else {}


def _move(job: JobState, owners: Sequence[int], decisions: Sequence[Decision]) -> Move | None:
    ranges = job.moving
    if not ranges or ranges[-1] >= len(owners):
        return None
    moves = [d.values for d in decisions if d.action == "migrate"]
    known = bool(moves) and moves[-1]["slots"] == ranges[0]
    target = int(moves[-1]["target"]) if known else None
    return Move(ranges=ranges, source=owners[ranges[0]], target=target)


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
        return all(job.phase in ENDED_PHASES and not job.pools for job in self.jobs)

    def is_open(self, incident: Incident) -> bool:
        """Tell whether something that is gone still has no successor, and needs one."""
        live = {job.name for job in self.jobs if job.phase not in ENDED_PHASES}
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


def forecast(job: JobState, left: RemainingWork | None) -> Forecast | None:
    """Return what is predicted of a job's sizes for what is left of it; None unless it runs."""
    if left is None or job.sizes is None:
        return None
    grid = job.sizes.grid
    steps = predict_seconds(
        left.models.training, training_setting(left.snapshot, left.config, grid)
    )
    found = predict_candidates(grid, left.snapshot, left.config, left.models)
    seconds, cost = float(found.predicted_sec[0]), float(found.cost[0])
    if not job.remaining_segments:
        rest = job.snapshot.facts.num_train_samples * job.snapshot.job.train.epochs
        seconds = max(0, rest - job.num_trained) / float(found.samples_per_sec[0])
        price = training_resources(grid, left.config).hour_price(left.config.budget)
        cost = seconds * float(price[0]) / SEC_PER_HOUR
    return Forecast(
        left_sec=seconds,
        left_cost=cost,
        samples_per_sec=float(found.samples_per_sec[0]),
        rows_per_sec=float(found.rows_per_sec[0]) if job.remaining_segments else None,
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
        left = remaining_work(job, state.now_sec, available_budget(state, job), state.runner)
    return JobView(
        name=job.name,
        phase=job.phase,
        priority=document.schedule.priority,
        since_sec=job.submitted_sec,
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
        return min(sizes.segment_jobs if job.built else 1, job.remaining_segments)
    if not job.built:
        return 0
    replicas = sizes.num_replicas if job.grouped else 0
    stores = target_stores(sizes) if job.stores else job.num_stores or 0
    return {"lead": 1, "replica": replicas, "store": stores}[name]
