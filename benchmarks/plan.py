"""What planning a cache costs: its share of a training step, and the time of an access.

`python -m benchmarks.plan [--json] [--rounds N] [--steps N] [--dataset DATASET]`

The demo job is built (or a dataset given) and trained with the planned cache in front of stores in
memory. In each round the training's steps are timed, and so is everything that the plan does in
them: reading the index and planning all tables, in the cache's own thread. `ours` is the plan's
processor seconds of a step, `peer` the step's seconds, so `ratio` says how many times the plan
would fit into one core that does nothing else; 20 are 5 % of a core. `critical_share` is the part
of the steps' time in which training stood still for rows while the plan was being made. Both
policies are run, in turns; the figures in front are those of the more costly one. `ns_per_access`
is planning alone, over an index that lies decoded in memory, an access being one row of one table
in one step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.logs import SHARED_DATA, job_path, raw_log
from benchmarks.order import built
from schemas.accesses import indexed_steps
from schemas.cache_plan import Plan, PlanStep, required_rows, summarize
from schemas.config.train import CacheConfig
from schemas.dataset import Dataset, open_dataset
from schemas.order import Order
from trainer.components import build_components, order_of, plans_of
from trainer.data.decode import spec_of
from trainer.data.reader import Reader, prefetch
from trainer.embedding.cache import PlannedCache, RowsOfTables, TablePlan
from trainer.step import PhaseTimer, train_batch
from trainer.stores.api import GatheredRows

CACHE_SHARE = 0.05
"""Belady's cache, as a share of the rows of the largest table, but at least what it needs."""


@dataclass(slots=True)
class Spans:
    """When something ran: wall seconds from and to, and processor seconds."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    cpu_sec: float = 0.0

    def add(self, start: float, cpu_start: float) -> None:
        """End what began at a wall and a thread time."""
        self.cpu_sec += time.thread_time() - cpu_start
        self.spans.append((start, time.perf_counter()))


def overlap_sec(
    some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> float:
    """Return the seconds in which spans of both lists run; spans of one list follow each other.

    Example:
        >>> overlap_sec([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)])
        1.5
    """
    total, place = 0.0, 0
    for start, end in some:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(start, others[at][0])
            at += 1
    return total


def timed(steps: Iterator[PlanStep], spans: Spans) -> Iterator[PlanStep]:
    """Pass a plan on and note when it is made."""
    while True:
        start, cpu_start = time.perf_counter(), time.thread_time()
        step = next(steps, None)
        spans.add(start, cpu_start)
        if step is None:
            return
        yield step


class Watched(PlannedCache):
    """A planned cache that notes when training waits for its rows."""

    def __init__(self, *parts: Any, waits: Spans, **settings: Any) -> None:
        """Keep the parts of a planned cache, and where to note."""
        super().__init__(*parts, **settings)
        self._waits = waits

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return where a step's rows lie, after the read of them that was issued steps before."""
        if self._pending:
            start, cpu_start = time.perf_counter(), time.thread_time()
            self._pending[0].result()
            self._waits.add(start, cpu_start)
        return super().gather(train_step, rows)


def train_planned(dataset: Dataset, cache: CacheConfig, most_steps: int) -> dict[str, float]:
    """Train the dataset's own job once under a plan, for a number of steps or all.

    Returns:
        seconds of a step, processor seconds of its plan, and the share of the steps' time in which
        training waited while the plan was made; the first step is left out.
    """
    config, order = dataset.job.train, order_of(dataset.job, dataset)
    spec = spec_of(dataset, config.dtype)
    components = build_components(spec, config)
    planning, waits = Spans(), Spans()
    plans = {
        table: TablePlan(timed(found.steps, planning), found.row_of_number)
        for table, found in plans_of(dataset, order, components.store.layouts, cache, 0).items()
    }
    last = min(most_steps, order.num_steps)
    source = Watched(
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
    waited = [span for span in waits.spans if span[0] >= ends[0]]
    return {
        "step_sec": seconds / (last - 1),
        "plan_sec": planning.cpu_sec / last,
        "critical_share": overlap_sec(waited, planning.spans) / seconds,
    }


def plan_alone(dataset: Dataset, order: Order, caches: Mapping[str, CacheConfig]) -> dict[str, Any]:
    """Time each policy over all tables, from an index that lies decoded in memory."""
    index = dataset.index_for(order)
    found: dict[str, Any] = {}
    for name, cache in caches.items():
        seconds, accesses, fetched = 0.0, 0, 0
        for table in dataset.job.data.tables:
            steps = list(indexed_steps(dataset, index, table, order))
            start = time.thread_time()
            summary = summarize(Plan(steps, cache))
            seconds += time.thread_time() - start
            accesses += summary.num_accesses
            fetched += summary.fetched_rows
        found[name] = {
            "ns_per_access": seconds / accesses * 1e9,
            "accesses_per_step": accesses / order.num_steps,
            "hit_rate": 1 - fetched / accesses,
            "cache_rows": cache.rows,
        }
    return found


def caches_of(dataset: Dataset, order: Order) -> dict[str, CacheConfig]:
    """Return the job's cache under both policies, Belady's with a size that fits all tables."""
    index = dataset.index_for(order)
    best = replace(dataset.job.train.cache, policy="belady")
    needed = 1
    for table in dataset.job.data.tables:
        steps = indexed_steps(dataset, index, table, order)
        needed = max(needed, required_rows((distances for _, distances in steps), best))
    share = int(CACHE_SHARE * max(index.manifest.num_rows.values()))
    return {
        "ttl": replace(dataset.job.train.cache, policy="ttl", rows=None),
        "belady": replace(best, rows=max(needed, share)),
    }


def measure(dataset: Dataset, rounds: int, most_steps: int) -> dict[str, Any]:
    """Run the rounds and put the figures together."""
    order = order_of(dataset.job, dataset)
    caches = caches_of(dataset, order)
    alone = plan_alone(dataset, order, caches)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in caches}
    for number in range(rounds):
        for name, cache in caches.items():
            found[name].append(train_planned(dataset, cache, most_steps))
            sys.stderr.write(f"round {number}, {name}: {found[name][-1]}\n")
    details = {
        name: alone[name]
        | {key: statistics.median(r[key] for r in runs) for key in runs[0]}
        | {"core_share": statistics.median(r["plan_sec"] / r["step_sec"] for r in runs)}
        for name, runs in found.items()
    }
    costly = max(details, key=lambda name: details[name]["core_share"])
    ours, peer = details[costly]["plan_sec"], details[costly]["step_sec"]
    return {
        "ours": ours,
        "peer": peer,
        "ratio": peer / ours,
        "unit": f"seconds of a step: index and {costly} plan against all of it",
        "rounds": [run["step_sec"] / run["plan_sec"] for run in found[costly]],
        "details": details,
    }


def demo_dataset(scratch: Path) -> Path:
    """Generate the demo's log and build it."""
    log = raw_log("demo", SHARED_DATA, scratch)
    assert log is not None, "the demo makes its own log"
    return built(job_path("demo"), log, scratch / "dataset")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=sys.maxsize, help="of each training, 2 or more"
    )
    parser.add_argument("--dataset", type=Path, help="built for the batches of its own job")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        given = options.dataset or demo_dataset(Path(scratch))
        result = measure(open_dataset(given), options.rounds, options.steps)
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
