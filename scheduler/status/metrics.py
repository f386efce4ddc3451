"""The view as metrics, in the text that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.controller.state import Phase, Status
from scheduler.controller.watch import LOOKAHEAD_SEC
from scheduler.status.view import JobView, View

JOB = ("job",)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(view: View) -> bytes:
    """Return a view in the text format of Prometheus, from a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry)


class _Collector(Collector):
    """Gives the metrics of one view."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from _of_scheduler(self._view)
        yield from _of_jobs(self._view.jobs)
        yield from _of_processes(self._view.jobs)
        yield from _of_stores(self._view.jobs)
        yield from _of_speeds(self._view.jobs)
        decided = _counter("decisions", "Decisions by what was done.", ("job", "action"))
        for job, action, count in self._view.num_decided:
            decided.add_metric((job, action.replace(" ", "_")), count)
        incidents = _counter(
            "incidents",
            "What went wrong: processes lost, failed, slow or preempted, memory that was short.",
            ("job", "kind"),
        )
        for job, kind, count in self._view.num_incidents:
            incidents.add_metric((job, kind), count)
        yield from (decided, incidents)


def _of_scheduler(view: View) -> Iterator[Metric]:
    yield _gauge("budget_cores", "Cores of all jobs together.", (), [((), view.cpus)])
    yield _gauge("booked_cores", "Cores booked for live processes.", (), [((), view.used_cpus)])
    yield _gauge(
        "budget_memory_bytes", "Memory of all jobs together.", (), [((), view.memory_bytes)]
    )
    yield _gauge(
        "booked_memory_bytes",
        "Memory booked for live processes.",
        (),
        [((), view.used_memory_bytes)],
    )
    yield _gauge(
        "last_event_timestamp_seconds", "Time of the last event.", (), [((), view.now_sec)]
    )
    events = _counter("events", "Events taken in.", ())
    events.add_metric((), view.num_events)
    yield events


def _of_jobs(jobs: Iterable[JobView]) -> Iterator[Metric]:
    phases = get_args(Phase)
    yield _gauge(
        "job_phase",
        "1 for the phase that a job is in.",
        ("job", "phase"),
        [((job.name, phase), float(job.phase == phase)) for job in jobs for phase in phases],
    )
    yield _gauge(
        "segments_built",
        "Segments that are committed.",
        JOB,
        [((job.name,), job.segments_built) for job in jobs],
    )
    yield _gauge(
        "segments", "Segments of the input.", JOB, [((job.name,), job.num_segments) for job in jobs]
    )
    yield _gauge(
        "next_step",
        "The step after the last committed one; it falls when a run goes back to a checkpoint.",
        JOB,
        [((job.name,), job.next_step) for job in jobs],
    )
    yield _gauge(
        "trained_samples",
        "Samples trained, every epoch counted.",
        JOB,
        [((job.name,), job.num_trained) for job in jobs],
    )
    yield _gauge(
        "samples",
        "Samples of all epochs, as far as they are known.",
        JOB,
        [((job.name,), job.num_to_train) for job in jobs],
    )
    cost = _counter("cost", "Price of what was booked, in the currency of the budget.", JOB)
    for job in jobs:
        cost.add_metric((job.name,), job.spent)
    yield cost
    known = [(job.name, job.forecast) for job in jobs if job.forecast is not None]
    yield _gauge(
        "predicted_left_cost",
        "Predicted price of what is left.",
        JOB,
        [((name,), found.left_cost) for name, found in known],
    )
    yield _gauge(
        "predicted_left_seconds",
        "Predicted seconds until the model is trained.",
        JOB,
        [((name,), found.left_sec) for name, found in known],
    )
    yield _gauge(
        "prediction_confident",
        "1 where the prediction of step times is narrow enough to act upon.",
        JOB,
        [((name,), float(found.confident)) for name, found in known],
    )


def _of_processes(jobs: Iterable[JobView]) -> Iterator[Metric]:
    pools = [(job.name, pool) for job in jobs for pool in job.pools]
    yield _gauge(
        "processes",
        "Live processes by pool and what they do.",
        ("job", "pool", "status"),
        [
            ((job, pool.name, status), pool.count(status))
            for job, pool in pools
            for status in get_args(Status)
        ],
    )
    yield _gauge(
        "wanted_processes",
        "Processes that a pool is to have.",
        ("job", "pool"),
        [((job, pool.name), pool.wanted) for job, pool in pools],
    )
    each = [(job, pool.name, one) for job, pool in pools for one in pool.processes]
    for name, text, value_of in (
        ("busy_cores", "Cores that were busy, as read last.", attrgetter("busy_cores")),
        ("booked_cores", "Cores that are booked.", attrgetter("cpus")),
        ("resident_memory_bytes", "Memory that was read last.", attrgetter("resident_bytes")),
        ("memory_limit_bytes", "Memory that is booked.", lambda one: one.limit_bytes or None),
    ):
        values = [((job, pool, one.name), value_of(one)) for job, pool, one in each]
        known = [(labels, value) for labels, value in values if value is not None]
        yield _gauge(f"process_{name}", text, ("job", "pool", "process"), known)


def _of_stores(jobs: Iterable[JobView]) -> Iterator[Metric]:
    each = [(job.name, store) for job in jobs if job.stores for store in job.stores.stores]
    for name, text, value_of in (
        ("ranges", "Ranges of slots that a store owns.", lambda one: len(one.ranges)),
        (
            "access_share",
            "Share of the accesses of the steps around now, as the oracle knows them.",
            attrgetter("share"),
        ),
        (
            "predicted_access_share",
            f"The same in {LOOKAHEAD_SEC:.0f} s, if no range moves until then.",
            attrgetter("share_ahead"),
        ),
    ):
        values = [((job, str(one.number)), value_of(one)) for job, one in each]
        known = [(labels, value) for labels, value in values if value is not None]
        yield _gauge(f"store_{name}", text, ("job", "store"), known)


def _of_speeds(jobs: Iterable[JobView]) -> Iterator[Metric]:
    newest = [
        (job.name, pool, [speed for speed in job.speeds if speed.pool == pool][-1])
        for job in jobs
        for pool in sorted({speed.pool for speed in job.speeds})
    ]
    for name, text in (
        ("measured", "Newest measured rows or samples per second."),
        ("predicted", "The same, as predicted before it was measured."),
    ):
        yield _gauge(
            f"{name}_samples_per_second",
            text,
            ("job", "pool"),
            [((job, pool), getattr(speed, name)) for job, pool, speed in newest],
        )


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...],
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"presage_{name}", text, labels=labels)
    for values, value in samples:
        found.add_metric(values, value)
    return found


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(f"presage_{name}", text, labels=labels)
