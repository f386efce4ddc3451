"""Cost of planning a cache: its share of a training step, and the time per access.

`python -m benchmarks.plan [--json] [--rounds N] [--steps N] [--dataset DATASET]`

The demo job is built (or a dataset is given) and trained with the planned cache in front of stores
in memory. Each round measures the steps of training, and the work of the plan in them: reading the
index and planning all tables, in the cache's thread. `ours` is the plan's CPU seconds per step,
`peer` the seconds of a step, so a `ratio` of 20 means that the plan takes 5 % of one core.
`critical_share` is the share of the steps' time in which training waited for rows while the plan
was computed. Both policies run in each round; the headline is the more expensive one.
`ns_per_access` is planning alone, over an index decoded in memory; an access is one row of one
table in one step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.logs import SHARED_DATA, build_dataset, job_path, raw_log, write_result
from schemas.config.train import CacheConfig
from schemas.dataset.accesses import num_unique_rows
from schemas.dataset.opened import Dataset, open_dataset
from schemas.dataset.order import Order
from schemas.dataset.run_next_uses import NextUses, indexed_steps
from schemas.oracle.cache_plan import Plan, PlanStep, required_rows, summarize
from trainer.components import build_components, order_of, plans_of
from trainer.data.decode import spec_of
from trainer.data.reader import Reader, prefetch
from trainer.embedding.cache import PlannedCache, RowsOfTables, TablePlan
from trainer.step import PhaseTimer, train_batch
from trainer.stores.store import GatheredRows

CACHE_SHARE = 0.05
"""Size of Belady's cache as a share of the largest table's rows, at least the required minimum."""


@dataclass(slots=True)
class Spans:
    """Wall-clock intervals of some work, and its total CPU seconds."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    cpu_sec: float = 0.0

    def add(self, start: float, cpu_start: float) -> None:
        """Add an interval that ends now."""
        self.cpu_sec += time.thread_time() - cpu_start
        self.spans.append((start, time.perf_counter()))


def overlap_sec(
    some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> float:
    """Return the seconds in which intervals of both sorted lists overlap.

    Example:
        >>> overlap_sec([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)])
        1.5
    """
    total, first = 0.0, 0
    for start, end in some:
        while first < len(others) and others[first][1] <= start:
            first += 1
        index = first
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(start, others[index][0])
            index += 1
    return total


def record_planning(steps: Iterator[PlanStep], spans: Spans) -> Iterator[PlanStep]:
    """Yield the steps of a plan and record when they are computed."""
    while True:
        start, cpu_start = time.perf_counter(), time.thread_time()
        step = next(steps, None)
        spans.add(start, cpu_start)
        if step is None:
            return
        yield step


class RecordingCache(PlannedCache):
    """A planned cache that records when training waits for rows."""

    def __init__(self, *parts: Any, waits: Spans, **settings: Any) -> None:
        """Add `waits` to the arguments of a planned cache."""
        super().__init__(*parts, **settings)
        self._waits = waits

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return a step's rows, and record the wait for their prefetch."""
        if self._pending:
            start, cpu_start = time.perf_counter(), time.thread_time()
            self._pending[0].result()
            self._waits.add(start, cpu_start)
        return super().gather(train_step, rows)


def train_planned(dataset: Dataset, cache: CacheConfig, max_steps: int) -> dict[str, float]:
    """Train the dataset's own job with a plan, for at most `max_steps` steps.

    Returns:
        seconds of a step, CPU seconds of its plan, and the share of the steps' time in which
        training waited while the plan was computed, without the first step.
    """
    config, order = dataset.job.train, order_of(dataset.job, dataset)
    spec = spec_of(dataset, config.dtype)
    components = build_components(spec, config)
    planning, waits = Spans(), Spans()
    plans = {
        table: TablePlan(record_planning(plan.steps, planning), plan.row_of_number)
        for table, plan in plans_of(dataset, order, components.store.layouts, cache, 0).items()
    }
    last = min(max_steps, order.num_steps)
    source = RecordingCache(
        components.store, plans, waits=waits, first_step=0, last_step=last,
        prefetch_steps=cache.prefetch_steps,
    )  # fmt: skip
    components.embedding.set_source(source)
    timer = PhaseTimer(time.perf_counter)
    batches = prefetch(Reader(dataset, order, spec).read, range(last), 2)
    ends: list[float] = []
    for _ in range(last):
        train_batch(components, next(batches), timer)
        ends.append(time.perf_counter())
    source.close()
    seconds = ends[-1] - ends[0]
    measured_waits = [span for span in waits.spans if span[0] >= ends[0]]
    return {
        "step_sec": seconds / (last - 1),
        "plan_sec": planning.cpu_sec / last,
        "critical_share": overlap_sec(measured_waits, planning.spans) / seconds,
    }


def plan_alone(dataset: Dataset, order: Order, caches: Mapping[str, CacheConfig]) -> dict[str, Any]:
    """Measure each policy over all tables, from an index decoded in memory."""
    index = dataset.index_for(order)
    figures: dict[str, Any] = {}
    for name, cache in caches.items():
        seconds, accesses, fetched = 0.0, 0, 0
        for table in dataset.job.data.tables:
            steps = list(indexed_steps(dataset, index, table))
            start = time.thread_time()
            summary = summarize(Plan(steps, cache))
            seconds += time.thread_time() - start
            accesses += summary.num_accesses
            fetched += summary.fetched_rows
        figures[name] = {
            "ns_per_access": seconds / accesses * 1e9,
            "accesses_per_step": accesses / order.num_steps,
            "hit_rate": 1 - fetched / accesses,
            "cache_rows": cache.rows,
        }
    return figures


def caches_of(dataset: Dataset, order: Order) -> dict[str, CacheConfig]:
    """Return the job's cache with both policies; Belady's is large enough for all tables."""
    index = dataset.index_for(order)
    belady = replace(dataset.job.train.cache, policy="belady")
    required = 1
    for table in dataset.job.data.tables:
        required = max(required, required_rows(NextUses(dataset, index, table), belady))
    share = int(CACHE_SHARE * max(num_unique_rows(dataset, t) for t in dataset.job.data.tables))
    return {
        "ttl": replace(dataset.job.train.cache, policy="ttl", rows=None),
        "belady": replace(belady, rows=max(required, share)),
    }


def measure(dataset: Dataset, rounds: int, max_steps: int) -> dict[str, Any]:
    """Run all rounds and return the result."""
    order = order_of(dataset.job, dataset)
    caches = caches_of(dataset, order)
    alone = plan_alone(dataset, order, caches)
    trainings: dict[str, list[dict[str, float]]] = {name: [] for name in caches}
    for number in range(rounds):
        for name, cache in caches.items():
            trainings[name].append(train_planned(dataset, cache, max_steps))
            sys.stderr.write(f"round {number}, {name}: {trainings[name][-1]}\n")
    details = {
        name: alone[name]
        | {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        | {"core_share": statistics.median(r["plan_sec"] / r["step_sec"] for r in runs)}
        for name, runs in trainings.items()
    }
    costly = max(details, key=lambda name: details[name]["core_share"])
    ours, peer = details[costly]["plan_sec"], details[costly]["step_sec"]
    return {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "unit": f"seconds per step: index and {costly} plan against the whole step",
        "rounds": [run["step_sec"] / run["plan_sec"] for run in trainings[costly]],
        "details": details,
    }


def demo_dataset(scratch: Path) -> Path:
    """Generate the demo's log and build its dataset."""
    log = raw_log("demo", SHARED_DATA, scratch)
    assert log is not None, "the demo's log is generated"
    return build_dataset(job_path("demo"), log, scratch / "dataset")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=sys.maxsize, help="steps of each training, at least 2"
    )
    parser.add_argument(
        "--dataset", type=Path, help="a dataset with an index for its job's batches"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        dataset = options.dataset or demo_dataset(Path(scratch))
        result = measure(open_dataset(dataset), options.rounds, options.steps)
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
