"""`scheduler simulate`: several policies on one trace."""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from presage.scheduler.simulator.baselines import (
    GoodputPolicy,
    MarginalPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from presage.scheduler.simulator.cluster import PolicyMetrics, Result, SimulatedCluster, outcome_of
from presage.scheduler.simulator.jobs import (
    GIB,
    JobSpec,
    Knobs,
    TraceJob,
    draw_jobs,
    read_tables,
    read_trace,
    synthetic_tables,
)
from presage.scheduler.simulator.presage import PresagePolicy
from presage.scheduler.simulator.views import Capacity, Policy
from presage.schemas.errors import PlanError, suggest_name


def lower_bound_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return a lower bound of the mean JCT of any policy that finishes all jobs.

    The larger one of two bounds, both without start-up and faults. Alone: each job runs at its
    fastest size from its submission. Together: all cores are one processor, each job takes the core
    seconds of its cheapest size, and the one with the least remaining work runs, which is optimal
    for one processor (Schrage 1968).
    """
    alone = [fastest_sec(spec) for spec in specs]
    return max(float(np.mean(alone)), together_sec(specs, cpus))


def fastest_sec(spec: JobSpec) -> float:
    """Return the run time of a job at its fastest size."""
    return spec.num_samples / float(np.nanmax(spec.table.speed))


def least_core_sec(spec: JobSpec) -> float:
    """Return the core seconds of a job at its cheapest size, without idle cores."""
    table = spec.table
    stores, replicas = np.mgrid[0 : table.speed.shape[0], 0 : table.speed.shape[1]]
    # Fewer cores than needed slow a job down in proportion and save no core seconds.
    cores = replicas * table.replica_busy + stores * table.store_busy
    return spec.peak * spec.cpu_scale * spec.num_samples * float(np.nanmin(cores / table.speed))


def together_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return the mean JCT if all cores are one processor, least work first."""
    queue: list[tuple[float, float]] = []
    now = total = 0.0
    for spec, following in zip(specs, (*specs[1:], None), strict=True):
        now = max(now, spec.submit_sec)
        heapq.heappush(queue, (least_core_sec(spec) / cpus, spec.submit_sec))
        until = np.inf if following is None else following.submit_sec
        while queue and now < until:
            work, submitted = heapq.heappop(queue)
            if now + work > until:
                heapq.heappush(queue, (work - (until - now), submitted))
                now = until
            else:
                now += work
                total += now - submitted
    return total / len(specs)


POLICIES: Mapping[str, Callable[[], Policy]] = {
    "static": StaticPolicy,
    "threshold": ThresholdPolicy,
    "marginal": MarginalPolicy,
    "goodput": GoodputPolicy,
    "presage": PresagePolicy,
}
LOAD = 0.8
"""Default share of the cluster that all requests use while jobs are submitted."""


def parse_policies(text: str) -> tuple[str, ...]:
    """Parse a list of policies such as `static,presage`.

    Raises:
        ValueError: one is unknown, or named twice.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"policy is unknown: {name!r}; {suggest_name(name, POLICIES)}")
        if names.count(name) > 1:
            raise ValueError(f"policy is named twice: {name!r}; remove one")
    return names


def cluster_capacity(specs: Sequence[JobSpec], trace: Sequence[TraceJob], load: float) -> Capacity:
    """Return a cluster of which the requests use this share, and which fits the largest one.

    Raises:
        ValueError: the load is not positive.
    """
    if not 0.0 < load < float("inf"):
        raise ValueError(f"load must be positive, got {load}; use 0.8 for a usual cluster")
    lengths = [job.duration_sec for job in trace]
    span = trace[-1].submit_sec - trace[0].submit_sec + sum(lengths) / len(lengths)
    requests = [spec.request for spec in specs]
    cpus = sum(sec * r.cpus for sec, r in zip(lengths, requests, strict=True)) / span / load
    memory = sum(sec * r.memory_bytes for sec, r in zip(lengths, requests, strict=True))
    return Capacity(
        max(cpus, *(request.cpus for request in requests)) if requests else cpus,
        max(memory / span / load, max(request.memory_bytes for request in requests)),
    )


def simulate(specs: Sequence[JobSpec], policy: Policy, capacity: Capacity) -> Result:
    """Simulate all jobs under a new policy.

    Raises:
        PlanError: a request is larger than the cluster.
    """
    for spec in specs:
        request = spec.request
        if request.cpus > capacity.cpus + 1e-9 or request.memory_bytes > capacity.memory_bytes + 1:
            raise PlanError(
                f"cluster is too small for the request of {spec.name!r}: "
                f"cpus={request.cpus:g} of {capacity.cpus:g}, memory={request.memory_bytes:.4g} "
                f"of {capacity.memory_bytes:.4g}; enlarge it"
            )
    return SimulatedCluster(specs, policy, capacity).simulate()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Results of several policies on one trace."""

    policies: dict[str, PolicyMetrics]
    bound_sec: float
    """Lower bound of the mean JCT of any policy that finishes all jobs."""
    num_jobs: int
    num_skipped: int
    """Invalid lines of the trace."""
    num_unsorted: int
    """Lines before one with an earlier submission."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="CSV or Parquet with job, submit_sec, duration_sec, num_replicas",
    )
    parser.add_argument(
        "--policy",
        required=True,
        metavar="NAME[,NAME...]",
        help=f"one or several of {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="speeds of each kind, as for fit, with replica_busy_cpus and store_busy_cpus; "
        "default: three synthetic kinds",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument(
        "--load", type=float, default=LOAD, help="share of the cluster that the requests use"
    )
    parser.add_argument("--cpus", type=float, help="cores of the cluster, instead of --load")
    parser.add_argument("--memory-gib", type=float, help="its memory, instead of --load")
    for field in fields(Knobs):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=field.default, help="see docs/simulator.md")


def run(arguments: argparse.Namespace) -> PolicyComparison:
    """Run the command.

    Raises:
        SchemaError: the trace or the measurements are invalid.
        ValueError: a policy is unknown, or a number is out of range.
        PlanError: a request is larger than the cluster.
    """
    names = parse_policies(arguments.policy)
    knobs = Knobs(**{field.name: getattr(arguments, field.name) for field in fields(Knobs)})
    if arguments.seed < 0:
        raise ValueError(f"seed must not be negative, got {arguments.seed}; use 0")
    path = arguments.measurements
    tables = synthetic_tables() if path is None else read_tables(path)
    trace = read_trace(arguments.trace)
    specs = draw_jobs(trace.jobs, tables, knobs, arguments.seed)
    capacity = cluster_capacity(specs, trace.jobs, arguments.load)
    if arguments.cpus is not None or arguments.memory_gib is not None:
        capacity = Capacity(
            capacity.cpus if arguments.cpus is None else arguments.cpus,
            capacity.memory_bytes if arguments.memory_gib is None else GIB * arguments.memory_gib,
        )
    results = {name: simulate(specs, POLICIES[name](), capacity) for name in names}
    return PolicyComparison(
        policies={name: outcome_of(r.ended, r.used) for name, r in results.items()},
        bound_sec=lower_bound_sec(specs, capacity.cpus),
        num_jobs=len(specs),
        num_skipped=trace.num_skipped,
        num_unsorted=trace.num_unsorted,
    )


def to_json(comparison: PolicyComparison) -> dict[str, dict[str, Any]]:
    """Return the object of `--json`: by policy its numbers and those of the trace."""
    shared = {
        "jct_bound_sec": comparison.bound_sec,
        "num_jobs": comparison.num_jobs,
        "num_skipped": comparison.num_skipped,
        "num_unsorted": comparison.num_unsorted,
    }
    return {name: {**asdict(outcome), **shared} for name, outcome in comparison.policies.items()}


def summary_lines(comparison: PolicyComparison) -> list[str]:
    """Return one line per policy, and one for the bound."""
    lines = [_line(name, outcome) for name, outcome in comparison.policies.items()]
    return [
        *lines,
        f"no policy that finishes every job: mean JCT below {comparison.bound_sec:,.0f} s",
    ]


def notes(comparison: PolicyComparison) -> list[str]:
    """Return one line per correction of the trace."""
    return [
        text
        for count, text in (
            (
                comparison.num_skipped,
                f"skipped {comparison.num_skipped} jobs without a valid time or size",
            ),
            (
                comparison.num_unsorted,
                f"sorted {comparison.num_unsorted} jobs that were out of order",
            ),
        )
        if count
    ]


def _line(name: str, outcome: PolicyMetrics) -> str:
    def sec(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f} s"

    late = outcome.deadline_miss_rate
    return (
        f"{name}: JCT mean {sec(outcome.jct_mean_sec)}, median {sec(outcome.jct_p50_sec)}, "
        f"95 % {sec(outcome.jct_p95_sec)}; {outcome.completion_rate:.1%} finished; "
        f"{outcome.cpu_utilisation:.1%} of cores and {outcome.memory_utilisation:.1%} of memory "
        f"used{'' if late is None else f'; {late:.1%} late'}"
    )
