"""Incidents, speeds, reservations and costs over time, computed from a log in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, TypeVar

import numpy as np

from presage.scheduler.controller.events import Ended, Event, Started, Stepped, Tick
from presage.scheduler.controller.state import ENDED_PHASES, JobState, State
from presage.scheduler.model.pools import GIB, Grid
from presage.scheduler.model.predict import fit_models, segment_setting, training_setting
from presage.scheduler.model.throughput import Prediction, predict_seconds
from presage.scheduler.planner.candidates import SEC_PER_HOUR
from presage.schemas.run.records import Decision

KEPT = 200
"""Latest decisions and incidents that are kept; the log has all."""
POINTS = 240
"""Maximum points of a curve; beyond, every second one is dropped."""

SpeedPool = Literal["preprocessing", "training"]
Kind = Literal["lost", "failed", "slow", "preempted", "memory"]
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A measured speed, and its prediction from earlier measurements."""

    time_sec: float
    pool: SpeedPool
    num_processes: int
    """Concurrent segment jobs, or replicas."""
    measured: float
    """Rows per second of one segment job, or samples per second of all replicas together."""
    predicted: float
    low: float
    """Lower end of the prediction's 90 % interval."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure, and the process that replaced the failed one."""

    time_sec: float
    job: str
    process: str
    """Empty if it affects a whole pool or job."""
    kind: Kind
    detail: str
    """Reason of the decision that followed."""
    successor: str = ""
    back_sec: float | None = None
    """When the replacement ran; None until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources reserved by all jobs from `time_sec` on."""

    time_sec: float
    cpus: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The history up to the last event."""

    begun_sec: float = 0.0
    num_events: int = 0
    decisions: tuple[Decision, ...] = ()
    """The latest ones, oldest first."""
    incidents: tuple[Incident, ...] = ()
    speeds: Mapping[str, tuple[Speed, ...]] = field(default_factory=dict[str, tuple[Speed, ...]])
    """By job, oldest first."""
    usage: tuple[Usage, ...] = ()
    """Changes of reserved resources, oldest first."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    ended_sec: Mapping[str, float] = field(default_factory=dict[str, float])
    num_decided: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    num_incidents: Mapping[tuple[str, Kind], int] = field(
        default_factory=dict[tuple[str, Kind], int]
    )


def record(
    journal: Journal, before: State, event: Event, after: State, decisions: Sequence[Decision]
) -> Journal:
    """Return the journal after one more event."""
    first = not journal.num_events
    now = after.now_sec
    incidents = _incidents(event, decisions)
    earlier = _set_successors(journal.incidents, event, now)
    return replace(
        journal,
        begun_sec=now if first else journal.begun_sec,
        num_events=journal.num_events + 1,
        decisions=(*journal.decisions, *decisions)[-KEPT:],
        incidents=(*earlier, *incidents)[-KEPT:],
        speeds=_speeds(journal.speeds, before, event),
        usage=_usage(journal.usage, after),
        spent=journal.spent if first else _spent(journal.spent, before, now),
        ended_sec=_ended_sec(journal.ended_sec, after),
        num_decided=_count(journal.num_decided, [(d.job, d.action) for d in decisions]),
        num_incidents=_count(journal.num_incidents, [(i.job, i.kind) for i in incidents]),
    )


def hour_price(job: JobState) -> float:
    """Return the cost of one hour of a job's reserved resources."""
    budget, live = job.snapshot.job.schedule.budget, job.processes.values()
    memory = sum(p.memory_bytes for p in live) / GIB
    return sum(p.cpus for p in live) * budget.cpu_hour_price + memory * budget.gib_hour_price


def thin(points: tuple[T, ...]) -> tuple[T, ...]:
    """Return at most POINTS points, including the first and the last.

    Example:
        >>> len(thin(tuple(range(240)))), thin(tuple(range(241)))[-2:]
        (240, (238, 240))
    """
    return points if len(points) <= POINTS else (*points[:-1:2], points[-1])


def _incidents(event: Event, decisions: Sequence[Decision]) -> list[Incident]:
    is_lost = isinstance(event, Ended) and event.outcome in ("lost", "oom")
    ended: Kind = "lost" if is_lost else "failed"
    kinds: dict[str, Kind] = {
        "replace": ended if isinstance(event, Ended) else "slow",
        "fail": ended,
        "hand back": "preempted",
        "give memory": "memory",
    }
    return [
        Incident(
            time_sec=decision.time_sec,
            job=decision.job,
            process=decision.process,
            kind=kinds[decision.action],
            detail=decision.reason,
        )
        for decision in decisions
        if decision.action in kinds
    ]


def _set_successors(
    incidents: tuple[Incident, ...], event: Event, now_sec: float
) -> tuple[Incident, ...]:
    """Set the replacement in the open incidents of a process's task when the process starts."""
    if not isinstance(event, Started):
        return incidents
    task = event.process.rpartition(".")[0]
    return tuple(
        replace(incident, successor=event.process, back_sec=now_sec)
        if incident.back_sec is None
        and incident.job == event.job
        and incident.process != event.process
        and incident.process.rpartition(".")[0] == task
        else incident
        for incident in incidents
    )


def _speeds(
    speeds: Mapping[str, tuple[Speed, ...]], before: State, event: Event
) -> Mapping[str, tuple[Speed, ...]]:
    speeds = dict(speeds)
    for part in event.steps if isinstance(event, Tick) else (event,):
        if isinstance(part, Stepped | Ended) and part.job in before.jobs:
            job = before.jobs[part.job]
            trained = isinstance(part, Stepped)
            speed = training_speed(job, part) if trained else building_speed(job, part)
            if speed is not None:
                speeds[part.job] = thin((*speeds.get(part.job, ()), speed))
    return speeds


def training_speed(job: JobState, event: Stepped) -> Speed | None:
    """Return the speed of reported steps beside the prediction of the last tick.

    None if the steps were not timed.
    """
    if not event.seconds:
        return None
    batch, last = job.snapshot.job.train.batch_samples, job.predicted_step
    if last is not None and last.num_replicas == event.num_replicas:
        predicted = (last.seconds, last.low, last.high)
    else:  # since the last tick the job has started, or its sizes have changed
        config = job.snapshot.job.schedule
        models = fit_models(job.snapshot, config, job.steps, job.builds)
        sizes = Grid.of_rows(np.array([(1, 1, event.num_replicas, job.num_stores or 0)]))
        setting = training_setting(job.snapshot, config, sizes)
        predicted = _interval(predict_seconds(models.training, setting))
    seconds = median(event.seconds)
    return _speed(event.time_sec, "training", event.num_replicas, batch, seconds, predicted)


def building_speed(job: JobState, event: Ended) -> Speed | None:
    """Return the speed of a completed segment job, None if it was not measured."""
    process = job.processes.get(event.process)
    timed = event.work_sec > 0.0 and event.num_samples > 0
    if process is None or process.pool != "segment" or event.outcome != "done" or not timed:
        return None
    config, concurrent = job.snapshot.job.schedule, len(job.of_pool("segment"))
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    sizes = Grid.of_rows(np.array([(concurrent, process.workers, 1, 0)]))
    setting = replace(segment_setting(models, job.snapshot, config, sizes), rows=event.num_samples)
    prediction = predict_seconds(models.segments, setting)
    rows, seconds = event.num_samples, event.work_sec
    return _speed(event.time_sec, "preprocessing", concurrent, rows, seconds, _interval(prediction))


def _interval(prediction: Prediction) -> tuple[float, float, float]:
    return float(prediction.seconds[0]), float(prediction.low[0]), float(prediction.high[0])


def _speed(
    time_sec: float,
    pool: SpeedPool,
    num_processes: int,
    num_samples: int,
    seconds: float,
    predicted: tuple[float, float, float],
) -> Speed:
    return Speed(
        time_sec=time_sec,
        pool=pool,
        num_processes=num_processes,
        measured=num_samples / seconds,
        predicted=num_samples / predicted[0],
        low=num_samples / predicted[2],
        high=num_samples / predicted[1],
    )


def _usage(usage: tuple[Usage, ...], after: State) -> tuple[Usage, ...]:
    cpus, memory_bytes = after.used
    if usage and (usage[-1].cpus, usage[-1].memory_bytes) == (cpus, memory_bytes):
        return usage
    now = Usage(time_sec=after.now_sec, cpus=cpus, memory_bytes=memory_bytes)
    return thin((*usage, now))


def _spent(spent: Mapping[str, float], before: State, now_sec: float) -> Mapping[str, float]:
    hours = (now_sec - before.now_sec) / SEC_PER_HOUR
    costs = {job.name: hour_price(job) * hours for job in before.jobs.values() if job.processes}
    return {**spent, **{name: spent.get(name, 0.0) + cost for name, cost in costs.items()}}


def _ended_sec(ended_sec: Mapping[str, float], after: State) -> Mapping[str, float]:
    """Return the end of each ended job; a resumed job is no longer among them."""
    ended = [job.name for job in after.jobs.values() if job.phase in ENDED_PHASES]
    return {name: ended_sec.get(name, after.now_sec) for name in ended}


def _count(counts: Mapping[K, int], keys: Sequence[K]) -> Mapping[K, int]:
    return {**counts, **{key: counts.get(key, 0) + n for key, n in Counter(keys).items()}}
