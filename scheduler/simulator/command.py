"""`scheduler simulate`: several policies on one trace."""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.simulator.baselines import (
    GoodputPolicy,
    MarginalPolicy,
    StaticPolicy,
    ThresholdPolicy,
)
from scheduler.simulator.cluster import Cluster, Outcome, Result, outcome_of
from scheduler.simulator.jobs import (
    GIB,
    JobSpec,
    Knobs,
    TraceJob,
    draw_jobs,
    made_tables,
    read_tables,
    read_trace,
)
from scheduler.simulator.presage import LIVE, PresagePolicy
from scheduler.simulator.views import Capacity, Policy
from schemas.errors import PlanError, suggest_name

# What no policy that finishes every job can beat: two bounds of the mean time, the larger one.
#
# Alone: each job at its fastest size from its first second, with nothing else there and no
# accident. Together: all cores are one processor that any job may use as a whole, each job takes
# the core seconds of its thriftiest size, and the job with the least left goes first, which is
# optimal for one processor (Schrage 1968). Start-up is left out of both. A policy that gives long
# jobs up may have a smaller mean of those it finished.


def lower_bound_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return a mean time from submission to end that no policy which finishes all jobs beats.

    Args:
        specs: jobs by time of submission.
        cpus: cores of the cluster.
    """
    alone = [fastest_sec(spec) for spec in specs]
    return max(float(np.mean(alone)), together_sec(specs, cpus))


def fastest_sec(spec: JobSpec) -> float:
    """Return how long a job takes at its fastest size."""
    return spec.num_samples / float(np.nanmax(spec.table.speed))


def least_core_sec(spec: JobSpec) -> float:
    """Return the core seconds of a job at its thriftiest size, with no core more than it needs."""
    table = spec.table
    stores, replicas = np.mgrid[0 : table.speed.shape[0], 0 : table.speed.shape[1]]
    # Slowing down by fewer cores stretches the time as much: it saves no core seconds.
    cores = replicas * table.replica_busy + stores * table.store_busy
    return spec.peak * spec.cpu_scale * spec.num_samples * float(np.nanmin(cores / table.speed))


def together_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return the mean time when all cores are one processor, the least work first."""
    left: list[tuple[float, float]] = []
    now = total = 0.0
    for spec, after in zip(specs, (*specs[1:], None), strict=True):
        now = max(now, spec.submit_sec)
        heapq.heappush(left, (least_core_sec(spec) / cpus, spec.submit_sec))
        until = np.inf if after is None else after.submit_sec
        while left and now < until:
            work, submitted = heapq.heappop(left)
            if now + work > until:
                heapq.heappush(left, (work - (until - now), submitted))
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
    "presage-live": lambda: PresagePolicy(LIVE, "presage-live"),
}
LOAD = 0.8
"""Share of the cluster that the requests of all jobs fill while jobs are submitted."""


def policies_of(text: str) -> tuple[str, ...]:
    """Return the policies of a text such as `static,presage`.

    Raises:
        ValueError: one is unknown, or named twice.
    """
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"policy must be known, got {name!r}; {suggest_name(name, POLICIES)}")
        if names.count(name) > 1:
            raise ValueError(f"policy must be named once, got {name!r} again; leave it out")
    return names


def capacity_of(specs: Sequence[JobSpec], trace: Sequence[TraceJob], load: float) -> Capacity:
    """Return a cluster which the requests fill to this share, and in which the largest one fits.

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
    """Run all jobs under a policy that has decided nothing yet.

    Raises:
        PlanError: a request is larger than the cluster.
    """
    for spec in specs:
        request = spec.request
        if request.cpus > capacity.cpus + 1e-9 or request.memory_bytes > capacity.memory_bytes + 1:
            raise PlanError(
                f"cluster must hold every request, got cpus={capacity.cpus:g} and "
                f"memory={capacity.memory_bytes:.4g} for {spec.name!r} of "
                f"cpus={request.cpus:g} and memory={request.memory_bytes:.4g}; enlarge it"
            )
    return Cluster(specs, policy, capacity).simulate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What became of a trace under each policy."""

    policies: dict[str, Outcome]
    """By name, in the order asked for."""
    bound_sec: float
    """Mean JCT that no policy which finishes every job can go below."""
    capacity: Capacity
    """Of the cluster."""
    num_jobs: int
    """Jobs of the trace."""
    num_skipped: int
    """Lines that no job can have."""
    num_unsorted: int
    """Lines that came too late in the file."""


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
        help=f"of {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        metavar="FILE",
        help="speeds of each kind, as for fit, with replica_busy_cpus and store_busy_cpus; "
        "three made kinds when left out",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all that the trace does not hold")
    parser.add_argument(
        "--load", type=float, default=LOAD, help="share of the cluster that the requests fill"
    )
    parser.add_argument("--cpus", type=float, help="cores of the cluster, instead of --load")
    parser.add_argument("--memory-gib", type=float, help="its memory, instead of --load")
    for field in fields(Knobs):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=field.default, help="see docs/simulator.md")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> Simulated:
    """Simulate what the command line asks for.

    Raises:
        SchemaError: the trace or the measurements are none.
        ValueError: a policy is unknown, or a number is out of its range.
        PlanError: the cluster cannot hold a request.
    """
    names = policies_of(arguments.policy)
    knobs = Knobs(**{field.name: getattr(arguments, field.name) for field in fields(Knobs)})
    if arguments.seed < 0:
        raise ValueError(f"seed must not be negative, got {arguments.seed}; use 0")
    path = arguments.measurements
    tables = made_tables() if path is None else read_tables(path)
    trace = read_trace(arguments.trace)
    specs = draw_jobs(trace.jobs, tables, knobs, arguments.seed)
    capacity = capacity_of(specs, trace.jobs, arguments.load)
    if arguments.cpus is not None or arguments.memory_gib is not None:
        capacity = Capacity(
            capacity.cpus if arguments.cpus is None else arguments.cpus,
            capacity.memory_bytes if arguments.memory_gib is None else GIB * arguments.memory_gib,
        )
    found = {name: simulate(specs, POLICIES[name](), capacity) for name in names}
    return Simulated(
        policies={name: outcome_of(one.ended, one.used) for name, one in found.items()},
        bound_sec=lower_bound_sec(specs, capacity.cpus),
        capacity=capacity,
        num_jobs=len(specs),
        num_skipped=trace.num_skipped,
        num_unsorted=trace.num_unsorted,
    )


def as_json(found: Simulated) -> dict[str, dict[str, Any]]:
    """Return what `--json` prints: numbers by policy, with what holds for all of them."""
    shared = {
        "jct_bound_sec": found.bound_sec,
        "num_jobs": found.num_jobs,
        "num_skipped": found.num_skipped,
        "num_unsorted": found.num_unsorted,
    }
    return {name: {**asdict(outcome), **shared} for name, outcome in found.policies.items()}


def words(found: Simulated) -> list[str]:
    """Return one line for each policy, and one for the bound."""
    lines = [_line(name, outcome) for name, outcome in found.policies.items()]
    return [*lines, f"no policy that finishes every job: mean JCT below {found.bound_sec:,.0f} s"]


def notes(found: Simulated) -> list[str]:
    """Return what was done to the trace."""
    return [
        text
        for count, text in (
            (found.num_skipped, f"skipped {found.num_skipped} jobs without a usable time or size"),
            (found.num_unsorted, f"sorted {found.num_unsorted} jobs that came before earlier ones"),
        )
        if count
    ]


def _line(name: str, outcome: Outcome) -> str:
    def sec(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f} s"

    late = outcome.deadline_miss_rate
    return (
        f"{name}: JCT mean {sec(outcome.jct_mean_sec)}, median {sec(outcome.jct_p50_sec)}, "
        f"95 % {sec(outcome.jct_p95_sec)}; {outcome.completion_rate:.1%} finished; "
        f"{outcome.cpu_utilisation:.1%} of cores and {outcome.memory_utilisation:.1%} of memory "
        f"used{'' if late is None else f'; {late:.1%} late'}"
    )
