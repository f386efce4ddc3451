"""`python -m scheduler simulate`: a trace, what is drawn around it, numbers of each policy."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scheduler.simulator.bound import lower_bound_sec
from scheduler.simulator.compare import (
    LOAD,
    POLICIES,
    capacity_of,
    policies_of,
    simulate,
)
from scheduler.simulator.draw import GIB, Knobs, draw_jobs
from scheduler.simulator.outcome import Outcome, outcome_of
from scheduler.simulator.tables import made_tables, read_tables
from scheduler.simulator.trace import read_trace
from scheduler.simulator.views import Capacity


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
