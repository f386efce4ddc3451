"""Prometheus metrics of a view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from presage.scheduler.controller.predictions import LOOKAHEAD_SEC
from presage.scheduler.controller.state import Phase, Status
from presage.scheduler.status.view import JobView, View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JOB = ("job",)

Spec = tuple[str, str, Callable[[Any], float | None]]
"""Name and description of a gauge, and its value for an object; None for no sample."""
OF_SCHEDULER: Sequence[Spec] = (
    ("budget_cores", "Cores of the budget.", attrgetter("cpus")),
    ("booked_cores", "Cores reserved for live processes.", attrgetter("used_cpus")),
    ("budget_memory_bytes", "Memory of the budget.", attrgetter("memory_bytes")),
    (
        "booked_memory_bytes",
        "Memory reserved for live processes.",
        attrgetter("used_memory_bytes"),
    ),
    ("last_event_timestamp_seconds", "Time of the last event.", attrgetter("now_sec")),
)
OF_JOB: Sequence[Spec] = (
    ("segments_built", "Committed segments.", attrgetter("segments_built")),
    ("segments", "Segments of the input.", attrgetter("num_segments")),
    (
        "next_step",
        "The step after the last committed one; it decreases on a restore from a checkpoint.",
        attrgetter("next_step"),
    ),
    ("trained_samples", "Trained samples, counted in every epoch.", attrgetter("num_trained")),
    ("samples", "Known samples of all epochs.", attrgetter("num_to_train")),
)
OF_FORECAST: Sequence[Spec] = (
    ("predicted_left_cost", "Predicted cost until training ends.", attrgetter("left_cost")),
    ("predicted_left_seconds", "Predicted seconds until training ends.", attrgetter("left_sec")),
    (
        "prediction_confident",
        "1 if the predicted interval of step times is narrow enough to act upon.",
        attrgetter("confident"),
    ),
)
OF_PROCESS: Sequence[Spec] = (
    ("process_busy_cores", "Last measured use of cores.", attrgetter("busy_cores")),
    ("process_booked_cores", "Reserved cores.", attrgetter("cpus")),
    ("process_resident_memory_bytes", "Last measured memory.", attrgetter("resident_bytes")),
    ("process_memory_limit_bytes", "Reserved memory.", lambda p: p.limit_bytes or None),
)
OF_STORE: Sequence[Spec] = (
    ("store_ranges", "Slot ranges that a store owns.", lambda store: len(store.ranges)),
    (
        "store_access_share",
        "Share of the accesses around the current step, from the oracle.",
        attrgetter("share"),
    ),
    (
        "store_predicted_access_share",
        f"The same in {LOOKAHEAD_SEC:.0f} s, with the current owners.",
        attrgetter("share_ahead"),
    ),
)
OF_SPEED: Sequence[Spec] = (
    (
        "measured_samples_per_second",
        "Newest measured rows or samples per second.",
        attrgetter("measured"),
    ),
    (
        "predicted_samples_per_second",
        "The same, as predicted before it was measured.",
        attrgetter("predicted"),
    ),
)


def metrics_text(view: View) -> bytes:
    """Return the metrics of a view in Prometheus' text format."""
    return generate_latest(_Collector(view))


class _Collector(Collector):
    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        view = self._view
        yield from _gauges((), [((), view)], OF_SCHEDULER)
        yield _counter("events", "Events in the log.", (), [((), view.num_events)])
        yield from _of_jobs(view.jobs)
        yield from _of_pools(view.jobs)
        stores = [(job.name, s) for job in view.jobs if job.stores for s in job.stores.stores]
        yield from _gauges(("job", "store"), [((j, str(s.number)), s) for j, s in stores], OF_STORE)
        newest = [
            ((job.name, pool), [speed for speed in job.speeds if speed.pool == pool][-1])
            for job in view.jobs
            for pool in sorted({speed.pool for speed in job.speeds})
        ]
        yield from _gauges(("job", "pool"), newest, OF_SPEED)
        yield _counter(
            "decisions",
            "Decisions by action.",
            ("job", "action"),
            [((job, action.replace(" ", "_")), n) for job, action, n in view.num_decided],
        )
        yield _counter(
            "incidents",
            "Incidents: processes lost, failed, slow or preempted, memory exhausted.",
            ("job", "kind"),
            [((job, kind), n) for job, kind, n in view.num_incidents],
        )


def _of_jobs(jobs: Sequence[JobView]) -> Iterator[Metric]:
    yield _gauge(
        "job_phase",
        "1 for the current phase of a job.",
        ("job", "phase"),
        [((j.name, phase), j.phase == phase) for j in jobs for phase in get_args(Phase)],
    )
    yield from _gauges(JOB, [((job.name,), job) for job in jobs], OF_JOB)
    costs = [((job.name,), job.spent) for job in jobs]
    yield _counter("cost", "Cost of reserved resources, in the currency of the budget.", JOB, costs)
    forecasts = [((job.name,), job.forecast) for job in jobs if job.forecast is not None]
    yield from _gauges(JOB, forecasts, OF_FORECAST)


def _of_pools(jobs: Sequence[JobView]) -> Iterator[Metric]:
    pools = [(job.name, pool) for job in jobs for pool in job.pools]
    yield _gauge(
        "processes",
        "Live processes by pool and status.",
        ("job", "pool", "status"),
        [((j, p.name, status), p.count(status)) for j, p in pools for status in get_args(Status)],
    )
    yield _gauge(
        "wanted_processes",
        "Target number of processes of a pool.",
        ("job", "pool"),
        [((job, pool.name), pool.wanted) for job, pool in pools],
    )
    processes = [((j, pool.name, p.name), p) for j, pool in pools for p in pool.processes]
    yield from _gauges(("job", "pool", "process"), processes, OF_PROCESS)


def _gauges(
    labels: Sequence[str], objects: Sequence[tuple[tuple[str, ...], Any]], specs: Sequence[Spec]
) -> Iterator[Metric]:
    """Yield a gauge for each spec, with a sample for each object, by its label values."""
    for name, text, value_of in specs:
        yield _gauge(name, text, labels, [(values, value_of(item)) for values, item in objects])


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[tuple[str, ...], float | None]],
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(f"presage_{name}", text, labels=labels)
    for values, value in samples:
        if value is not None:
            gauge.add_metric(values, float(value))
    return gauge


def _counter(
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> CounterMetricFamily:
    counter = CounterMetricFamily(f"presage_{name}", text, labels=labels)
    for values, value in samples:
        counter.add_metric(values, value)
    return counter
