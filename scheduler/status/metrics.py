"""Prometheus metrics of a view."""

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
    """Return the metrics of a view in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return generate_latest(registry)


class _Collector(Collector):
    """The metrics of one view."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from _of_scheduler(self._view)
        yield from _of_jobs(self._view.jobs)
        yield from _of_processes(self._view.jobs)
        yield from _of_stores(self._view.jobs)
        yield from _of_speeds(self._view.jobs)
        decided = _counter("decisions", "Decisions by action.", ("job", "action"))
        for job, action, count in self._view.num_decided:
            decided.add_metric((job, action.replace(" ", "_")), count)
        incidents = _counter(
            "incidents",
            "Incidents: processes lost, failed, slow or preempted, memory exhausted.",
            ("job", "kind"),
        )
        for job, kind, count in self._view.num_incidents:
            incidents.add_metric((job, kind), count)
        yield from (decided, incidents)


def _of_scheduler(view: View) -> Iterator[Metric]:
    yield _gauge("budget_cores", "Cores of the budget.", (), [((), view.cpus)])
    yield _gauge("booked_cores", "Cores reserved for live processes.", (), [((), view.used_cpus)])
    yield _gauge("budget_memory_bytes", "Memory of the budget.", (), [((), view.memory_bytes)])
    yield _gauge(
        "booked_memory_bytes",
        "Memory reserved for live processes.",
        (),
        [((), view.used_memory_bytes)],
    )
    yield _gauge(
        "last_event_timestamp_seconds", "Time of the last event.", (), [((), view.now_sec)]
    )
    events = _counter("events", "Events in the log.", ())
    events.add_metric((), view.num_events)
    yield events


def _of_jobs(jobs: Iterable[JobView]) -> Iterator[Metric]:
    phases = get_args(Phase)
    yield _gauge(
        "job_phase",
        "1 for the current phase of a job.",
        ("job", "phase"),
        [((job.name, phase), float(job.phase == phase)) for job in jobs for phase in phases],
    )
    yield _gauge(
        "segments_built",
        "Committed segments.",
        JOB,
        [((job.name,), job.segments_built) for job in jobs],
    )
    yield _gauge(
        "segments", "Segments of the input.", JOB, [((job.name,), job.num_segments) for job in jobs]
    )
    yield _gauge(
        "next_step",
        "The step after the last committed one; it decreases on a restore from a checkpoint.",
        JOB,
        [((job.name,), job.next_step) for job in jobs],
    )
    yield _gauge(
        "trained_samples",
        "Trained samples, counted in every epoch.",
        JOB,
        [((job.name,), job.num_trained) for job in jobs],
    )
    yield _gauge(
        "samples",
        "Known samples of all epochs.",
        JOB,
        [((job.name,), job.num_to_train) for job in jobs],
    )
    cost = _counter("cost", "Cost of reserved resources, in the currency of the budget.", JOB)
    for job in jobs:
        cost.add_metric((job.name,), job.spent)
    yield cost
    forecasts = [(job.name, job.forecast) for job in jobs if job.forecast is not None]
    yield _gauge(
        "predicted_left_cost",
        "Predicted cost until training ends.",
        JOB,
        [((name,), forecast.left_cost) for name, forecast in forecasts],
    )
    yield _gauge(
        "predicted_left_seconds",
        "Predicted seconds until training ends.",
        JOB,
        [((name,), forecast.left_sec) for name, forecast in forecasts],
    )
    yield _gauge(
        "prediction_confident",
        "1 if the predicted interval of step times is narrow enough to act upon.",
        JOB,
        [((name,), float(forecast.confident)) for name, forecast in forecasts],
    )


def _of_processes(jobs: Iterable[JobView]) -> Iterator[Metric]:
    pools = [(job.name, pool) for job in jobs for pool in job.pools]
    yield _gauge(
        "processes",
        "Live processes by pool and status.",
        ("job", "pool", "status"),
        [
            ((job, pool.name, status), pool.count(status))
            for job, pool in pools
            for status in get_args(Status)
        ],
    )
    yield _gauge(
        "wanted_processes",
        "Target number of processes of a pool.",
        ("job", "pool"),
        [((job, pool.name), pool.wanted) for job, pool in pools],
    )
    processes = [(job, pool.name, process) for job, pool in pools for process in pool.processes]
    for name, text, value_of in (
        ("busy_cores", "Last measured use of cores.", attrgetter("busy_cores")),
        ("booked_cores", "Reserved cores.", attrgetter("cpus")),
        ("resident_memory_bytes", "Last measured memory.", attrgetter("resident_bytes")),
        ("memory_limit_bytes", "Reserved memory.", lambda process: process.limit_bytes or None),
    ):
        values = [
            ((job, pool, process.name), value_of(process)) for job, pool, process in processes
        ]
        yield _gauge(f"process_{name}", text, ("job", "pool", "process"), values)


def _of_stores(jobs: Iterable[JobView]) -> Iterator[Metric]:
    stores = [(job.name, store) for job in jobs if job.stores for store in job.stores.stores]
    for name, text, value_of in (
        ("ranges", "Slot ranges that a store owns.", lambda store: len(store.ranges)),
        (
            "access_share",
            "Share of the accesses around the current step, from the oracle.",
            attrgetter("share"),
        ),
        (
            "predicted_access_share",
            f"The same in {LOOKAHEAD_SEC:.0f} s, with the current owners.",
            attrgetter("share_ahead"),
        ),
    ):
        values = [((job, str(store.number)), value_of(store)) for job, store in stores]
        yield _gauge(f"store_{name}", text, ("job", "store"), values)


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
    samples: Iterable[tuple[tuple[str, ...], float | None]],
) -> GaugeMetricFamily:
    """Return a gauge with the samples that have a value."""
    gauge = GaugeMetricFamily(f"presage_{name}", text, labels=labels)
    for values, value in samples:
        if value is not None:
            gauge.add_metric(values, value)
    return gauge


def _counter(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily:
    return CounterMetricFamily(f"presage_{name}", text, labels=labels)
