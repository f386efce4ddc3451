"""Our live policy against four others on drawn workloads of 20 to 1,000 jobs.

Each workload is drawn from the seed and its number: how many jobs arrive and how (one by one, in
bursts, all at once, a large one among small ones, as a block of a published trace), their lengths
and sizes, whether users request what their jobs need, the cluster, the faults and the speeds
(`benchmarks/workloads.md` lists all draws). All policies get the same jobs, faults and cluster. The
mean completion time is from submission to end over all jobs; one that failed counts until the last
job of the workload has ended under all policies. The results are the ratios of ours to `static` and
to the best other policy of each workload.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.harness import Options, compared, report
from benchmarks.policies import DL2, OURS, TRACES, speeds, window
from presage.scheduler.simulator.cluster import Result
from presage.scheduler.simulator.command import POLICIES, cluster_capacity, simulate
from presage.scheduler.simulator.jobs import (
    JobSpec,
    Knobs,
    Table,
    TraceJob,
    draw_jobs,
    synthetic_tables,
)
from presage.scheduler.simulator.views import Capacity

MIN_JOBS, MAX_JOBS = 20, 1000
MEDIAN_SEC = (120.0, 8410.0)
"""Range of the median length of a workload's jobs; it is 1,144 s in philly, 8,410 s in alibaba."""
SIGMA = (0.3, 2.2)
"""Standard deviation of the log of the lengths; that of philly is 2.2, by its mean and median."""
MAX_SEC = 4_628_226.0
"""Longest job, as in philly."""
PHILLY_REPLICAS: Mapping[int, float] = {1: 76627, 2: 1818, 4: 1870, 8: 1643, 16: 199}
"""Jobs of philly by replicas."""
ARRIVALS = ("one by one", "bursts", "at once", "one large", "trace")
REQUESTS = ("right", "too large", "too small", "mixed")
TARGET = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs and their cluster."""

    number: int
    arrivals: str
    requests: str
    specs: list[JobSpec]
    capacity: Capacity

    @property
    def label(self) -> str:
        """What was drawn, as text."""
        return f"{self.number}: {len(self.specs)} jobs, {self.arrivals}, requests {self.requests}"


def draw_workload(
    seed: int,
    number: int,
    tables: Sequence[Mapping[str, Table]],
    traces: Sequence[Sequence[TraceJob]],
) -> Workload:
    """Return one workload.

    Args:
        seed: of all workloads.
        number: of this one.
        tables: alternative speeds of all kinds.
        traces: published arrivals, if there are any.
    """
    rng = np.random.default_rng((seed, number))
    count = round(_log_uniform(rng, MIN_JOBS, MAX_JOBS))
    arrivals = str(rng.choice(ARRIVALS if traces else ARRIVALS[:-1]))
    requests = str(rng.choice(REQUESTS))
    all_kinds = tables[int(rng.integers(len(tables)))]
    kinds = sorted(all_kinds)[: int(rng.integers(1, len(all_kinds) + 1))]
    knobs = Knobs(
        over_request=float(rng.uniform(1.0, 3.0)) if requests == "too large" else 1.0,
        failures=float(rng.choice([0.0, 0.01, 0.1])),
        oom=float(rng.choice([0.0, 0.0, 0.06, 0.15])),
        stragglers=float(rng.choice([0.0, 0.02, 0.2])),
        peak=float(rng.choice([1.0, 1.2, 1.5])),
    )
    if arrivals == "trace":
        jobs = window(traces[int(rng.integers(len(traces)))], count, int(rng.integers(1 << 30)))
        load = float(rng.uniform(0.5, 1.2))
    else:
        jobs = _draw_trace(count, arrivals, rng)
        load = _log_uniform(rng, 0.3, 4.0)
    specs = draw_jobs(
        jobs, {kind: all_kinds[kind] for kind in kinds}, knobs, int(rng.integers(1 << 30))
    )
    if requests in ("too small", "mixed"):
        low, high = (0.5, 1.0) if requests == "too small" else (0.5, 2.0)
        specs = [_request_cores(spec, _log_uniform(rng, low, high)) for spec in specs]
    capacity = cluster_capacity(specs, jobs, load)
    return Workload(
        number=number, arrivals=arrivals, requests=requests, specs=specs, capacity=capacity
    )


def _draw_trace(count: int, arrivals: str, rng: np.random.Generator) -> list[TraceJob]:
    """Return jobs with drawn submissions, lengths and replicas."""
    median, sigma = _log_uniform(rng, *MEDIAN_SEC), float(rng.uniform(*SIGMA))
    lengths = np.clip(median * np.exp(sigma * rng.standard_normal(count)), 10.0, MAX_SEC)
    weights = np.array([*PHILLY_REPLICAS.values()])
    if rng.random() < 0.5:
        weights = np.ones(len(weights))
    replicas = rng.choice([*PHILLY_REPLICAS], count, p=weights / weights.sum())
    gaps = rng.exponential(median * _log_uniform(rng, 0.01, 1.0), count)
    if arrivals == "bursts":
        size = int(rng.integers(2, max(3, count // 3)))
        gaps = np.where(np.arange(count) % size == 0, gaps * size, 0.0)
    if arrivals == "at once":
        gaps[:] = 0.0
    if arrivals == "one large":
        at = int(rng.choice([0, count // 2, count - 1]))
        lengths[at], replicas[at] = rng.uniform(1.0, 10.0) * lengths.max(), max(PHILLY_REPLICAS)
    submitted = np.cumsum(gaps) - gaps[0]
    return [
        TraceJob(
            name=f"job-{number}",
            submit_sec=float(submitted[number]),
            duration_sec=float(lengths[number]),
            num_replicas=int(replicas[number]),
        )
        for number in range(count)
    ]


def _request_cores(spec: JobSpec, factor: float) -> JobSpec:
    """Return a job that requests these cores per needed one, and takes as long as before."""
    request = replace(
        spec.request,
        replica_cpus=factor * spec.request.replica_cpus,
        store_cpus=factor * spec.request.store_cpus,
    )
    return replace(spec, request=request, num_samples=min(1.0, factor) * spec.num_samples)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def completion_sec(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the mean completion time of all jobs by policy."""
    horizon = max(job.end_sec for result in results.values() for job in result.ended)
    return {
        name: float(
            np.mean([(j.end_sec if j.completed else horizon) - j.submit_sec for j in result.ended])
        )
        for name, result in results.items()
    }


def measure(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Simulate all workloads; a round is one of them, and the peer its best other policy."""
    tables: list[Mapping[str, Table]] = [synthetic_tables()]
    if (options.shared_data / DL2).exists():
        tables.append(speeds(options.shared_data))
    traces = [
        read(options.shared_data)
        for path, read in TRACES.values()
        if (options.shared_data / path).exists()
    ]
    rows: list[dict[str, Any]] = []
    for number in range(options.first, options.first + options.workloads):
        start = time.process_time()
        workload = draw_workload(options.seed, number, tables, traces)
        results = {
            name: simulate(workload.specs, POLICIES[name](), workload.capacity)
            for name in options.policies
        }
        times = completion_sec(results)
        peers = {name: sec for name, sec in times.items() if name != OURS}
        best = min(peers, key=peers.__getitem__)
        row = {
            "number": number,
            "workload": workload.label,
            "seconds": {name: round(sec, 1) for name, sec in times.items()},
            "over_static": round(times[OURS] / peers["static"], 4),
            "over_best": round(times[OURS] / peers[best], 4),
            "best": best,
        }
        report(workload.label, row | {"cpu_sec": round(time.process_time() - start, 1)})
        rows.append(row)
    return compared(
        [row["seconds"][OURS] for row in rows],
        [row["seconds"][row["best"]] for row in rows],
        "mean seconds from submission to end, simulated, against the best other policy",
        over_static=distribution([row["over_static"] for row in rows]),
        over_best=distribution([row["over_best"] for row in rows]),
        workloads=rows,
    )


def distribution(ratios: Sequence[float]) -> dict[str, float]:
    """Return the distribution of ratios, and the share of those within the target."""
    values = np.array(ratios)
    return {
        "geometric_mean": round(float(np.exp(np.log(values).mean())), 4),
        **{
            f"p{round(100 * q)}": round(float(np.quantile(values, q)), 4) for q in (0.05, 0.5, 0.95)
        },
        "max": round(float(values.max()), 4),
        "within_target": round(float((values <= TARGET).mean()), 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scheduler.workloads", __doc__)
    names = ("static", "threshold", "marginal", "goodput", "presage")
    options.add("--seed", 0, "of all draws")
    options.add("--workloads", 200, "how many", small=2)
    options.add("--first", 0, "number of the first one")
    options.add("--policies", names, "with presage and static", choices=tuple(POLICIES))
    options.add_shared_data()
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
