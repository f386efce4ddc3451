"""Our policy against four others, simulated on the arrivals of two published clusters.

Each round is one seed, which selects a block of consecutive arrivals; blocks of consecutive seeds
do not overlap. Jobs get the measured speeds of eight models, and what traces do not contain is
drawn with five parameters (`benchmarks/policies.md` lists every assumption). Every policy gets the
same jobs, failures and cluster. `ours` and `peer` are mean job completion times, `peer` of the best
other policy of a trace over its rounds; a missing trace is reported on stderr and skipped.
`--sweep` also varies parameters over their ranges, one at a time; `--parts` also runs ours without
each of its parts.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.common.harness import MissingError, Options, compared, report, short
from presage.scheduler.simulator.cluster import outcome_of
from presage.scheduler.simulator.command import (
    LOAD,
    POLICIES,
    cluster_capacity,
    lower_bound_sec,
    simulate,
)
from presage.scheduler.simulator.jobs import (
    GIB,
    REPLICA_BUSY,
    STORE_BUSY,
    Knobs,
    Table,
    TraceJob,
    draw_jobs,
    interpolate_table,
)
from presage.scheduler.simulator.presage import ALL, OFF, PresagePolicy
from presage.scheduler.simulator.views import Allocation, ClusterView, Policy

PHILLY = Path("philly") / "philly.csv"
ALIBABA = Path("alibaba_dlrm_v2025") / "disaggregated_DLRM_trace.csv"
DL2 = Path("dl2_ps_worker_speed") / "derived_flat.csv"
SAME_JOB_SEC = 60.0
"""Instances of one service and role that are created within this time are one job."""
DEADLINE_FACTOR, DEADLINE_SLACK_SEC = 2.0, 600.0
"""A job's deadline is its length in the trace times the factor, plus the slack."""


def speeds(shared_data: Path) -> dict[str, Table]:
    """Return the measured speeds and busy cores of eight models, by servers and workers."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (shared_data / DL2).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["speed_sum"]) > 0:
                rows.setdefault(row["model"], []).append(
                    {
                        "num_replicas": row["num_worker"],
                        "num_stores": row["num_ps"],
                        "batch_size": row["total_batch"],
                        "samples_per_sec": row["speed_sum"],
                        REPLICA_BUSY: row["worker_cpu_mean"],
                        STORE_BUSY: row["ps_cpu_mean"],
                    }
                )
    return {kind: interpolate_table(kind, of_kind) for kind, of_kind in rows.items()}


def philly(shared_data: Path) -> list[TraceJob]:
    """Return all jobs of the training cluster by arrival, with one replica per GPU."""
    with (shared_data / PHILLY).open(encoding="utf-8", newline="") as file:
        rows = [
            (datetime.fromisoformat(row["timestamp"]).timestamp(), row)
            for row in csv.DictReader(file)
        ]
    rows.sort(key=lambda pair: pair[0])
    return [
        _job(number, at, float(row["duration"]), int(row["num_gpus"]))
        for number, (at, row) in enumerate(rows)
    ]


def alibaba(shared_data: Path) -> list[TraceJob]:
    """Return finished instances; those that are created together are one job."""
    with (shared_data / ALIBABA).open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["creation_time"] and row["deletion_time"]
        ]
    rows.sort(key=lambda row: (row["app_name"], row["role"], float(row["creation_time"])))
    groups = [
        list(group)
        for _, service in groupby(rows, key=lambda row: (row["app_name"], row["role"]))
        for group in _split_by_creation(list(service))
    ]
    groups.sort(key=lambda group: float(group[0]["creation_time"]))
    return [_group_job(number, group) for number, group in enumerate(groups)]


def _split_by_creation(rows: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    group = [rows[0]]
    for row in rows[1:]:
        if float(row["creation_time"]) - float(group[0]["creation_time"]) > SAME_JOB_SEC:
            yield group
            group = []
        group.append(row)
    yield group


def _group_job(number: int, group: list[dict[str, str]]) -> TraceJob:
    lengths = [float(row["deletion_time"]) - float(row["creation_time"]) for row in group]
    return _job(
        number,
        float(group[0]["creation_time"]),
        max(1.0, median(lengths)),
        len(group),
        median(float(row["cpu_request"]) for row in group),
        GIB * median(float(row["memory_request"]) for row in group),
    )


def _job(
    number: int,
    submit_sec: float,
    length: float,
    replicas: int,
    cpus: float | None = None,
    memory: float | None = None,
) -> TraceJob:
    return TraceJob(
        name=f"job-{number}",
        submit_sec=submit_sec,
        duration_sec=length,
        num_replicas=replicas,
        cpus=cpus,
        memory_bytes=memory,
        deadline_sec=DEADLINE_FACTOR * length + DEADLINE_SLACK_SEC,
    )


TRACES: Mapping[str, tuple[Path, Callable[[Path], list[TraceJob]]]] = {
    "philly": (PHILLY, philly),
    "alibaba_dlrm_v2025": (ALIBABA, alibaba),
}
OURS = "presage"
RANGES: Mapping[str, tuple[float, ...]] = {
    "over_request": (1.0, 1.3, 2.0, 3.0),
    "failures": (0.0, 0.03, 0.1, 0.3),
    "oom": (0.0, 0.03, 0.1, 0.15),
    "stragglers": (0.0, 0.05, 0.2, 0.5),
    "peak": (1.0, 1.5, 2.0),
}
"""Values of each parameter besides its centre."""

WITHOUT: Mapping[str, Callable[[], Policy]] = {
    f"without {field.name}": partial(
        PresagePolicy,
        replace(ALL, **{field.name: getattr(OFF, field.name)}),
        f"without {field.name}",
    )
    for field in fields(ALL)
}
"""`presage` without one of its parts."""

Figures = dict[str, dict[str, float]]
"""Policy -> name of a figure -> value."""


def window(jobs: Sequence[TraceJob], count: int, seed: int) -> list[TraceJob]:
    """Return one block of consecutive arrivals, starting at 0.

    Blocks do not overlap, and consecutive seeds use all blocks before one is repeated.
    """
    blocks = max(1, len(jobs) // count)
    first = count * int(np.random.default_rng(count).permutation(blocks)[seed % blocks])
    chosen = jobs[first : first + count]
    start = chosen[0].submit_sec
    return [replace(job, submit_sec=job.submit_sec - start) for job in chosen]


class TimedPolicy:
    """A policy that measures the CPU time of its decisions, without the simulator's."""

    def __init__(self, policy: Policy) -> None:
        """Wrap a policy."""
        self.policy, self.cpu_sec = policy, 0.0
        self.name, self.failure_policy = policy.name, policy.failure_policy
        self.interval_sec = policy.interval_sec

    def decide(self, snapshot: ClusterView) -> Mapping[int, Allocation]:
        """Return the decision of the policy."""
        start = time.process_time()
        decision = self.policy.decide(snapshot)
        self.cpu_sec += time.process_time() - start
        return decision


def simulate_round(
    jobs: Sequence[TraceJob],
    tables: Mapping[str, Table],
    knobs: Knobs,
    seed: int,
    names: Sequence[str],
    load: float,
) -> Figures:
    """Return the figures of each policy and of the lower bound for one seed."""
    centre = draw_jobs(jobs, tables, Knobs(), seed)
    capacity = cluster_capacity(centre, jobs, load)
    specs = draw_jobs(jobs, tables, knobs, seed)
    largest = cluster_capacity(specs, jobs, 1e9)  # larger requests may need a larger cluster
    capacity = replace(
        capacity,
        cpus=max(capacity.cpus, largest.cpus),
        memory_bytes=max(capacity.memory_bytes, largest.memory_bytes),
    )
    figures: Figures = {"bound": {"jct_mean_sec": lower_bound_sec(specs, capacity.cpus)}}
    for name in names:
        start, policy = time.process_time(), TimedPolicy({**POLICIES, **WITHOUT}[name]())
        result = simulate(specs, policy, capacity)
        cpu_sec = time.process_time() - start
        outcome = asdict(outcome_of(result.ended, result.used))
        figures[name] = {
            **outcome,
            "ms_per_job": 1e3 * policy.cpu_sec / len(jobs),
            "simulator_ms_per_job": 1e3 * (cpu_sec - policy.cpu_sec) / len(jobs),
        }
        report(f"seed {seed}, {name}", {"jct": outcome["jct_mean_sec"], "cpu_sec": cpu_sec})
    return figures


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of independent values and half the width of its 95 % interval (Student's t).

    Example:
        >>> interval([1.0, 2.0, 3.0])
        {'mean': 2.0, 'half': 2.484}
    """
    if len(values) < 2:
        return {"mean": short(values[0]), "half": float("inf")}
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return {"mean": short(mean(values)), "half": short(half)}


def summarize(rounds: Sequence[Figures]) -> dict[str, Any]:
    """Return means with intervals of each policy, and of each policy's JCT over ours."""
    names = list(rounds[0])
    means = {
        name: {key: interval([one[name][key] for one in rounds]) for key in rounds[0][name]}
        for name in names
    }
    over_ours = {
        name: interval([one[name]["jct_mean_sec"] / one[OURS]["jct_mean_sec"] for one in rounds])
        for name in names
        if name != OURS
    }
    return {"policies": means, "jct_over_ours": over_ours}


def ratios(rounds: Sequence[Figures]) -> tuple[str, list[float]]:
    """Return the best policy that is not ours, and its mean JCT over ours in each round."""
    others = [name for name in rounds[0] if name not in ("bound", OURS, *WITHOUT)]
    best = min(others, key=lambda name: mean(one[name]["jct_mean_sec"] for one in rounds))
    return best, [one[best]["jct_mean_sec"] / one[OURS]["jct_mean_sec"] for one in rounds]


def points(sweep: Sequence[str]) -> Iterator[tuple[str, Knobs]]:
    """Yield the centre, then each of some parameters at the other values of its range."""
    yield "centre", Knobs()
    for knob, values in RANGES.items():
        for value in values if {knob, "all"} & {*sweep} else ():
            yield f"{knob}={value:g}", replace(Knobs(), **{knob: value})


def measure(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Return the result of the benchmark."""
    if not (options.shared_data / DL2).exists():
        raise MissingError(f"measurements must exist, got no {options.shared_data / DL2}")
    tables = speeds(options.shared_data)
    names = (*options.policies, *(WITHOUT if options.parts else ()))
    seeds = range(options.first_seed, options.first_seed + options.rounds)
    traces: dict[str, Any] = {}
    at_centre: dict[str, list[Figures]] = {}
    for trace in options.trace:
        path, read = TRACES[trace]
        if not (options.shared_data / path).exists():
            sys.stderr.write(f"skipped {trace}, there is no {options.shared_data / path}\n")
            continue
        jobs, results = read(options.shared_data), {}
        for point, knobs in points(options.sweep):
            rounds = [
                simulate_round(
                    window(jobs, options.jobs, seed), tables, knobs, seed, names, options.load
                )
                for seed in seeds
            ]
            results[point] = summarize(rounds)
            at_centre.setdefault(trace, rounds)
        traces[trace] = results
    if not at_centre:
        raise MissingError(f"a trace must exist, got none in {options.shared_data}")
    head = compare_traces(at_centre)
    return {**head, "jobs": options.jobs, "load": options.load, "traces": traces}


def compare_traces(traces: Mapping[str, Sequence[Figures]]) -> dict[str, Any]:
    """Compare ours with the best other policy of each trace, over all rounds."""
    best = {trace: ratios(rounds)[0] for trace, rounds in traces.items()}
    ours, peer = (
        [one[side(trace)]["jct_mean_sec"] for trace, rounds in traces.items() for one in rounds]
        for side in (lambda _: OURS, best.__getitem__)
    )
    unit = "mean seconds from submission to end, simulated, against the best other policy"
    each = [b / a for a, b in zip(ours, peer, strict=True)]
    geometric = short(float(np.exp(np.mean(np.log(each)))))
    return compared(ours, peer, unit, geometric_ratio=geometric, peers=best)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("policies", __doc__, rounds=5)
    options.add("--first-seed", 0, "of the rounds")
    options.add("--jobs", 1000, "arrivals of each round", small=8)
    options.add("--trace", tuple(TRACES), "traces", choices=tuple(TRACES))
    options.add("--policies", tuple(POLICIES), "with presage", choices=tuple(POLICIES))
    options.add("--load", LOAD, "of the cluster, by requests")
    options.add("--sweep", ("none",), "also sweep these", choices=("none", "all", *RANGES))
    options.add("--parts", False, "also run ours without each part")
    options.add_shared_data()
    policies = options.parse(argv).policies
    if OURS not in policies or not set(policies) - {OURS}:
        got = ",".join(policies)
        options.parser.error(f"--policies must name {OURS} and a peer, got {got!r}")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
