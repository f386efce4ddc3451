"""The data of the status page: a summary of the controller's state and journal.

`View` is also the JSON object of `status --json`, so its field names stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from presage.scheduler.controller.journal import Incident, Journal, Kind, Speed, Usage, hour_price
from presage.scheduler.controller.predictions import (
    RemainingWork,
    lookahead_steps,
    predict_step,
    remaining_work,
)
from presage.scheduler.controller.slots import (
    accesses_at,
    format_spans,
    future_step,
    store_loads,
    target_stores,
)
from presage.scheduler.controller.state import (
    ENDED_PHASES,
    JobState,
    Phase,
    PoolName,
    PoolProcess,
    State,
    Status,
    available_budget,
)
from presage.scheduler.model.pools import GIB, MIB
from presage.scheduler.model.predict import training_setting
from presage.scheduler.model.throughput import predict_seconds
from presage.scheduler.planner.candidates import predict_candidates
from presage.schemas.run.records import Decision

POOLS: tuple[PoolName, ...] = ("segment", "coordinator", "replica", "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The status of a scheduler."""

    begun_sec: float
    """Time of the first event."""
    now_sec: float
    """Time of the last event."""
    num_events: int
    cpus: float
    memory_bytes: int
    used_cpus: float
    used_memory_bytes: int
    usage: tuple[Usage, ...]
    """Reserved resources over time, oldest first."""
    jobs: tuple[JobView, ...]
    incidents: tuple[Incident, ...]
    """The latest incidents, newest first."""
    decisions: tuple[Decision, ...]
    """The latest decisions, newest first."""
    num_decided: tuple[tuple[str, str, int], ...]
    num_incidents: tuple[tuple[str, Kind, int], ...]

    @property
    def is_over(self) -> bool:
        """Whether all jobs and their processes have ended."""
        return all(job.phase in ENDED_PHASES and not job.pools for job in self.jobs)

    def is_open(self, incident: Incident) -> bool:
        """Return whether an incident's process needs a replacement that does not run yet."""
        live = {job.name for job in self.jobs if job.phase not in ENDED_PHASES}
        return bool(incident.process) and incident.back_sec is None and incident.job in live


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as the status page shows it."""

    name: str
    phase: Phase
    priority: int
    since_sec: float
    ended_sec: float | None
    deadline_sec: float | None
    """Time limit after its submission."""
    segments_built: int
    num_segments: int
    next_step: int
    num_trained: int
    """Trained samples, counted in every epoch."""
    num_to_train: int
    """Known samples of all epochs; of a finished job, the trained ones."""
    pools: tuple[PoolView, ...]
    stores: Stores | None
    speeds: tuple[Speed, ...]
    """Measured speeds, oldest first."""
    forecast: JobForecast | None
    """None unless it runs."""
    spent: float
    hour_price: float
    """Cost of one more hour with the current reservations."""
    last_reason: str
    """Reason of the latest decision on the job as a whole."""
    verdict: str
    """Why its sizes changed, or did not, at the last tick."""
    shortage: str
    """What its next process needs that the budget does not have; empty if nothing is lacking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The processes of one kind of a job."""

    name: PoolName
    wanted: int
    """Target number of processes."""
    processes: tuple[ProcessView, ...]

    def count(self, status: Status) -> int:
        """Return the number of processes with this status."""
        return sum(process.status == status for process in self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One live process."""

    name: str
    """`<pool>-<number>.<attempt>`."""
    status: Status
    since_sec: float
    cpus: float
    busy_cores: float | None
    """Last measured use of cores; None before the first one."""
    limit_bytes: int
    """Reserved memory, 0 if it is outside the budget."""
    resident_bytes: int | None
    """Last measured memory; None before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of a job."""

    stores: tuple[StoreView, ...]
    """By number, with possible gaps."""
    owners: tuple[int, ...]
    """Store of each slot range; empty before the first store ran."""
    move: Move | None
    step: int | None
    """The current step; None without an oracle."""
    step_ahead: int | None
    """The step for which hot ranges are predicted; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """One store: it owns slot ranges, has a process, or both."""

    number: int
    process: ProcessView | None
    ranges: tuple[int, ...]
    share: float | None
    """Share of the accesses around the current step; None if unknown."""
    share_ahead: float | None
    """The same around `Stores.step_ahead`, with the current owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Slot ranges that are being moved."""

    ranges: tuple[int, ...]
    source: int
    """The store that owns them until the move ends."""
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForecast:
    """Predictions for a job at its current sizes."""

    left_sec: float
    """Seconds until training ends."""
    left_cost: float
    """Cost until then."""
    samples_per_sec: float
    """Training speed while segments are available."""
    rows_per_sec: float | None
    """Preparation speed, start-up included; None when all segments are built."""
    low: float
    """Lower end of the 90 % interval of step times, relative to the prediction."""
    high: float
    confident: bool
    """Whether the interval is narrow enough to act upon."""


def view_of(state: State, journal: Journal) -> View:
    """Return the view of a state; a pure function."""
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


def _job_view(job: JobState, state: State, journal: Journal) -> JobView:
    facts, config = job.snapshot.facts, job.snapshot.job
    deadline = config.schedule.deadline
    decisions = [
        d for d in journal.decisions if d.job == job.name and (not d.process or d.action == "fail")
    ]
    pools = tuple(_pool_view(job, name) for name in POOLS)
    remaining = None
    if job.sizes is not None and job.phase == "running":
        remaining = remaining_work(job, state, available_budget(state, job))
    return JobView(
        name=job.name,
        phase=job.phase,
        priority=config.schedule.priority,
        since_sec=job.submitted_sec,
        ended_sec=journal.ended_sec.get(job.name),
        deadline_sec=None if deadline is None else deadline.total_seconds(),
        segments_built=len(job.built),
        num_segments=job.num_segments,
        next_step=job.next_step,
        num_trained=job.num_trained,
        num_to_train=job.num_trained
        if job.phase == "finished"
        else facts.num_train_samples * config.train.epochs,
        pools=tuple(pool for pool in pools if pool.processes or pool.wanted),
        stores=_stores(job, remaining),
        speeds=journal.speeds.get(job.name, ()),
        forecast=_forecast(job, remaining),
        spent=journal.spent.get(job.name, 0.0),
        hour_price=hour_price(job),
        last_reason=decisions[-1].reason if decisions else "",
        verdict=job.verdict if job.phase == "running" else "",
        shortage=job.shortage,
    )


def _pool_view(job: JobState, name: PoolName) -> PoolView:
    return PoolView(
        name=name,
        wanted=_target_size(job, name),
        processes=tuple(map(_process_view, job.of_pool(name))),
    )


def _target_size(job: JobState, name: PoolName) -> int:
    sizes = job.sizes
    if sizes is None:
        return 0
    if name == "segment":
        return min(sizes.segment_jobs if job.built else 1, job.remaining_segments)
    if not job.built:
        return 0
    replicas = sizes.num_replicas if job.has_replicas else 0
    stores = target_stores(sizes) if job.stores else 0
    return {"coordinator": 1, "replica": replicas, "store": stores}[name]


def _process_view(process: PoolProcess) -> ProcessView:
    return ProcessView(
        name=process.name,
        status=process.status,
        since_sec=process.began_sec,
        cpus=process.cpus,
        busy_cores=process.busy_cores,
        limit_bytes=process.memory_bytes,
        resident_bytes=process.readings[-1][1] if process.readings else None,
    )


def _forecast(job: JobState, remaining: RemainingWork | None) -> JobForecast | None:
    if remaining is None or job.sizes is None:
        return None
    snapshot, config, grid = remaining.snapshot, remaining.config, job.sizes.grid
    steps = predict_seconds(remaining.models.training, training_setting(snapshot, config, grid))
    predictions = predict_candidates(grid, snapshot, config, remaining.models)
    return JobForecast(
        left_sec=float(predictions.predicted_sec[0]),
        left_cost=float(predictions.cost[0]),
        samples_per_sec=float(predictions.samples_per_sec[0]),
        rows_per_sec=float(predictions.rows_per_sec[0]) if job.remaining_segments else None,
        low=float(steps.low[0] / steps.seconds[0]),
        high=float(steps.high[0] / steps.seconds[0]),
        confident=bool(steps.confident[0]),
    )


def _stores(job: JobState, remaining: RemainingWork | None) -> Stores | None:
    processes = {process.number: process for process in job.of_pool("store")}
    owners = () if job.phase in ENDED_PHASES else job.owners
    numbers = sorted(processes.keys() | set(owners))
    if not numbers:
        return None
    now, ahead = future_step(job, 0), None
    if remaining is not None and job.sizes is not None:
        num_steps = lookahead_steps(remaining, predict_step(remaining, job.sizes).seconds)
        ahead = None if num_steps is None else future_step(job, num_steps)
    shares, shares_ahead = (_shares(job, owners, numbers, step) for step in (now, ahead))
    return Stores(
        stores=tuple(
            StoreView(
                number=number,
                process=_process_view(processes[number]) if number in processes else None,
                ranges=tuple(i for i, owner in enumerate(owners) if owner == number),
                share=shares.get(number),
                share_ahead=shares_ahead.get(number),
            )
            for number in numbers
        ),
        owners=owners,
        move=_move(job),
        step=now,
        step_ahead=ahead,
    )


def _shares(
    job: JobState, owners: Sequence[int], numbers: Sequence[int], step: int | None
) -> Mapping[int, float]:
    """Return each store's share of the accesses around a step; empty if unknown."""
    distinct = set(owners)
    if len(distinct) == 1:  # it serves all accesses
        return {number: float(number in distinct) for number in numbers}
    if step is None or job.load is None or not distinct:
        return {}
    loads = store_loads(owners, accesses_at(job.load, step).tolist(), numbers)
    total = sum(loads.values())
    return {store: load / total for store, load in loads.items()} if total else {}


def _move(job: JobState) -> Move | None:
    if not job.moving or job.phase in ENDED_PHASES:
        return None
    return Move(ranges=job.moving, source=job.moving_from, target=job.moving_to)


# Formatting for the page and the terminal.


def notes_of(job: JobView) -> list[str]:
    """Return what a job waits for, and why its sizes changed or did not."""
    notes = [f"waiting for resources: {job.shortage}"] if job.shortage else []
    return [*notes, f"sizes at the last tick: {job.verdict}"] if job.verdict else notes


def describe_move(move: Move) -> str:
    """Return what moves from which store to which."""
    many = len(move.ranges) > 1
    subject = f"ranges {format_spans(move.ranges)} are" if many else f"range {move.ranges[0]} is"
    return f"{subject} moving from {move.source} to {move.target}"


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
    """Return the time of day in UTC.

    Example:
        >>> clock(3661.5)
        '01:01:01'
    """
    return f"{datetime.fromtimestamp(time_sec, UTC):%H:%M:%S}"


def memory(num_bytes: float) -> str:
    """Return bytes with a binary unit.

    Example:
        >>> memory(3 << 29), memory(300 << 20)
        ('1.50 GiB', '300 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def three_digits(value: float) -> str:
    """Return about three significant digits.

    Example:
        >>> three_digits(12345.6), three_digits(12.34), three_digits(0.01234), three_digits(0)
        ('12,346', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share in per cent.

    Example:
        >>> percent(0.831), percent(1.2)
        ('83 %', '120 %')
    """
    return f"{100 * share:.0f} %"
