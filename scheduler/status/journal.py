"""Incidents and resource usage over time, from the log, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, TypeVar

import numpy as np

from scheduler.controller.events import Ended, Event, Started, Stepped
from scheduler.controller.state import ENDED_PHASES, JobState, State
from scheduler.model.fit import predict_seconds
from scheduler.model.grid import GIB, Grid
from scheduler.model.predict import fit_models, segment_setting, training_setting
from scheduler.model.terms import SegmentSetting
from scheduler.planner.candidates import SEC_PER_HOUR
from schemas.run_log import Decision

SpeedPool = Literal["preprocessing", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One measurement of one pool's speed, and its prediction without this measurement."""

    time_sec: float
    """When it was told."""
    pool: SpeedPool
    """Whose."""
    num_processes: int
    """Segment jobs at once, or replicas."""
    measured: float
    """Rows per second of one segment job, or samples per second of all replicas."""
    predicted: float
    """The same, by the models fitted to all that was measured before."""
    low: float
    """Lower end of its 90 % interval."""
    high: float
    """Upper end."""


def training_speed(job: JobState, event: Stepped) -> Speed | None:
    """Return the speed of steps that a job is told of, None where none was timed.

    Args:
        job: as it stood before.
        event: the steps.
    """
    if not event.seconds:
        return None
    config, batch = job.snapshot.job.schedule, job.snapshot.job.train.batch_samples
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    sizes = Grid.of_rows(np.array([(1, 1, event.num_replicas, job.num_stores or 0)]))
    found = predict_seconds(models.training, training_setting(job.snapshot, config, sizes))
    return Speed(
        time_sec=event.time_sec,
        pool="training",
        num_processes=event.num_replicas,
        measured=batch / median(event.seconds),
        predicted=batch / float(found.seconds[0]),
        low=batch / float(found.high[0]),
        high=batch / float(found.low[0]),
    )


def building_speed(job: JobState, event: Ended) -> Speed | None:
    """Return the speed of a segment job that is done, None where it was not measured.

    Args:
        job: as it stood before.
        event: the end of one of its processes.
    """
    process = job.processes.get(event.process)
    timed = event.work_sec > 0.0 and event.num_samples > 0
    if process is None or process.pool != "segment" or event.outcome != "done" or not timed:
        return None
    config, beside = job.snapshot.job.schedule, len(job.of_pool("segment"))
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    sizes = Grid.of_rows(np.array([(beside, process.workers, 1, 0)]))
    usual = segment_setting(models, job.snapshot, config, sizes)
    setting = SegmentSetting(
        rows=event.num_samples,
        workers=usual.workers,
        worker_cpus=usual.worker_cpus,
        segment_jobs=usual.segment_jobs,
    )
    found = predict_seconds(models.segments, setting)
    return Speed(
        time_sec=event.time_sec,
        pool="preprocessing",
        num_processes=beside,
        measured=event.num_samples / event.work_sec,
        predicted=event.num_samples / float(found.seconds[0]),
        low=event.num_samples / float(found.high[0]),
        high=event.num_samples / float(found.low[0]),
    )


# What a log has come to for those who look on: one event after the other, of bounded size.
#
# The machine's state says what is; this says what was: decisions, failures and what took their
# place, speeds, what was spent. It is folded over the same events as the state, and as pure.

KEPT = 200
"""Decisions and incidents that are kept, the latest ones; all are in the log."""
POINTS = 240
"""Points of a curve: beyond, every second one is dropped."""

Kind = Literal["lost", "failed", "slow", "preempted", "memory"]
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that went wrong, and what took over."""

    time_sec: float
    """When it was seen."""
    job: str
    """Whose."""
    process: str
    """Which process; none where it happened to a whole pool, or to the job."""
    kind: Kind
    """What happened to it."""
    detail: str
    """The reason of what was decided then."""
    successor: str = ""
    """The process that took its place."""
    back_sec: float | None = None
    """When that one ran; None while none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What all jobs had booked from some moment on."""

    time_sec: float
    """The moment."""
    cpus: float
    """Cores."""
    memory_bytes: int
    """Memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What was, up to the last event."""

    begun_sec: float = 0.0
    """Time of the first event."""
    num_events: int = 0
    """Events so far."""
    decisions: tuple[Decision, ...] = ()
    """The latest ones, oldest first."""
    incidents: tuple[Incident, ...] = ()
    """The latest ones, oldest first."""
    speeds: Mapping[str, tuple[Speed, ...]] = field(default_factory=dict[str, tuple[Speed, ...]])
    """By job, oldest first."""
    usage: tuple[Usage, ...] = ()
    """Each change of what is booked, oldest first."""
    spent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Price of what was booked so far, by job."""
    ended_sec: Mapping[str, float] = field(default_factory=dict[str, float])
    """When jobs ended."""
    num_decided: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Decisions so far, by job and what was done."""
    num_incidents: Mapping[tuple[str, Kind], int] = field(
        default_factory=dict[tuple[str, Kind], int]
    )
    """Incidents so far, by job and kind."""


def record(
    journal: Journal, before: State, event: Event, after: State, decisions: Sequence[Decision]
) -> Journal:
    """Take in one event.

    Args:
        journal: of the events before.
        before: the machine's state before the event.
        event: what happened.
        after: the state after it.
        decisions: what followed.
    """
    first = not journal.num_events
    now = after.now_sec
    incidents = _incidents(event, decisions)
    known = _taken_over(journal.incidents, event, now)
    return replace(
        journal,
        begun_sec=now if first else journal.begun_sec,
        num_events=journal.num_events + 1,
        decisions=(*journal.decisions, *decisions)[-KEPT:],
        incidents=(*known, *incidents)[-KEPT:],
        speeds=_speeds(journal.speeds, before, event),
        usage=_usage(journal.usage, after),
        spent=journal.spent if first else _spent(journal.spent, before, now),
        ended_sec=_ended(journal.ended_sec, after),
        num_decided=_counted(journal.num_decided, [(d.job, d.action) for d in decisions]),
        num_incidents=_counted(journal.num_incidents, [(i.job, i.kind) for i in incidents]),
    )


def hour_price(job: JobState) -> float:
    """Return the price of one hour of all that is booked for a job's live processes."""
    budget, live = job.snapshot.job.schedule.budget, job.processes.values()
    memory = sum(p.memory_bytes for p in live) / GIB
    return sum(p.cpus for p in live) * budget.cpu_hour_price + memory * budget.gib_hour_price


def thinned(points: tuple[T, ...]) -> tuple[T, ...]:
    """Return at most POINTS points, the first and the last among them.

    Example:
        >>> len(thinned(tuple(range(240)))), thinned(tuple(range(241)))[-2:]
        (240, (238, 240))
    """
    return points if len(points) <= POINTS else (*points[:-1:2], points[-1])


def _incidents(event: Event, decisions: Sequence[Decision]) -> list[Incident]:
    """Return what went wrong, as the decisions after an event say."""
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


def _taken_over(known: tuple[Incident, ...], event: Event, now_sec: float) -> tuple[Incident, ...]:
    """Note that a process runs which has the place of one that is gone."""
    if not isinstance(event, Started):
        return known
    place = event.process.rpartition(".")[0]
    return tuple(
        replace(one, successor=event.process, back_sec=now_sec)
        if one.back_sec is None
        and one.job == event.job
        and one.process != event.process
        and one.process.rpartition(".")[0] == place
        else one
        for one in known
    )


def _speeds(
    known: Mapping[str, tuple[Speed, ...]], before: State, event: Event
) -> Mapping[str, tuple[Speed, ...]]:
    if not isinstance(event, Stepped | Ended) or event.job not in before.jobs:
        return known
    job = before.jobs[event.job]
    speed = training_speed(job, event) if isinstance(event, Stepped) else building_speed(job, event)
    if speed is None:
        return known
    return {**known, event.job: thinned((*known.get(event.job, ()), speed))}


def _usage(known: tuple[Usage, ...], after: State) -> tuple[Usage, ...]:
    cpus, memory_bytes = after.used
    if known and (known[-1].cpus, known[-1].memory_bytes) == (cpus, memory_bytes):
        return known
    now = Usage(time_sec=after.now_sec, cpus=cpus, memory_bytes=memory_bytes)
    return thinned((*known, now))


def _spent(known: Mapping[str, float], before: State, now_sec: float) -> Mapping[str, float]:
    hours = (now_sec - before.now_sec) / SEC_PER_HOUR
    paid = {job.name: hour_price(job) * hours for job in before.jobs.values() if job.processes}
    return {**known, **{name: known.get(name, 0.0) + price for name, price in paid.items()}}


def _ended(known: Mapping[str, float], after: State) -> Mapping[str, float]:
    """Return when jobs ended; one that goes on has not."""
    over = [job.name for job in after.jobs.values() if job.phase in ENDED_PHASES]
    return {name: known.get(name, after.now_sec) for name in over}


def _counted(known: Mapping[K, int], news: Sequence[K]) -> Mapping[K, int]:
    if not news:
        return known
    counts = dict(known)
    for key in news:
        counts[key] = counts.get(key, 0) + 1
    return counts
