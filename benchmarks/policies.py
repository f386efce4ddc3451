"""Our policy against four others, simulated on the arrivals of two published clusters.

`python -m benchmarks.policies [--json] [--seeds N] [--jobs N] [--trace NAME] [--sweep] ...`

Each round is one seed: one block of consecutive arrivals, which the seed chooses and no seed
near it shares, jobs drawn from the measured speeds of eight models, and all that traces do not
hold drawn by five knobs (`benchmarks/policies.md` states every assumption). Every policy
gets the same jobs, accidents and cluster. `ours` and `peer` are mean job completion
times, `peer` of the best policy that is not ours over all rounds; a trace that is absent is
named on stderr and left out. `--sweep KNOB`, or `all`, adds a knob over its range, one at a
time; `--parts` adds ours without each of its parts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks.logs import SHARED_DATA
from benchmarks.policies_jobs import ALIBABA, DL2, PHILLY, alibaba, philly, speeds
from scheduler.simulator.cluster import outcome_of
from scheduler.simulator.command import (
    LOAD,
    POLICIES,
    cluster_capacity,
    lower_bound_sec,
    parse_policies,
    simulate,
)
from scheduler.simulator.jobs import Knobs, Table, TraceJob, draw_jobs
from scheduler.simulator.presage import ALL, OFF, PresagePolicy
from scheduler.simulator.views import Policy, Sizes, Snapshot

TRACES: Mapping[str, tuple[Path, Callable[[Path], list[TraceJob]]]] = {
    "philly": (PHILLY, philly),
    "alibaba_dlrm_v2025": (ALIBABA, alibaba),
}
OURS, OURS_LIVE = "presage", "presage-live"
RANGES: Mapping[str, tuple[float, ...]] = {
    "over_request": (1.0, 1.3, 2.0, 3.0),
    "failures": (0.0, 0.03, 0.1, 0.3),
    "oom": (0.0, 0.03, 0.1, 0.15),
    "stragglers": (0.0, 0.05, 0.2, 0.5),
    "peak": (1.0, 1.5, 2.0),
}
"""Values of each knob besides its centre."""

WITHOUT: Mapping[str, Callable[[], Policy]] = {
    f"without {field.name}": partial(
        PresagePolicy,
        replace(ALL, **{field.name: getattr(OFF, field.name)}),
        f"without {field.name}",
    )
    for field in fields(ALL)
}
"""Ours without one of its parts."""

Numbers = dict[str, dict[str, float]]
"""By policy, by name of the number."""


def window(jobs: Sequence[TraceJob], count: int, seed: int) -> list[TraceJob]:
    """Return one block of consecutive arrivals, the first at 0.

    Blocks do not overlap, and seeds go through all of them before one comes again.
    """
    blocks = max(1, len(jobs) // count)
    first = count * int(np.random.default_rng(count).permutation(blocks)[seed % blocks])
    chosen = jobs[first : first + count]
    start = chosen[0].submit_sec
    return [replace(job, submit_sec=job.submit_sec - start) for job in chosen]


class Timed:
    """A policy, and the processor time of its decisions: not that of the simulator around it."""

    def __init__(self, policy: Policy) -> None:
        """Begin at nothing."""
        self.policy, self.spent_sec = policy, 0.0
        self.name, self.handling = policy.name, policy.handling
        self.interval_sec = policy.interval_sec

    def decide(self, snapshot: Snapshot) -> Mapping[int, Sizes]:
        """Return what the policy decides."""
        begun = time.process_time()
        found = self.policy.decide(snapshot)
        self.spent_sec += time.process_time() - begun
        return found


def one_round(
    jobs: Sequence[TraceJob],
    tables: Mapping[str, Table],
    knobs: Knobs,
    seed: int,
    names: Sequence[str],
    load: float,
) -> Numbers:
    """Return the numbers of each policy, and the bound beside them, for one seed."""
    centre = draw_jobs(jobs, tables, Knobs(), seed)
    capacity = cluster_capacity(centre, jobs, load)
    specs = draw_jobs(jobs, tables, knobs, seed)
    largest = cluster_capacity(specs, jobs, 1e9)  # asks for more may need a larger cluster
    capacity = replace(
        capacity,
        cpus=max(capacity.cpus, largest.cpus),
        memory_bytes=max(capacity.memory_bytes, largest.memory_bytes),
    )
    found: Numbers = {"bound": {"jct_mean_sec": lower_bound_sec(specs, capacity.cpus)}}
    for name in names:
        begun, policy = time.process_time(), Timed({**POLICIES, **WITHOUT}[name]())
        result = simulate(specs, policy, capacity)
        spent = time.process_time() - begun
        outcome = asdict(outcome_of(result.ended, result.used))
        found[name] = {
            **outcome,
            "ms_per_job": 1e3 * policy.spent_sec / len(jobs),
            "simulator_ms_per_job": 1e3 * (spent - policy.spent_sec) / len(jobs),
        }
        _say(f"seed {seed}, {name}: JCT {outcome['jct_mean_sec']:,.0f} s, {spent:.0f} s of CPU")
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of independent values and the half of its 95 % interval (Student's t).

    Example:
        >>> interval([1.0, 2.0, 3.0])
        {'mean': 2.0, 'half': 2.484}
    """
    if len(values) < 2:
        return {"mean": _short(values[0]), "half": float("inf")}
    half = float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return {"mean": _short(mean(values)), "half": _short(half)}


def summary(rounds: Sequence[Numbers]) -> dict[str, Any]:
    """Return means with intervals of each policy, and of what ours is better by in each round."""
    names = list(rounds[0])
    means = {
        name: {key: interval([one[name][key] for one in rounds]) for key in rounds[0][name]}
        for name in names
    }
    against = {
        name: interval([one[name]["jct_mean_sec"] / one[OURS]["jct_mean_sec"] for one in rounds])
        for name in names
        if name != OURS
    }
    return {"policies": means, "jct_over_ours": against}


def ratios(rounds: Sequence[Numbers]) -> tuple[str, list[float]]:
    """Return the best policy that is not ours, and its mean JCT over ours in each round."""
    others = [name for name in rounds[0] if name not in ("bound", OURS, OURS_LIVE, *WITHOUT)]
    best = min(others, key=lambda name: mean(one[name]["jct_mean_sec"] for one in rounds))
    return best, [one[best]["jct_mean_sec"] / one[OURS]["jct_mean_sec"] for one in rounds]


def points(sweep: str | None) -> Iterator[tuple[str, Knobs]]:
    """Yield the centre, and a knob, or `all` of them, at each other value of its range."""
    yield "centre", Knobs()
    for knob, values in RANGES.items():
        for value in values if sweep in (knob, "all") else ():
            yield f"{knob}={value:g}", replace(Knobs(), **{knob: value})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that is printed.

    Raises:
        FileNotFoundError: the speeds, or all traces, are absent.
    """
    tables = speeds(options.shared_data)
    names = (*parse_policies(options.policies), *(WITHOUT if options.parts else ()))
    traces: dict[str, Any] = {}
    best: list[tuple[str, list[Numbers]]] = []
    for trace, (path, read) in TRACES.items():
        if options.trace not in (trace, "all"):
            continue
        if not (options.shared_data / path).exists():
            _say(f"left out {trace}: there is no {options.shared_data / path}")
            continue
        jobs, found = read(options.shared_data), {}
        for point, knobs in points(options.sweep):
            _say(f"{trace}, {point}")
            rounds = [
                one_round(
                    window(jobs, options.jobs, seed), tables, knobs, seed, names, options.load
                )
                for seed in range(options.first_seed, options.first_seed + options.seeds)
            ]
            found[point] = summary(rounds)
            if point == "centre":
                best.append((trace, rounds))
        traces[trace] = found
    if not best:
        raise FileNotFoundError(f"a trace must exist, got none in {options.shared_data}")
    return {**_headline(best), "jobs": options.jobs, "load": options.load, "traces": traces}


def _headline(best: Sequence[tuple[str, Sequence[Numbers]]]) -> dict[str, Any]:
    """Return ours, peer and ratio, over all traces at the centre."""
    rounds = [one for _, found in best for one in found]
    by_trace = {trace: ratios(found) for trace, found in best}
    ours = mean(one[OURS]["jct_mean_sec"] for one in rounds)
    peers = [one[by_trace[trace][0]]["jct_mean_sec"] for trace, found in best for one in found]
    each = [ratio for _, found in by_trace.values() for ratio in found]
    return {
        "ours": round(ours, 1),
        "peer": round(mean(peers), 1),
        "ratio": round(float(np.exp(np.mean(np.log(each)))), 3),
        "unit": "mean seconds from submission to end, simulated, against the best other policy",
        "rounds": [round(ratio, 3) for ratio in each],
        "peers": {trace: found[0] for trace, found in by_trace.items()},
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--seeds", type=int, default=5, help="rounds")
    parser.add_argument("--first-seed", type=int, default=0, help="of the rounds")
    parser.add_argument("--jobs", type=int, default=1000, help="arrivals of each round")
    parser.add_argument("--trace", choices=(*TRACES, "all"), default="all")
    parser.add_argument("--policies", default=",".join(POLICIES), help="ours among them")
    parser.add_argument("--load", type=float, default=LOAD, help="of the cluster, by requests")
    parser.add_argument("--sweep", choices=(*RANGES, "all"), help="a knob over its range, too")
    parser.add_argument("--parts", action="store_true", help="ours without each part, too")
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    options = parser.parse_args(argv)
    named = options.policies.split(",")
    if OURS not in named or not set(named) - {OURS, OURS_LIVE}:
        parser.error(f"--policies must name {OURS} and a peer, got {options.policies!r}")
    if not (options.shared_data / DL2).exists():
        _say(f"measurements must exist, got no {options.shared_data / DL2}")
        return 1
    result = measure(options)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
