"""The oracle and the plans that it gives: speed, bytes and memory.

`kernels`: distinct rows of each step and the next use of each row. `ours` is
`presage.schemas.oracle.next_uses.distinct` and `presage.schemas.oracle.next_uses.next_use`; the
peer is the obvious numpy solution, one sort of all accesses by (row, step). Both give the same
result and use one thread per core. With a checkout of BagPipe, its oracle processes the same
accesses in the same rounds (`peers/bagpipe.py`): compare rates per CPU second. Uniform ids over 10
M rows are the worst case.

`bytes`: of the oracle files of shipped jobs.

`plan`: the demo's job is trained with the planned cache in front of stores in memory. A round
measures the steps of training, and the work of the plan in them: reading the index and planning all
tables, in the cache's thread. `ours` is the plan's CPU seconds per step, `peer` the seconds of a
step, so a `ratio` of 20 means that the plan takes 5 % of one core. The result is the more expensive
policy. `ns_per_access` is planning alone, over an index decoded in memory; an access
is one row of one table in one step.

`memory`: peak memory of planning a large table, with 16,384 uniform accesses per step. `ours` is
the trainer's plan (Belady, a cache of 5 % of the rows, at least four steps), which decodes files
step by step; the peer is the same plan over fully decoded lists and next uses. Each is a process.

`windows`: rows that a step fetches when rows are kept for uses within a window of steps only, as
BagPipe does, and when the whole run is known, on the log of `benchmarks.cache --parts links`; and
the losses of a run with the planned cache against one without.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.harness import (
    Options,
    alternate,
    compared,
    median,
    medians,
    ratios,
    report,
)
from benchmarks.common.id_logs import write_id_job, write_id_log
from benchmarks.common.logs import (
    build_dataset,
    build_job,
    demo_dataset,
    each_log,
    job_path,
    read_job,
    write_job_file,
)
from benchmarks.common.processes import in_process, measured
from benchmarks.common.reuse import build_reuse
from benchmarks.common.skew import NUM_ROWS, skewed_rows, uniform_rows
from benchmarks.common.training import train_steps
from benchmarks.peers.bagpipe import bagpipe_rate, fetches_equal_rows
from presage.pipelines.report.sizes import dataset_bytes
from presage.pipelines.table.indexes import PartBuilder, add_index
from presage.pipelines.table.segment import sum_bytes
from presage.schemas.arrays import Jagged
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.accesses import num_unique_rows
from presage.schemas.dataset.opened import (
    Index,
    OpenDataset,
    open_dataset,
)
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import NextUses, indexed_steps
from presage.schemas.machine import num_cores
from presage.schemas.oracle.cache_plan import (
    CachePlan,
    PlanStep,
    plan_table,
    required_rows,
    summarize,
    summarize_tables,
)
from presage.schemas.oracle.next_uses import distinct, next_use
from presage.trainer.components import build_components, order_of, plan_of_rows
from presage.trainer.data.decode import spec_of
from presage.trainer.data.reader import Reader, prefetch
from presage.trainer.embedding.cache import PlannedCache
from presage.trainer.options import TrainOptions
from presage.trainer.step import PhaseTimer, train_batch

BATCHES = 2_048, 16_384
LOOKAHEAD = 200
"""BagPipe's default window in batches; the benchmark limits it to a quarter of the run."""
SHORT_RUN = 131_072
"""Samples of a run that is over before a window of BagPipe's has paid."""
Kernel = Callable[[NDArray[np.int32], int, int], NDArray[np.int32]]


def ours(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the next-use distances of all entries, step by step."""
    offsets = np.append(np.arange(0, len(rows), batch), len(rows))
    unique = distinct(Jagged(rows.astype(np.int64), offsets))
    steps = [unique.values[a:b] for a, b in pairwise(unique.offsets.tolist())]
    return np.concatenate(next_use(steps, num_rows))


def one_sort(rows: NDArray[np.int32], batch: int, num_rows: int) -> NDArray[np.int32]:
    """Return the same by a sort by (row, step) and a sort back to (step, row)."""
    del num_rows
    step = np.arange(len(rows)) // batch
    keys = np.sort(rows.astype(np.int64) << 32 | step)
    keys = keys[np.diff(keys, prepend=-1) != 0]
    row, step = keys >> 32, keys & 0xFFFFFFFF
    distances = np.zeros(len(keys), np.int32)
    has_next = row[1:] == row[:-1]
    distances[:-1][has_next] = np.diff(step)[has_next]
    return distances[np.argsort(step, kind="stable")]


def rate(
    kernel: Kernel, columns: Sequence[NDArray[np.int32]], batch: int, num_rows: Sequence[int]
) -> tuple[float, float]:
    """Return accesses per wall second and per CPU second."""
    tables = list(zip(columns, num_rows, strict=True))[::-1]  # the largest table first
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(num_cores()) as threads:
        list(threads.map(lambda table: kernel(table[0], batch, table[1]), tables))
    total = sum(map(len, columns))
    return total / (time.perf_counter() - wall_start), total / (time.process_time() - cpu_start)


def compare_kernels(
    columns: Sequence[NDArray[np.int32]],
    num_rows: Sequence[int],
    batch: int,
    rounds: int,
    bagpipe: Path | None,
) -> dict[str, Any]:
    """Measure the rates of all kernels."""
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: rate(ours, columns, batch, num_rows),
        "peer": lambda: rate(one_sort, columns, batch, num_rows),
    }
    if bagpipe is not None:
        window = min(LOOKAHEAD, len(columns[0]) // batch // 4)
        sides["bagpipe"] = lambda: bagpipe_rate(bagpipe, columns, num_rows, batch, window)
    expected, actual = (kernel(columns[-1], batch, num_rows[-1]) for kernel in (one_sort, ours))
    assert np.array_equal(actual, expected), "both kernels must give the same next uses"
    rates = alternate(sides, rounds)
    wall, cpu = (
        {name: [one[clock] / 1e6 for one in of] for name, of in rates.items()} for clock in (0, 1)
    )
    return compared(
        wall["ours"],
        wall["peer"],
        "million accesses a second, against one sort",
        higher=True,
        per_cpu_second={name: median(of) for name, of in cpu.items()},
        cpu_rounds={name: ratios(cpu["ours"], of, higher=True) for name, of in cpu.items()},
    )


def measure_kernels(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Measure the kernels on 26 skewed tables, and on two of uniform rows."""
    samples, bagpipe = options.samples, options.bagpipe
    columns = [skewed_rows(num_rows, samples, 0) for num_rows in NUM_ROWS]
    worst = [uniform_rows(NUM_ROWS[-1], samples * 4, seed) for seed in range(2)]
    if bagpipe is None:
        sys.stderr.write("skipped BagPipe's oracle; pass a checkout of it with --bagpipe\n")
    else:
        few = [rows[:2_048] for rows in columns[:16]]
        assert fetches_equal_rows(bagpipe, few, NUM_ROWS[:16], 64), "fetched rows must be equal"
    found: dict[str, Any] = {}
    for batch in BATCHES:
        inputs = {
            "": (columns, NUM_ROWS),
            f", {SHORT_RUN:,} samples": ([rows[:SHORT_RUN] for rows in columns], NUM_ROWS),
            ", uniform": (worst, (NUM_ROWS[-1],) * 2),
        }
        for kind, (rows, sizes) in inputs.items():
            figures = compare_kernels(rows, sizes, batch, options.rounds, bagpipe)
            found[f"kernels, batch {batch}{kind}"] = figures
    return found


BATCH_SAMPLES = 8_192
GOALS = {"kuairand": 0.10, "demo": 0.25, "mind": None}
"""Shipped job -> target for the size of access lists and index, as a share of the dataset."""
GOAL_BYTES_PER_ENTRY = 2.5


def measure_bytes(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure the files of each log."""
    logs = each_log(options, scratch)
    return {f"bytes of {name}": bytes_of(name, log, folder) for name, log, folder in logs}


def bytes_of(name: str, log: Path, scratch: Path) -> dict[str, Any]:
    """Build a shipped job and index it at `BATCH_SAMPLES`."""
    build_job(job_path(name), log, scratch / "dataset")
    dataset = open_dataset(scratch / "dataset")
    block = dataset.job.data.block_samples
    order = dataset.order(-(-BATCH_SAMPLES // block) * block, 1, "none", 0)
    dataset = add_index(dataset, order, PartBuilder(dataset.directory, []))
    index = dataset.index_for(order)
    sizes = {
        part: sum(sum_bytes(list(s.files.values()), f"{part}/") for s in dataset.segments)
        for part in ("access", "edges")
    }
    entries = sum(map(index.num_accesses, dataset.job.data.tables))
    size = dataset_bytes(dataset)
    together = sizes["access"] + index.oracle_bytes
    return compared(
        [together / entries],
        [GOAL_BYTES_PER_ENTRY],
        "bytes per entry, against the goal",
        batch_samples=index.entry.batch_samples,
        entries=entries,
        dataset=size,
        sizes=sizes,
        index=index.oracle_bytes,
        share_of_dataset=round(together / size, 4),
        goal_share=GOALS.get(name),
        share_with_edges=round((together + sizes["edges"]) / size, 4),
    )


# Plans of caches.

CACHE_SHARE = 0.05
"""Size of Belady's cache as a share of all tables' rows, at least the required minimum."""


def record_planning(
    steps: Iterator[Mapping[str, PlanStep]], cpu_sec: list[float]
) -> Iterator[Mapping[str, PlanStep]]:
    """Yield the steps of a plan and add the CPU seconds of each to a list."""
    while True:
        start = time.thread_time()
        step = next(steps, None)
        cpu_sec.append(time.thread_time() - start)
        if step is None:
            return
        yield step


def train_planned(dataset: OpenDataset, cache: CacheConfig, max_steps: int) -> dict[str, float]:
    """Train the dataset's own job with a plan, for at most `max_steps` steps.

    Returns:
        seconds of a step, without the first one, and CPU seconds of its plan.
    """
    config, order = dataset.job.train, order_of(dataset.job, dataset)
    spec = spec_of(dataset, config.dtype)
    components = build_components(spec, config)
    cpu_sec: list[float] = []
    plan = plan_of_rows(dataset, order, components.store.layouts, cache, 0)
    last = min(max_steps, order.num_steps)
    source = PlannedCache(
        components.store,
        replace(plan, steps=record_planning(plan.steps, cpu_sec)),
        first_step=0,
        last_step=last,
        prefetch_steps=cache.prefetch_steps,
    )
    components.embedding.set_source(source)
    timer = PhaseTimer(time.perf_counter)
    batches = prefetch(Reader(dataset, order, spec).read, range(last), 2)
    ends: list[float] = []
    for _ in range(last):
        train_batch(components, next(batches), timer)
        ends.append(time.perf_counter())
    source.close()
    return {"step_sec": (ends[-1] - ends[0]) / (last - 1), "plan_sec": sum(cpu_sec) / last}


def plan_alone(
    dataset: OpenDataset, order: Order, caches: Mapping[str, CacheConfig]
) -> dict[str, Any]:
    """Measure each policy over all tables, from an index decoded in memory."""
    index = dataset.index_for(order)
    figures: dict[str, Any] = {}
    for name, cache in caches.items():
        tables = dataset.job.data.tables
        steps = {table: list(indexed_steps(dataset, index, table)) for table in tables}
        start = time.thread_time()
        summaries = summarize_tables(CachePlan(steps, cache)).values()
        seconds = time.thread_time() - start
        accesses = sum(summary.num_accesses for summary in summaries)
        fetched = sum(summary.fetched_rows for summary in summaries)
        figures[name] = {
            "ns_per_access": seconds / accesses * 1e9,
            "accesses_per_step": accesses / order.num_steps,
            "hit_rate": 1 - fetched / accesses,
            "cache_rows": cache.rows,
        }
    return figures


def caches_of(dataset: OpenDataset, order: Order) -> dict[str, CacheConfig]:
    """Return the job's cache with both policies; Belady's is large enough for all tables."""
    index = dataset.index_for(order)
    belady = replace(dataset.job.train.cache, policy="belady")
    tables = dataset.job.data.tables
    required = required_rows((NextUses(dataset, index, table) for table in tables), belady)
    share = int(CACHE_SHARE * sum(num_unique_rows(dataset, table) for table in tables))
    return {
        "ttl": replace(dataset.job.train.cache, policy="ttl", rows=None),
        "belady": replace(belady, rows=max(1, required, share)),
    }


def measure_plan(dataset: OpenDataset, rounds: int, max_steps: int) -> dict[str, Any]:
    """Measure both policies; the result is the more expensive one."""
    order = order_of(dataset.job, dataset)
    caches = caches_of(dataset, order)
    alone = plan_alone(dataset, order, caches)
    sides = {name: partial(train_planned, dataset, c, max_steps) for name, c in caches.items()}
    runs = alternate(sides, rounds)
    policies = {name: alone[name] | medians(of) for name, of in runs.items()}
    costly = max(policies, key=lambda name: policies[name]["plan_sec"])
    return compared(
        [run["plan_sec"] for run in runs[costly]],
        [run["step_sec"] for run in runs[costly]],
        f"seconds per step: index and {costly} plan against the whole step",
        policies=policies,
    )


# Windows of the look-ahead.

WINDOWS = 1, 5, 25, 200, 1000
"""Steps that a row is kept for its next use; BagPipe's default is 200."""


def measure_windows(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Count the rows that each window fetches, and compare losses with those without a cache.

    The first row has the whole run, whose fetches are the first uses; caches of a limited size know
    the whole run, too.
    """
    kept = options.scratch or scratch
    kept.mkdir(parents=True, exist_ok=True)
    path = build_reuse(Path(options.shared_data), options.reuse_samples, kept)
    dataset = open_dataset(path)
    order = order_of(dataset.job, dataset)
    (table,) = dataset.job.data.tables
    num_rows = num_unique_rows(dataset, table)
    kinds = {"whole run": CacheConfig(policy="ttl", lookahead=order.num_steps, prefetch_steps=1)}
    for window in WINDOWS:
        if window < order.num_steps:
            kinds[f"{window} steps"] = replace(kinds["whole run"], lookahead=window)
    for share in options.shares:
        limit = CacheConfig(policy="belady", rows=round(share * num_rows), prefetch_steps=1)
        kinds[f"whole run, {share:.0%} of the rows"] = limit
    index = dataset.index_for(order)
    fetched: dict[str, float] = {}
    found: dict[str, Any] = {}
    for kind, cache in kinds.items():
        start = time.thread_time()
        plan = summarize(plan_table(indexed_steps(dataset, index, table), cache))
        seconds = time.thread_time() - start
        fetched[kind] = plan.fetched_rows
        found[kind] = compared(
            [plan.fetched_rows / order.num_steps],
            [fetched["whole run"] / order.num_steps],
            "rows fetched in a step, against a look-ahead over the whole run",
            accesses=plan.num_accesses / order.num_steps,
            most_cached=round(plan.peak_cache_rows / num_rows, 4),
            ns_per_access=round(seconds / plan.num_accesses * 1e9, 1),
        )
        report(kind, found[kind])
    found["losses"] = compare_losses(path, scratch, options.loss_steps)
    return found


def compare_losses(dataset: Path, scratch: Path, num_steps: int) -> dict[str, Any]:
    """Compare the losses of so many steps with a planned cache, and without one."""
    body = read_job(dataset / "job.yaml")
    body["train"]["cache"] = {"policy": "ttl", "lookahead": LOOKAHEAD, "prefetch_steps": 2}
    job = write_job_file(scratch / "losses", body, dataset / "job.yaml")
    losses: list[list[float]] = []
    for embedding in ("cached", "plain"):
        options = TrainOptions(embedding=embedding, steps=num_steps, fast=True)
        metrics = train_steps(job, dataset, scratch / embedding, options)
        losses.append([metric.loss for metric in metrics])
    ours, peer = losses
    differ = [step for step, (a, b) in enumerate(zip(ours, peer, strict=True)) if a != b]
    return compared(
        ours[-1:],
        peer[-1:],
        "loss of the last step, against training without a cache",
        steps=len(ours),
        first_difference=differ[0] if differ else None,
    )


# Memory of a plan.

COLUMN, STEP_SAMPLES = "item", 16_384


def build_table(num_rows: int, num_accesses: int, scratch: Path) -> Path:
    """Build a dataset of uniform accesses to one table; return its path."""
    ids = np.random.default_rng(0).integers(0, num_rows, num_accesses)
    log = write_id_log(scratch / "log", {COLUMN: ids}, num_accesses)
    data = {"oracle": {"batch_samples": STEP_SAMPLES}}
    rows = max(int(num_rows * CACHE_SHARE), 4 * STEP_SAMPLES)
    cache = {"policy": "belady", "rows": rows, "prefetch_steps": 2}
    train = {"batch_samples": STEP_SAMPLES, "cache": cache}
    job = write_id_job(scratch / "job", {COLUMN: num_rows}, data, train)
    return build_dataset(job, log, scratch / "dataset")


def plan_streaming(dataset: OpenDataset, index: Index, table: str) -> int:
    """Plan as the trainer does; return the fetched rows."""
    return plan_rows(indexed_steps(dataset, index, table), dataset)


def plan_decoded(dataset: OpenDataset, index: Index, table: str) -> int:
    """Plan over fully decoded lists and next uses; return the fetched rows."""
    return plan_rows(list(indexed_steps(dataset, index, table)), dataset)


def plan_rows(steps: Iterable[tuple[Any, Any]], dataset: OpenDataset) -> int:
    """Compute a plan; return its fetched rows."""
    return summarize(plan_table(steps, dataset.job.train.cache)).fetched_rows


TASKS = {"ours": plan_streaming, "decoded whole": plan_decoded}


def run_task(task: str, path: Path) -> dict[str, Any]:
    """Run one task in this process."""
    dataset = open_dataset(path)
    index = dataset.index_for(order_of(dataset.job, dataset))
    return measured(TASKS[task], dataset, index, f"table_{COLUMN}")


def measure_training(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure plans in trainings of the demo's job."""
    dataset = open_dataset(demo_dataset(scratch, options.demo_samples))
    return measure_plan(dataset, options.rounds, options.steps)


def measure_memory(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Build a dataset with one table, and plan its cache in both ways."""
    num_rows, num_accesses = options.rows, options.accesses
    dataset = build_table(num_rows, num_accesses, scratch)
    tasks = {task: in_process(run_task, task, dataset) for task in TASKS}
    assert tasks["ours"]["result"] == tasks["decoded whole"]["result"], "plans must be equal"
    unit = f"MB of memory besides imports, {num_rows} rows, {num_accesses} accesses"
    added = [max(1, tasks[task]["mb"]) for task in TASKS]
    return compared(added[:1], added[1:], unit, tasks=tasks)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("oracle", __doc__, rounds=3)
    options.add_parts(
        {
            "kernels": measure_kernels,
            "bytes": measure_bytes,
            "plan": measure_training,
            "memory": measure_memory,
            "windows": measure_windows,
        }
    )
    options.add_logs([*GOALS])
    options.add("--samples", 1 << 20, "accesses per table", small=1 << 15)
    options.add("--bagpipe", None, "checkout of uw-mad-dash/bagpipe")
    options.add("--demo-samples", 200_000, "of the log of `plan`", small=20_000)
    options.add("--steps", 1 << 30, "of each training of `plan`, at least 2", small=3)
    options.add("--rows", 2_000_000, "of the table of `memory`", small=100_000)
    options.add("--accesses", 8_000_000, "of `memory`", small=200_000)
    options.add("--reuse-samples", 10_000_000, "of the log of `windows`", small=200_000)
    options.add("--shares", (0.05, 0.1, 0.2), "cached rows of `windows`", small=(0.5,))
    options.add("--loss-steps", 1000, "of `windows`", small=20)
    options.add("--scratch", None, "folder to keep and reuse the dataset of `windows` in")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
